"""All pipeline stages' HF tensors on every rank: each stage's go through the pipeline parallel group in buckets."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from megatron.core import parallel_state

from slime_like.weight_sync.buckets import Cutter, NamedTensor
from slime_like.weight_sync.in_engine.shm_slots import views
from slime_like.weight_sync.transports.slots import BucketSlot


def of_every_stage(tensors: Iterator[NamedTensor], max_bytes: int) -> Iterator[NamedTensor]:
    """Every stage's tensors, the first stage's first. Collective: every rank iterates to the end.

    tensors: this stage's, as export_hf gives them. Beside them one bucket of max_bytes is alive; what is yielded lies
    in it, and is to be used before the next one is asked for.
    """
    group = parallel_state.get_pipeline_model_parallel_group()
    if group.size() == 1:
        yield from tensors
        return
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    for stage in range(group.size()):
        slot = BucketSlot(device)
        source = torch.distributed.get_global_rank(group, stage)
        for mine in _packed(tensors, slot, max_bytes) if stage == group.rank() else itertools.repeat(None):
            table = _broadcast_object(mine, source, group)
            if table is None:
                break
            size = table[-1][-1]
            slot.reserve(size)
            if size:
                torch.distributed.broadcast(slot.memory[:size], src=source, group=group)
            yield from views(slot.memory, table, size)


def _packed(tensors: Iterator[NamedTensor], slot: BucketSlot, max_bytes: int) -> Iterator[list | None]:
    """Tables of buckets that lie in the slot, each until the next one is asked for; then None."""
    cutter = Cutter(max_bytes)
    slot.reserve(max_bytes)
    for name, tensor in tensors:
        if cutter.cuts_before(name, tensor):
            yield [entry.row() for entry in slot.entries]
            slot.clear(max_bytes)
            slot.reserve(max_bytes)
        slot.put(name, tensor)
        del tensor  # before the next one is gathered
    if slot.entries:
        yield [entry.row() for entry in slot.entries]
    yield None


def _broadcast_object(value: list | None, source: int, group: torch.distributed.ProcessGroup) -> list | None:
    """What the source gave, on every rank of the group."""
    box = [value]
    torch.distributed.broadcast_object_list(box, src=source, group=group)
    return box[0]
