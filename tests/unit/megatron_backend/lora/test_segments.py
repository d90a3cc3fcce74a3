"""Adapters that see some of a row's tokens each, on two tensor parallel ranks, with and without sequence parallelism:
outputs and every gradient are those of each adapter by itself. The ranks are threads of this process.
"""

# Covers slime_like.megatron_backend.lora.gains too.

from __future__ import annotations

import types

import pytest
import torch

from slime_like.config.lora import LoraConfig
from slime_like.config.lora_targets import COLUMN, ROW
from slime_like.megatron_backend.lora.adapter import AdapterPart, AdapterShape, AdapterSwitch, LoraAdapter
from slime_like.megatron_backend.lora.gains import added_by_segments
from slime_like.megatron_backend.lora.segments import Segment, sizes_within
from tests.unit.megatron_backend.lora.test_tensor_parallel import CASES, on_two_ranks

INPUTS, TOKENS = 8, 10
#: Tokens of each segment; the third has no adapter.
SIZES = (3, 5, 2)
SEGMENTS = (Segment("a", 0, 3), Segment("b", 3, 8), Segment("c", 8, 10))


def adapters_here(case, sequence_parallel: bool, matrices) -> list[LoraAdapter | None]:
    """On a rank of two: one of rank 3 with the case's modules, one of rank 5 with its first only, none."""
    split, layout, sizes, places = case
    local = tuple(size // 2 for size in sizes) if split == COLUMN else sizes
    config = types.SimpleNamespace(sequence_parallel=sequence_parallel, params_dtype=torch.float64, kv_channels=2)
    adapters: list[LoraAdapter | None] = []
    for rank, own_places, scale in ((3, places, 2.0), (5, places[:1], 0.5)):
        shape = AdapterShape(
            split=split, layout=layout, sizes=local, num_inputs=INPUTS // 2 if split == ROW else INPUTS, rank=rank,
            scale=scale, dropout=0.0, group=torch.distributed.group.WORLD,
        )  # fmt: skip
        parts = {place: AdapterPart(f"module.{place}th", shape, local[place], config) for place in own_places}
        adapter = LoraAdapter(shape, parts, config, AdapterSwitch(LoraConfig(lora_rank=rank)))
        with torch.no_grad():
            for matrix in adapter.parameters():
                matrix.copy_(matrices[: matrix.numel()].view(matrix.shape))
        adapters.append(adapter)
    return [*adapters, None]


def check(case, sequence_parallel: bool, rank: int, matrices, hidden, pull) -> None:
    shard = TOKENS // 2
    shares_inputs = sequence_parallel and case[0] != ROW
    shares_outputs = sequence_parallel and case[0] != COLUMN
    inputs = hidden.chunk(2, -1)[rank] if case[0] == ROW else hidden
    inputs = (inputs[rank * shard : (rank + 1) * shard] if shares_inputs else inputs).clone()
    input_sizes, output_sizes = (
        sizes_within(SEGMENTS, shard if shares else TOKENS, rank) for shares in (shares_inputs, shares_outputs)
    )
    assert sum(input_sizes) == len(inputs)
    results = []
    for way in ("each", "together"):
        given = inputs.clone().requires_grad_()
        adapters = adapters_here(case, sequence_parallel, matrices)
        if way == "together":
            gain = added_by_segments(adapters, given, input_sizes, output_sizes)
        else:
            wholes = [None if adapter is None else adapter(given) for adapter in adapters]
            rows = [
                torch.zeros_like(wholes[0])[:size] if whole is None else whole.split(output_sizes)[number]
                for number, (whole, size) in enumerate(zip(wholes, output_sizes, strict=True))
            ]
            gain = torch.cat(rows)
        width = gain.size(-1)
        (gain * pull[: len(gain), :, :width]).sum().backward()
        gradients = [m.grad for adapter in adapters if adapter is not None for m in adapter.parameters()]
        results.append([gain.detach(), given.grad, *gradients])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0.0)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sequence parallel"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[1]} {len(case[3])}")
def test_each_segment_gets_what_its_adapter_gives(case, sequence_parallel):
    generator = torch.Generator().manual_seed(7)
    matrices, hidden, pull = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((256,), (TOKENS, 1, INPUTS), (TOKENS, 1, 64))
    )
    on_two_ranks(lambda rank: check(case, sequence_parallel, rank, matrices, hidden, pull))


def test_nothing_is_added_where_no_segment_has_an_adapter():
    assert added_by_segments([None, None], torch.zeros(4, 1, 2), [1, 3], [1, 3]) is None


def test_a_share_of_the_row_has_its_part_of_the_segments():
    assert sizes_within(SEGMENTS, TOKENS, 1) == [3, 5, 2]
    assert sizes_within(SEGMENTS, 5, 0) == [3, 2, 0] and sizes_within(SEGMENTS, 5, 1) == [0, 3, 2]
