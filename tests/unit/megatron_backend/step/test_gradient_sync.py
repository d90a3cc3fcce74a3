"""Gradients added up on one rank; tests/multiprocess/ adds up those of several."""

from __future__ import annotations

import pytest
import torch

from slime_like.megatron_backend.step import gradient_sync
from slime_like.megatron_backend.step.gradient_sync import add_gradients_in_blocks


@pytest.mark.parametrize("block", [4, 1 << 18])
def test_blocks_add_up_to_the_same_bits(block, monkeypatch):
    """Two passes over a shape that blocks do not divide; the second gradient is not laid out as the first."""
    monkeypatch.setattr(gradient_sync, "_BLOCK", block)
    layer = torch.nn.Linear(3, 5, bias=False, dtype=torch.bfloat16)
    layer.weight.main_grad, expected = torch.zeros(5, 3), torch.zeros(5, 3)
    add_gradients_in_blocks([layer])
    for gradient in (torch.randn(5, 3), torch.randn(3, 5).t()):
        gradient = gradient.to(torch.bfloat16)
        layer.weight.grad_added_to_main_grad = False
        (layer.weight * gradient).sum().backward()
        assert layer.weight.grad_added_to_main_grad, "else Megatron's hook adds it once more"
        expected.add_(layer.weight.grad)
        layer.weight.grad = None  # as Megatron's hook does
    assert torch.equal(layer.weight.main_grad, expected) and expected.any()


def test_sums_of_the_gradients_type_are_left_to_megatron():
    layer = torch.nn.Linear(2, 2, bias=False)
    layer.weight.main_grad = torch.zeros(2, 2)
    add_gradients_in_blocks([layer])
    layer(torch.ones(1, 2)).sum().backward()
    assert not layer.weight.main_grad.any()
