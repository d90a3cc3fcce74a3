"""A checkpoint of layers with a state of their own (transformer-engine's) read by layers without, and the reverse."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

from slime_like.errors import CheckpointError
from slime_like.megatron_backend.checkpoint.layer_state import load_weights, without_absent_layer_state
from slime_like.megatron_backend.checkpoint.reader import checked_copy
from slime_like.weight_sync.stores import meet_in_file

WEIGHT = torch.arange(6.0).reshape(2, 3)


class Plain(torch.nn.Module):
    """A layer without a state of its own."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(2, 3))

    def sharded(self) -> dict:
        return {"linear.weight": ShardedTensor.from_rank_offsets("linear.weight", self.weight.data)}


class WithState(Plain):
    """As transformer-engine's: its state is what it was last given, empty at first."""

    def __init__(self):
        super().__init__()
        self.given: object = torch.empty(0, dtype=torch.uint8)

    def get_extra_state(self) -> object:
        return self.given

    def set_extra_state(self, state: object) -> None:
        self.given = state

    def sharded(self) -> dict:
        return super().sharded() | {"linear._extra_state": ShardedObject("linear._extra_state", self.given, (1,), (0,))}


class Chunk(torch.nn.Module):
    def __init__(self, layer: Plain):
        super().__init__()
        self.linear = layer

    def sharded(self) -> dict:
        return {"model": self.linear.sharded()}


@pytest.fixture
def world_of_one(tmp_path: Path) -> Iterator[None]:
    store = meet_in_file("", world_size=1, timeout_s=10.0)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def saved(folder: Path, layer: Plain) -> str:
    folder.mkdir()
    layer.weight.data.copy_(WEIGHT)
    dist_checkpointing.save(Chunk(layer).sharded(), str(folder))
    return str(folder)


def load(path: str, layer: Plain) -> None:
    chunk = Chunk(layer)
    with checked_copy(path, chunk.sharded()) as copy:
        load_weights(chunk, dist_checkpointing.load(without_absent_layer_state(chunk.sharded(), copy), copy)["model"])


@pytest.mark.parametrize("reader", [Plain, WithState])
@pytest.mark.parametrize("writer", [Plain, WithState])
def test_either_kind_is_read_by_either(world_of_one, tmp_path: Path, writer: type[Plain], reader: type[Plain]):
    layer = reader()
    load(saved(tmp_path / "checkpoint", writer()), layer)
    assert torch.equal(layer.weight, WEIGHT)


def test_a_state_that_is_there_is_loaded(world_of_one, tmp_path: Path):
    path, layer = saved(tmp_path / "checkpoint", WithState()), WithState()
    layer.given = "of another run"
    load(path, layer)
    assert isinstance(layer.given, torch.Tensor) and layer.given.numel() == 0


def test_weights_are_still_asked_for():
    with pytest.raises(CheckpointError, match=r"has no 'linear\.weight' \(1 of"):
        load_weights(Chunk(WithState()), {"linear._extra_state": None})
    with pytest.raises(CheckpointError, match=r"no place for, 'linear\.bias'"):
        load_weights(Chunk(Plain()), {"linear.weight": WEIGHT, "linear.bias": WEIGHT, "linear._extra_state": None})
