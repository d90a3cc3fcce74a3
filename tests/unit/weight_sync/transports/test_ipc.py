"""Shared memory: what is written, that it is removed, and what the engine's loader refuses."""

# Covers slime_like.weight_sync.in_engine.intake too, which it does not import itself.

from __future__ import annotations

import base64
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from sglang_backend.fake_http import serve
from weight_sync.alive_bytes import Alive

from slime_like.errors import EngineError, WaitTimeout, WeightSyncError
from slime_like.records import EngineEndpoint
from slime_like.sglang_backend import shared_memory
from slime_like.sglang_backend.client import EngineClient
from slime_like.weight_sync.in_engine import shm_loader, shm_slots
from slime_like.weight_sync.shared_weights import SharedWeights
from slime_like.weight_sync.transports.channel import EngineRequests
from slime_like.weight_sync.transports.ipc import IpcPublisher
from slime_like.weight_sync.transports.registry import PublisherOptions
from slime_like.weight_sync.transports.sources import Sources

OK = (200, {"success": True})


class Model:
    """Takes weights as a model in SGLang does."""

    def __init__(self):
        self.got: dict[str, torch.Tensor] = {}

    def load_weights(self, pairs):
        self.got |= {name: tensor.clone() for name, tensor in pairs}


def publisher(
    url: str,
    buffer_bytes: int = 1 << 20,
    tp_size: int = 2,
    source: int = 0,
    sources: Sources | None = None,
    cards: tuple = (),
    shared: SharedWeights | None = None,
) -> IpcPublisher:
    endpoint = EngineEndpoint(index=0, url=url, tp_size=tp_size)
    return IpcPublisher(
        PublisherOptions(
            "ipc",
            (endpoint,),
            source,
            1 if sources is None else 2,
            buffer_bytes,
            5.0,
            None,
            "127.0.0.1",
            sources=sources,
            cards=cards,
            shared=shared,
        )
    )


@pytest.fixture(autouse=True)
def announced_folder(monkeypatch):
    monkeypatch.setenv(shm_loader.DIRECTORY_VARIABLE, shared_memory.shared_directory())


def engine_of(*models, seen=None):
    """What answers an engine's request: each rank loads in a thread of its own, as one of SGLang's processes would."""

    def answer(body):
        assert len(body["serialized_named_tensors"]) == len(models)
        named = [pickle.loads(base64.b64decode(text)) for text in body["serialized_named_tensors"]]
        if seen is not None:
            seen.append(json.loads(bytes(named[0][0][1].tolist())))
            (channel,) = seen[-1]["channels"]
            # nobody else gets in
            assert os.stat(os.path.dirname(channel)).st_mode & 0o077 == os.stat(channel).st_mode & 0o077 == 0
        with ThreadPoolExecutor() as pool:
            list(pool.map(shm_loader.load, models, named))
        return OK

    return {"/update_weights_from_tensor": answer}


def test_tensors_arrive_at_every_rank_in_one_request(monkeypatch):
    ranks, requests, files = [Model(), Model()], [], []
    find = shm_slots.tensors
    monkeypatch.setattr(shm_slots, "tensors", lambda path, *rest: files.append(path) or find(path, *rest))
    flat = torch.arange(12.0)
    tensors = [
        ("a", flat[:4].view(2, 2)),
        ("b", flat[4:8]),
        ("c", flat.view(3, 4).t()),
        ("d", torch.zeros(0, 2)),
        ("e", flat[:1].bfloat16()),
    ]
    with serve(engine_of(*ranks, seen=requests)) as server:
        sender = publisher(server.url, buffer_bytes=32)
        sender.connect()
        for version in (1, 2):
            flat += version
            report = sender.send(iter(tensors), version)
            for model in ranks:
                for name, tensor in tensors:
                    assert torch.equal(model.got[name], tensor)
        assert len(requests) == 2 and requests[0]["kind"] == "socket"
        folder = os.path.dirname(requests[0]["channels"][0])
        assert sorted(os.listdir(folder)) == ["slot-0", "slot-1"]
        assert sorted({os.path.basename(path) for path in files}) == ["slot-0", "slot-1"] and len(files) == 2 * 2 * 4
        sender.close()
    assert not os.path.exists(folder)
    assert report.num_tensors == 5 and report.num_bytes == 82


def test_each_rank_of_an_engine_hears_from_the_source_on_its_card_alone():
    """Two sources that each have everything, and an engine of two ranks, one on the card of each."""
    ranks, channels = [Model(), Model()], []
    host = Sources("127.0.0.1", 0, is_host=True, who="trainer source 0", timeout_s=5)
    known = [host, Sources("127.0.0.1", host.port, is_host=False, who="trainer source 1", timeout_s=5)]
    sent = [[(name, tensor + 10 * source) for name, tensor in TENSORS] for source in range(2)]

    def answer(body):
        named = [pickle.loads(base64.b64decode(text)) for text in body["serialized_named_tensors"]]
        channels.extend(json.loads(bytes(one[0][1].tolist()))["channels"] for one in named)
        with ThreadPoolExecutor() as pool:
            list(pool.map(shm_loader.load, ranks, named))
        return OK

    with serve({"/update_weights_from_tensor": answer}) as server, ThreadPoolExecutor() as pool:
        senders = [publisher(server.url, buffer_bytes=16, source=n, sources=known[n], cards=((0, 1),)) for n in (0, 1)]
        reports = list(pool.map(lambda n: senders[n].send(iter(sent[n]), 1), range(2)))
        assert [report.num_tensors for report in reports] == [6, 6]
        for sender in senders:
            sender.close()
    assert [len(mine) for mine in channels] == [1, 1] and channels[0] != channels[1]
    for model, tensors in zip(ranks, sent, strict=True):
        assert all(torch.equal(model.got[name], tensor) for name, tensor in tensors)


