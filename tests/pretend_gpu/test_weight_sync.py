"""Weights from trainer to engines with both ends on pretended devices: handles to the engine rank on the same card,
broadcasts on streams of their own, and how often the host waits (slime_like.weight_sync.in_engine.devices).
"""

from __future__ import annotations

import base64
import datetime
import pickle
import sys
from pathlib import Path

import pytest
import torch

sys.path[:0] = [str(Path(__file__).parents[1] / "unit")]  # pytest's own pythonpath, in the pretending processes too

from sglang_backend.fake_http import serve  # noqa: E402
from weight_sync.fake_engines import Rank, bits  # noqa: E402

from slime_like.config.model import ModelConfig  # noqa: E402
from slime_like.records import EngineEndpoint  # noqa: E402
from slime_like.sglang_backend import shared_memory  # noqa: E402
from slime_like.sglang_backend.client import EngineClient  # noqa: E402
from slime_like.weight_sync.buckets import Digest, PublisherOptions  # noqa: E402
from slime_like.weight_sync.in_engine import shm_loader  # noqa: E402
from slime_like.weight_sync.proof.receipt import Receipt  # noqa: E402
from slime_like.weight_sync.transports.registry import make_publisher  # noqa: E402
from slime_like.weight_sync.transports.sources import Sources  # noqa: E402

pytestmark = pytest.mark.multiprocess

MODEL = ModelConfig(num_layers=30, hidden_size=64, num_attention_heads=4, ffn_hidden_size=64, vocab_size=128)
TIMEOUT_S = 20.0
OK = (200, {"success": True})


def weights(version: int) -> dict[str, torch.Tensor]:
    """30 layers, on the host."""
    tensors = {}
    for layer in range(MODEL.num_layers):
        numbers = torch.arange(64 * 64) * (layer + 1 + 100 * version) % 251
        tensors[f"model.layers.{layer}.self_attn.o_proj.weight"] = numbers.view(64, 64).bfloat16()
    return tensors | {"model.norm.weight": torch.arange(64.0) + version}


class DeviceModel:
    """Has its tensors on the device, and takes weights as a model in SGLang does."""

    def __init__(self) -> None:
        self.held = {name: torch.zeros_like(tensor, device="cuda") for name, tensor in weights(0).items()}

    def load_weights(self, pairs) -> None:
        """Copies."""
        for name, tensor in pairs:
            self.held[name].copy_(tensor)

    def parameters(self):
        """One, whose device is what is looked at."""
        yield torch.zeros(1, device="cuda")

    def named_parameters(self):
        """All."""
        yield from self.held.items()

    def named_buffers(self):
        """None."""
        yield from ()


class DeviceRank(Rank):
    """A rank whose model is on the device."""

    def __init__(self, rank: int):
        self._rank, self._groups, self._model = rank, {}, DeviceModel()

    def load(self, body: dict) -> tuple:
        """The request that lasts as long as the weights come in."""
        shm_loader.load(self._model, pickle.loads(base64.b64decode(body["serialized_named_tensors"][0])))
        return OK

    def join(self, body: dict) -> tuple:
        """Of a process group."""
        self._join(body)
        return OK


def meeting(place: dict) -> torch.distributed.TCPStore:
    """Where the ranks of a test leave each other notes; the first one keeps it."""
    return torch.distributed.TCPStore(
        place["master_address"],
        place["master_port"],
        is_master=place["rank"] == 0,
        timeout=datetime.timedelta(seconds=60),
        wait_for_workers=False,
    )


def be_engine(place: dict, store: torch.distributed.TCPStore) -> dict:
    """Serve until all was sent; what came, and the record."""
    from tests.pretend_gpu.record import RECORD

    rank = DeviceRank(0)
    info = {"custom_weight_loader": [shared_memory.WEIGHT_LOADER], "device": "cuda"}
    answers = {"/update_weights_from_tensor": rank.load, "/init_weights_update_group": rank.join}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(shm_loader.DIRECTORY_VARIABLE, shared_memory.shared_directory())
        with serve(answers | {"/server_info": (200, info), "/get_server_info": (200, info)}) as server:
            RECORD.clear()
            store.set(f"url {place['rank']}", server.url)
            store.wait(["all was sent"])
    return record() | {"held": {name: bits(tensor.cpu()) for name, tensor in rank._model.held.items()}}


