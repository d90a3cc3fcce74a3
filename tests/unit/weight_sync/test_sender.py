"""A trainer rank's part of a sync, over one rank in this process and an engine of answers.

Which address engines are told to connect to.
"""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from sglang_backend.fake_http import serve

from slime_like.config.quantisation import SCHEMES
from slime_like.config.run import RunConfig
from slime_like.config.sync import SyncConfig
from slime_like.errors import WeightSyncError
from slime_like.records import EngineEndpoint, WeightsRef
from slime_like.utils.net import own_address
from slime_like.weight_sync.delta.receiver_client import start_receiver
from slime_like.weight_sync.quantise import quantise
from slime_like.weight_sync.ranks import RankPlace
from slime_like.weight_sync.sender import Gathering, WeightSender, source_address
from slime_like.weight_sync.session import PublishOrder, run_session

WEIGHTS = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4)}
ONE_RANK = RankPlace(source=0, num_sources=1, rank_in_source=0, num_gatherers=1)


@pytest.fixture
def world() -> Iterator[None]:
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture
def engine() -> Iterator:
    """It reports the version that it was told, and notes which files it was told to load."""
    state: dict = {"version": "default", "loaded": {}}
    good = (200, {"success": True})

    def load(body):
        state["loaded"] = {
            key: tensor
            for path in Path(body["model_path"]).glob("*.safetensors")
            for key, tensor in load_file(path).items()
        }
        return good

    answers = {
        **dict.fromkeys(
            ["/pause_generation", "/flush_cache", "/begin_weight_update", "/end_weight_update", "/continue_generation"],
            good,
        ),
        "/update_weights_from_disk": load,
        "/update_weight_version": lambda body: (state.update(version=body["new_version"]), good)[1],
        "/model_info": lambda body: (200, {"weight_version": state["version"]}),
    }
    with serve(answers) as server:
        yield server, state


def order_of(server, folder, version: int = 1) -> PublishOrder:
    endpoints = (EngineEndpoint(index=0, url=server.url),)
    weights = WeightsRef(version=version)
    return PublishOrder(
        weights=weights,
        endpoints=endpoints,
        transport="disk",
        timeout_s=5,
        directory=str(folder),
        compares_digests=False,
    )


def sender_of(order, tensors=None, sync=None, names=WEIGHTS) -> WeightSender:
    sent = WEIGHTS if tensors is None else tensors
    gathering = Gathering(
        place=ONE_RANK, tensors=lambda: iter(sent.items()), names=frozenset(names), master_address="127.0.0.1"
    )
    return WeightSender(RunConfig(sync=sync or SyncConfig()), order, gathering)


@pytest.mark.usefixtures("world")
def test_whole_syncs_over_one_connection(engine, tmp_path):
    server, state = engine
    order = order_of(server, tmp_path)
    sender = sender_of(order)
    digests = []
    for version in (1, 2):
        receipt = run_session(order_of(server, tmp_path, version), sender)
        assert (str(receipt.weights), receipt.transport, receipt.num_tensors, receipt.num_bytes) == (
            f"base@{version}",
            "disk",
            2,
            40,
        )
        assert receipt.delta is None and state["version"] == str(version)
        assert state["loaded"].keys() == WEIGHTS.keys() and all(
            torch.equal(state["loaded"][name], tensor) for name, tensor in WEIGHTS.items()
        )
        digests.append(receipt.digest)
    assert digests[0] == digests[1] and sender.is_connected
    sender.close()
    assert not sender.is_connected