def test_no_more_than_two_buckets_are_alive(monkeypatch):
    monkeypatch.setattr("slime_like.weight_sync.transports.ipc.SLACK_BYTES", 4096)
    with serve(engine_of(Model(), Model())) as server:
        sender = publisher(server.url, buffer_bytes=100_000)
        sender.connect()
        alive = Alive(sender._slots)
        for version in (1, 2):
            sender.send(alive.stream([50_000, 10_000, 49_999, 1] * 10), version)
        assert 100_000 < alive.most <= 2 * 100_000
        sender.close()


TENSORS = [(f"t{number}", torch.full((2,), float(number))) for number in range(6)]


def test_a_refused_request_ends_the_sync_and_the_next_one_works():
    model, answers = Model(), [(400, {"success": False, "message": "no session"})]
    answer = engine_of(model)["/update_weights_from_tensor"]
    with serve({"/update_weights_from_tensor": lambda body: answers.pop() if answers else answer(body)}) as server:
        sender = publisher(server.url, buffer_bytes=16, tp_size=1)
        with pytest.raises(EngineError, match="no session"):
            sender.send(iter(TENSORS), 1)
        assert not model.got
        sender.send(iter(TENSORS), 1)
        assert all(torch.equal(model.got[name], tensor) for name, tensor in TENSORS)
        sender.close()


class Picky(Model):
    """Cannot load one of the tensors, once."""

    def __init__(self, name: str):
        super().__init__()
        self.refused = name

    def load_weights(self, pairs):
        pairs = dict(pairs)
        if self.refused in pairs:
            self.refused = ""
            raise RuntimeError("size mismatch for t3")
        super().load_weights(pairs.items())


def test_what_one_rank_cannot_load_is_told_and_ends_it_everywhere():
    ranks = [Model(), Picky("t3")]
    with serve(engine_of(*ranks)) as server:  # whose answer is that all is well: our loader must not raise
        sender = publisher(server.url, buffer_bytes=16)
        with pytest.raises(
            WeightSyncError,
            match="engine 0 at .*, rank 1: load bucket 3 of version 1: RuntimeError: size mismatch for t3",
        ):
            sender.send(iter(TENSORS), 1)
        sender.send(iter(TENSORS), 1)
        assert set(ranks[0].got) == set(ranks[1].got) == {name for name, _ in TENSORS}
        sender.close()


def test_an_engine_that_goes_away_is_named():
    def leaves(body):
        request = json.loads(bytes(pickle.loads(base64.b64decode(body["serialized_named_tensors"][0]))[0][1].tolist()))
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(request["channels"][0])
            line.sendall(b'{"engine": 0, "rank": 0}\n')
            line.recv(10)
        return 500, {"message": "the scheduler died"}

    with serve({"/update_weights_from_tensor": leaves}) as server:
        sender = publisher(server.url, tp_size=1)
        with pytest.raises(EngineError, match="engine 0.*500.*the scheduler died"):
            sender.send(iter(TENSORS), 1)
        sender.close()


def test_an_engine_that_loads_everything_but_never_answers_is_named():
    answered = threading.Event()
    with serve({"/update_weights_from_tensor": lambda body: (answered.wait(5), OK)[1]}) as server:
        client = EngineClient(EngineEndpoint(index=3, url=server.url), timeout_s=5)
        requests = EngineRequests([client], lambda client, rank: {}, 5.0, "trainer source 0", "load weights")
        with pytest.raises(
            WaitTimeout,
            match=(
                r"trainer source 0 waited \S+ s for engine 3 at .* during load weights. Last heard: every bucket was"
                r" loaded"
            ),
        ):
            requests.wait(0.1)
        answered.set()
        requests.wait(5)


def test_when_one_source_fails_engines_and_the_other_sources_stop():
    models = [Model(), Model()]
    host = Sources("127.0.0.1", 0, is_host=True, who="trainer source 0", timeout_s=5)
    known = [host, Sources("127.0.0.1", host.port, is_host=False, who="trainer source 1", timeout_s=5)]

    def broken():
        yield TENSORS[0]
        raise RuntimeError("no memory")

    def slow(tensors):
        for item in tensors:
            time.sleep(0.05)
            yield item

    with serve(engine_of(*models)) as server, ThreadPoolExecutor() as pool:
        senders = [publisher(server.url, buffer_bytes=16, source=number, sources=known[number]) for number in range(2)]
        first, second = pool.submit(senders[0].send, slow(TENSORS[:3]), 1), pool.submit(senders[1].send, broken(), 1)
        with pytest.raises(RuntimeError, match="no memory"):
            second.result(10)
        with pytest.raises(WeightSyncError, match="trainer source 0 stops: trainer source 1: RuntimeError: no memory"):
            first.result(10)
        reports = list(pool.map(lambda number: senders[number].send(TENSORS[number::2], 2), range(2)))
        assert [report.num_tensors for report in reports] == [3, 3]
        for model in models:
            assert all(torch.equal(model.got[name], tensor) for name, tensor in TENSORS)
        for sender in senders:
            sender.close()