def record() -> dict:
    """This process's, for another one."""
    from tests.pretend_gpu.record import RECORD

    events = [(event.kind, event.detail, event.thread) for event in RECORD.events]
    return {"events": events, "reads": dict(RECORD.reads), "uploads": dict(RECORD.uploads)}


def by_handle(place: dict, buffer_bytes: int) -> dict:
    """Rank 0 sends two versions to rank 1, the engine on its card, and proves them."""
    from tests.pretend_gpu.record import RECORD

    store = meeting(place)
    if place["rank"]:
        return be_engine(place, store)
    endpoint = EngineEndpoint(index=0, url=store.get("url 1").decode())
    options = PublisherOptions(
        "ipc", (endpoint,), 0, 1, buffer_bytes, TIMEOUT_S, None, "127.0.0.1", cards=((0,),)
    )  # fmt: skip
    publisher = make_publisher(options)
    receipt = Receipt(MODEL, [EngineClient(endpoint, timeout_s=TIMEOUT_S)], "source 0", options.readers)
    publisher.connect()
    answer: dict = {"digests": []}
    try:
        for version in (1, 2):
            tensors = {name: tensor.cuda() for name, tensor in weights(version).items()}
            RECORD.clear()
            digest = Digest()

            def watched(tensors=tensors, digest=digest):
                for name, tensor in receipt.watching(iter(tensors.items())):
                    digest.add(name, tensor, receipt.content)
                    yield name, tensor

            try:
                publisher.send(watched(), version, receipt)
            except Exception as error:  # noqa: BLE001 - looked at by the test
                return answer | {"error": f"{type(error).__name__}: {error}"}
            answer["digests"].append(digest.value)
            answer["engines"] = receipt.verify(TIMEOUT_S)
            answer[f"version {version}"] = record()
        answer["left"] = torch.cuda.memory_allocated() - sum(t.nbytes for t in weights(2).values())
    finally:
        store.set("all was sent", "")
        publisher.close()
    return answer


def waits(rows: dict) -> dict[str, int]:
    """How often our code made the host wait, for digests and for buckets."""
    lines = {line: count for line, count in rows["reads"].items() if "slime_like" in line}
    buckets = sum(count for line, count in lines.items() if line.endswith("synchronize"))
    return {"digest": sum(lines.values()) - buckets, "bucket": buckets}


def kinds(rows: dict, *wanted: str) -> list[dict]:
    return [detail for kind, detail, _ in rows["events"] if kind in wanted]


def test_an_engine_on_the_same_card_opens_the_trainers_own_memory(pretend):
    trainer, engine = pretend(by_handle, 2, 100_000, cards=["7", "7"])
    assert engine["held"] == {name: bits(tensor) for name, tensor in weights(2).items()}
    assert trainer["engines"] == 1 and trainer["digests"][0] != trainer["digests"][1]
    # A handle for each of two slots and sync, of 50 kB each, however many buckets there were (5 a sync); the engine has
    # opened each of them once, and nothing of the trainer's is left behind.
    for version in (1, 2):
        assert [share["bytes"] for share in kinds(trainer[f"version {version}"], "ipc_share")] == [50_000] * 2
    assert len(kinds(engine, "ipc_open")) == 4 and trainer["left"] == 0


def test_the_host_waits_for_a_device_a_few_times_a_sync_and_never_for_all_of_it(pretend):
    trainer, engine = pretend(by_handle, 2, 100_000, cards=["0", "0"])
    # Of 31 tensors in 5 buckets: once for the digest of what was sent, once for what the engine must hold; and for each
    # bucket until its bytes are there. In the engine, of two syncs: once each, and until each bucket was copied out.
    assert waits(trainer["version 2"]) == {"digest": 2, "bucket": 5}
    assert waits(engine) == {"digest": 2 * 1, "bucket": 2 * 5}
    assert not trainer["version 2"]["uploads"] and not {line for line in engine["uploads"] if "slime_like" in line}
    for rows in (trainer["version 2"], engine):
        assert "device" not in {detail["of"] for detail in kinds(rows, "synchronize")}


