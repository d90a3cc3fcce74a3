"""Gradients added up on one rank; tests/multiprocess/ adds up those of several."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron.core.distributed import DistributedDataParallel

from slime_like.megatron_backend.step import gradient_sync
from slime_like.megatron_backend.step.gradient_sync import add_gradients_in_blocks


class Chunk(torch.nn.Module):
    """One weight, whose gradients Megatron's own hook takes, as its DistributedDataParallel registers it."""

    def __init__(self, dtype: torch.dtype, *, tied: bool = False, overlaps: bool = False):
        super().__init__()
        self.weight = weight = torch.nn.Parameter(torch.randn(5, 3, dtype=dtype))
        weight.main_grad, weight.grad_added_to_main_grad = torch.zeros(5, 3), False
        if tied:
            weight.zero_out_wgrad = True  # an output layer that is the embedding
        self.ddp_config = SimpleNamespace(overlap_grad_reduce=overlaps)
        self.heard: list = []
        ready = SimpleNamespace(register_grad_ready=lambda *_: self.heard.append(1))
        megatrons = SimpleNamespace(
            param_to_bucket_group={weight: ready}, ddp_config=self.ddp_config, force_all_reduce=False
        )
        self._accumulator = weight.expand_as(weight).grad_fn.next_functions[0][0]
        self._accumulator.register_hook(DistributedDataParallel._make_backward_post_hook(megatrons, weight))


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("block", [4, 1 << 18])
def test_each_gradient_is_added_once_to_the_same_bits(block, tied, overlaps, monkeypatch):
    """Two passes over a shape that blocks do not divide; the second gradient is not laid out as the first."""
    monkeypatch.setattr(gradient_sync, "_BLOCK", block)
    ours, megatrons = (Chunk(torch.bfloat16, tied=tied, overlaps=overlaps) for _ in range(2))
    add_gradients_in_blocks([ours])
    for gradient in (torch.randn(5, 3), torch.randn(3, 5).t()):
        for chunk in (ours, megatrons):
            (chunk.weight * gradient.to(torch.bfloat16)).sum().backward()
            assert chunk.weight.grad is None
    assert torch.equal(ours.weight.main_grad, megatrons.weight.main_grad) and ours.weight.main_grad.any()
    assert len(ours.heard) == len(megatrons.heard) == 2 * overlaps


def test_sums_of_the_gradients_type_are_left_to_megatron():
    chunk = Chunk(torch.float32)
    add_gradients_in_blocks([chunk])
    assert not chunk.weight._post_accumulate_grad_hooks