class Adding(Model):
    """As SGLang's Gemma: adds 1 to its norms in place, in the mode in which its scheduler runs."""

    def __init__(self, *, in_inference: bool):
        super().__init__()
        self._in_inference = in_inference

    def load_weights(self, pairs):
        with torch.inference_mode(self._in_inference):
            pairs = list(pairs)
            for _, tensor in (pair for pair in pairs if "norm" in pair[0]):
                tensor += 1.0
            super().load_weights(pairs)


@pytest.mark.parametrize("in_inference", [False, True])
def test_what_lies_in_shared_memory_is_not_copied_and_never_changed_by_an_engine(in_inference):
    model, numbers = Adding(in_inference=in_inference), torch.arange(12.0)
    shared = SharedWeights(3 * 64)
    norm, weight, bias = shared.take(numbers), shared.take(numbers.view(3, 4)), shared.take(numbers.bfloat16())
    tensors = [("norm", norm), ("rows", weight[1:]), ("turned", weight.t()), ("bias", bias), ("own", numbers)]
    with serve(engine_of(model)) as server:
        sender = publisher(server.url, tp_size=1, shared=shared)
        for version in (1, 2, 3):
            for tensor in (norm, weight, bias, numbers):
                tensor += version
            before = {name: tensor.clone() for name, tensor in tensors}
            assert sender.send(iter(tensors), version).num_bytes == 48 + 32 + 48 + 24 + 48
            assert norm.equal(before["norm"]) and model.got["norm"].equal(norm + 1)
            for name in ("rows", "turned", "bias", "own"):
                assert model.got[name].equal(before[name]), (name, version)
        # The slots have had what could not be mapped only: what was turned, and what lies elsewhere.
        copied = {tuple(numbers.tolist()), tuple(weight.t().flatten().tolist())}
        held = [tuple(slot.memory[:48].view(torch.float32).tolist()) for slot in sender._slots]
        assert copied & set(held) and tuple(norm.tolist()) not in held
        sender.close()
    shared.close()


def test_full_shared_memory_is_an_error_and_not_a_signal(monkeypatch):
    sender = publisher("http://127.0.0.1:1", buffer_bytes=1 << 60)
    monkeypatch.setattr("slime_like.weight_sync.transports.ipc._HOST_SLOT_BYTES", 1 << 50)
    with pytest.raises(WeightSyncError, match=r"no room for a bucket.* are free.*--shm-size"):
        sender.send([("a", torch.zeros(2))], 1)
    sender.close()


def test_folder_of_a_killed_process_is_removed_by_the_next_one():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    left = os.path.join(shared_memory.make_shared_directory(), f"{child.pid}-source-0-x")
    os.mkdir(left)
    sender = publisher("http://127.0.0.1:1")
    sender.connect()
    assert not os.path.exists(left)
    sender.close()


def test_engine_on_another_host_is_refused():
    with pytest.raises(WeightSyncError, match="192.0.2.7.*not on this host"):
        publisher("http://192.0.2.7:30000").connect()


def test_loader_reads_only_from_the_announced_folder(tmp_path, monkeypatch):
    folder, outside = tmp_path / "in", tmp_path / "in-not"
    folder.mkdir()
    outside.write_text("x")
    (folder / "good").write_text("x")
    (folder / "link").symlink_to(outside)
    assert shm_slots.checked_path(str(folder / "good"), str(folder)) == str(folder / "good")
    for bad in (outside, folder / "link", folder / ".." / "in-not", folder):
        with pytest.raises(PermissionError):
            shm_slots.checked_path(str(bad), str(folder))
    with pytest.raises(PermissionError, match="not set"):
        shm_slots.checked_path(str(folder / "good"), None)


def test_names_shared_by_launcher_and_loader_agree():
    assert shm_loader.DIRECTORY_VARIABLE == shared_memory.DIRECTORY_VARIABLE
    module, _, function = shared_memory.WEIGHT_LOADER.rpartition(".")
    assert getattr(sys.modules[module], function) is shm_loader.load


def test_loader_imports_nothing_heavy():
    code = (
        "import sys, slime_like.weight_sync.in_engine.shm_loader; assert not {'torch', 'requests', 'safetensors',"
        " 'sglang'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_foreign_folder_in_our_place_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(shared_memory, "_ROOT", str(tmp_path))
    os.symlink(tmp_path, shared_memory.shared_directory())
    with pytest.raises(WeightSyncError, match="Fix: remove it"):
        shared_memory.make_shared_directory()