@pytest.mark.usefixtures("world")
def test_deltas_go_on_to_other_engines_and_what_has_a_connection_makes_it_anew(engine, tmp_path):
    server, state = engine
    disk = order_of(server, tmp_path)
    alone = sender_of(disk)
    run_session(disk, alone)
    assert not alone.redirect(dataclasses.replace(disk, endpoints=(*disk.endpoints, *disk.endpoints)))
    receiver = start_receiver(str(tmp_path / "copy"), log_path=str(tmp_path / "receiver.log"), timeout_s=30)
    beside = {"receiver_url": receiver.url, "receiver_key": receiver.key}
    both = tuple(EngineEndpoint(index=index, url=server.url, **beside) for index in range(2))
    first = dataclasses.replace(disk, endpoints=both, transport="delta", directory=str(tmp_path / "sent"))
    try:
        sender = sender_of(first)
        assert not sender.redirect(dataclasses.replace(first, endpoints=both[:1])), "nothing was connected yet"
        full = []
        for version, endpoints in enumerate((both, both[:1], both[:1], both), start=1):
            order = dataclasses.replace(first, endpoints=endpoints, weights=WeightsRef(version=version))
            assert version == 1 or sender.route == order.route or sender.redirect(order)
            receipt = run_session(order, sender)
            full.append(receipt.delta.full_engines)
            assert state["version"] == str(version) and state["loaded"].keys() == WEIGHTS.keys()
        assert full == [{0, 1}, set(), set(), set()], "what was sent last stays known; one receiver serves both"
        other_way = dataclasses.replace(first, endpoints=both[:1], timeout_s=9)
        assert not sender.redirect(other_way)
        sender.close()
    finally:
        receiver.close()


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        ({"a": WEIGHTS["a"]}, r"weight sync \(disk\): b was not sent \(1 of 2 tensors\)"),
        ({**WEIGHTS, "c": torch.ones(1)}, r"c is not of this model \(1 of 2 tensors\)"),
    ],
)
def test_every_tensor_of_the_model_and_no_other(engine, tmp_path, tensors, problem):
    server, state = engine
    order = order_of(server, tmp_path)
    with pytest.raises(WeightSyncError, match=problem):
        run_session(order, sender_of(order, tensors))
    assert state["loaded"] == {} and state["version"] == "default" and "/continue_generation" not in server.paths


@pytest.mark.usefixtures("world")
def test_what_the_users_function_makes_is_sent(engine, tmp_path):
    server, state = engine
    order, path = order_of(server, tmp_path), "slime_like.weight_sync.transform.to_bf16"
    receipt = run_session(order, sender_of(order, sync=SyncConfig(custom_weight_transform_path=path)))
    assert receipt.num_bytes == 20 and {tensor.dtype for tensor in state["loaded"].values()} == {torch.bfloat16}


MATRIX, NORM = "model.layers.0.mlp.up_proj.weight", "model.norm.weight"
LAYER = {MATRIX: torch.randn(4, 8, generator=torch.Generator().manual_seed(0)), NORM: torch.ones(8)}


@pytest.mark.usefixtures("world")
@pytest.mark.parametrize("path", [None, "slime_like.weight_sync.transform.to_bf16"])
def test_eight_bits_are_made_of_what_the_users_function_made(engine, tmp_path, path):
    server, state = engine
    order = order_of(server, tmp_path)
    sync = SyncConfig(rollout_quantization="int8", custom_weight_transform_path=path)
    receipt = run_session(order, sender_of(order, LAYER, sync, LAYER))
    loaded = state["loaded"]
    assert loaded.keys() == {MATRIX, f"{MATRIX}_scale", NORM} and receipt.num_tensors == 3
    rounded = LAYER[MATRIX] if path is None else LAYER[MATRIX].bfloat16()
    for name, tensor in quantise(MATRIX, rounded, SCHEMES["int8"]):
        assert loaded[name].dtype == tensor.dtype and torch.equal(loaded[name], tensor)
    assert loaded[NORM].dtype == (torch.float32 if path is None else torch.bfloat16)
    assert receipt.num_bytes == 32 + 4 * 4 + 8 * loaded[NORM].element_size()


def test_engines_here_are_told_the_runs_own_address():
    assert source_address(["http://127.0.0.1:1", "http://localhost:2"], "127.0.0.1") == "127.0.0.1"
    assert source_address(["http://[::1]:1"], "127.0.0.1") == "127.0.0.1"
    assert source_address([], "::1") == "::1"


def test_one_engine_elsewhere_is_told_an_address_that_it_can_reach():
    """A route is looked up, nothing is sent: 192.0.2.77 is an address of documentation (RFC 5737)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.77", 9))
            expected = probe.getsockname()[0]
        except OSError:  # a machine without any network
            expected = "127.0.0.1"
    assert (
        source_address(["http://127.0.0.1:1", "https://192.0.2.77:2"], "127.0.0.1")
        == expected
        == own_address("192.0.2.77")
    )