def test_an_engine_on_another_card_says_which_gpus_it_sees(pretend):
    trainer, _ = pretend(by_handle, 2, 100_000, cards=["0", "1"])
    assert trainer["error"].startswith("WeightSyncError: engine 0 at ")
    assert "GPU-pretended-0, and this process sees GPU-pretended-1" in trainer["error"]


def by_broadcast(place: dict) -> dict:
    """Ranks 0 and 1 are two pipeline stages, ranks 2 and 3 engines."""
    from tests.pretend_gpu.record import RECORD

    store = meeting(place)
    if place["rank"] >= 2:
        return be_engine(place, store)
    rank = place["rank"]
    endpoints = tuple(EngineEndpoint(index=n, url=store.get(f"url {2 + n}").decode()) for n in range(2))
    if rank == 0:
        sources = Sources("127.0.0.1", 0, is_host=True, who="trainer source 0", timeout_s=TIMEOUT_S)
        store.set("sources", str(sources.port))
    else:
        port = int(store.get("sources"))
        sources = Sources("127.0.0.1", port, is_host=False, who="trainer source 1", timeout_s=TIMEOUT_S)
    options = PublisherOptions(
        "broadcast", endpoints, rank, 2, 40_000, TIMEOUT_S, None, "127.0.0.1", sources=sources
    )  # fmt: skip
    publisher = make_publisher(options)
    if rank == 1:
        store.wait(["connected 0"])
    publisher.connect()
    store.set(f"connected {rank}", "")
    store.wait(["connected 1"])
    RECORD.clear()
    tensors = {name: tensor.cuda() for name, tensor in list(weights(1).items())[rank::2]}
    publisher.send(iter(tensors.items()), 1)
    seen = record()
    store.set(f"sent {rank}", "")
    store.wait(["sent 0", "sent 1"])
    if rank == 0:
        store.set("all was sent", "")
    store.wait(["all was sent"])
    return seen


@pytest.fixture(scope="module")
def broadcast(pretend) -> list[dict]:
    """What two stages and two engines did."""
    return pretend(by_broadcast, 4)


def test_streams_from_two_stages_never_wait_for_each_other(broadcast):
    """A wait for the whole device in one receiving thread would be one for the other stage's kernel, which waits for
    the other engine, whose thread may be waiting for us.
    """
    for engine in broadcast[2:]:
        assert engine["held"] == {name: bits(tensor) for name, tensor in weights(1).items()}
        streams: dict[str, set] = {}
        waits: dict[str, set] = {}
        for kind, detail, thread in engine["events"]:
            if kind == "collective":
                streams.setdefault(thread, set()).add(detail["stream"])
            elif kind == "synchronize":
                waits.setdefault(thread, set()).add(detail["of"])
        receivers = [thread for thread in streams if thread.startswith("weights from ")]
        assert len(receivers) == 2 and all(len(streams[thread]) == 1 for thread in receivers)
        first, second = (streams[thread] for thread in receivers)
        assert not first & second and "default" not in first | second
        assert [waits[thread] for thread in receivers] == [first, second]
        assert "device" not in set().union(*waits.values())


def test_a_stage_gathers_on_another_stream_than_it_sends_on(broadcast):
    for trainer in broadcast[:2]:
        sends = {detail["stream"] for detail in kinds(trainer, "collective")}
        filled = kinds(trainer, "record_event")
        assert len(sends) == 1 and "default" not in sends
        # Each bucket's bytes are waited for by the stream that sends them, and by nobody else.
        assert len(filled) > 2 and {detail["stream"] for detail in filled} == {"default"}
        waited = kinds(trainer, "wait_event")
        assert {detail["event"] for detail in filled} == {detail["on"] for detail in waited}
        assert {detail["stream"] for detail in waited} == sends
        assert {detail["of"] for detail in kinds(trainer, "synchronize")} == sends
