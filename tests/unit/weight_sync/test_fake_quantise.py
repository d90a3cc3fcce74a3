"""Rounding to int4 against a plain loop in float64, and what engines are sent."""

from __future__ import annotations

import pytest
import torch

from slime_like.weight_sync.fake_quantise import over_linear, rounded_to_int4

LINEAR, NORM = "model.layers.0.mlp.up_proj.weight", "model.layers.0.input_layernorm.weight"


def by_loops(weight: torch.Tensor, group: int) -> list[list[float]]:
    rows = []
    for row in weight.double().tolist():
        rounded = []
        for start in range(0, len(row), group):
            part = row[start : start + group]
            scale = max(abs(number) for number in part) / 7
            rounded += [round(number / scale) * scale for number in part]
        rows.append(rounded)
    return rows


@pytest.mark.parametrize("group", [4, 12])
def test_each_group_has_fifteen_numbers(group):
    weight = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))
    rounded = rounded_to_int4(weight, group)
    assert (rounded.double() - torch.tensor(by_loops(weight, group), dtype=torch.float64)).abs().max() < 1e-6
    parts = rounded.reshape(5, -1, group)
    assert torch.equal(parts.abs().amax(-1), weight.reshape(5, -1, group).abs().amax(-1)), "the largest stays"
    steps = parts * 7 / parts.abs().amax(-1, keepdim=True)
    assert (steps - steps.round()).abs().max() < 1e-5


def test_by_hand():
    weight = torch.tensor([[7.0, 3.4, -0.4, -7.0], [0.0, 0.0, 1.4, -0.3]])
    assert rounded_to_int4(weight, 2).tolist()[0] == [7.0, 3.0, 0.0, -7.0]
    assert rounded_to_int4(weight, 2).tolist()[1] == pytest.approx([0.0, 0.0, 1.4, -0.4])  # -1.5 steps: to the even one


def test_rounding_again_changes_nothing_in_fp32():
    once = rounded_to_int4(torch.randn(8, 64, generator=torch.Generator().manual_seed(1)), 32)
    assert (rounded_to_int4(once, 32) - once).abs().max() < 1e-6


def test_columns_between_groups_can_be_cut():
    weight = torch.randn(6, 32, generator=torch.Generator().manual_seed(2)).bfloat16()
    halves = [rounded_to_int4(half, 8) for half in weight.chunk(2, 1)]
    assert halves[0].dtype == torch.bfloat16 and torch.equal(torch.cat(halves, 1), rounded_to_int4(weight, 8))


def test_only_linear_layers_are_rounded():
    weight = torch.randn(4, 4, generator=torch.Generator().manual_seed(3))
    sent = dict(over_linear([(LINEAR, weight), (NORM, weight[0]), ("lm_head.weight", weight)], 4))
    assert torch.equal(sent[LINEAR], rounded_to_int4(weight, 4)) and not torch.equal(sent[LINEAR], weight)
    assert torch.equal(sent[NORM], weight[0]) and sent["lm_head.weight"] is weight
