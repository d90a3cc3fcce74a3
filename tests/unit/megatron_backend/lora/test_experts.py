"""Adapters of a rank's experts at once are those of each expert for its tokens."""

from __future__ import annotations

import pytest
import torch

from slime_like.megatron_backend.lora.experts import ExpertAdapters, adapters_of
from tests.unit.megatron_backend.lora.toy import adapter_on, group_of_one

INPUTS = 16


def adapters(group, rank: int) -> list:
    some = []
    for seed in range(4):
        adapter, _ = adapter_on(
            group, (8, 8), {0: "gate_proj", 1: "up_proj"}, num_inputs=INPUTS, lora_rank=rank, lora_alpha=3.0 * rank
        )
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for matrix in adapter.parameters():
                matrix.copy_(torch.randn(matrix.shape, generator=generator))
        some.append(adapter)
    return some


@pytest.mark.parametrize("rank", [1, 3, 8])
@pytest.mark.parametrize("sizes", [[3, 4, 2, 5], [0, 9, 0, 1], [0, 0, 0, 0]], ids=str)
def test_each_expert_s_tokens_get_what_its_adapter_gives(sizes, rank):
    generator = torch.Generator().manual_seed(9)
    hidden = torch.randn(sum(sizes), INPUTS, generator=generator)
    pull = torch.randn(sum(sizes), 16, generator=generator)
    with group_of_one() as group:
        results = []
        for way in ("each", "at once"):
            some, given = adapters(group, rank), hidden.clone().requires_grad_()
            whole = ExpertAdapters(some)
            if way == "each":
                gain = torch.cat([one(part) for one, part in zip(some, given.split(sizes), strict=True)])
            else:
                gain = whole(given, sizes)
            (gain * pull).sum().backward()
            results.append([gain.detach(), given.grad, *(matrix.grad for matrix in whole.parameters())])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-5)


def test_switched_off_they_add_nothing():
    with group_of_one() as group:
        one, switch = adapter_on(group, (8,), {0: "down_proj"}, num_inputs=INPUTS)
        whole = ExpertAdapters([one])
        with switch.off():
            assert whole(torch.ones(2, INPUTS), [2]) is None
        assert adapters_of(whole) == [one] == adapters_of(one)
