"""Linear layers that compute with weights rounded to int4, and train the weights that are rounded (quantisation-aware
training with a straight-through gradient, arXiv:1308.3432).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from slime_like.errors import ConfigError
from slime_like.megatron_backend.model.layer_spec import ReplicatedLinear
from slime_like.weight_sync.fake_quantise import rounded_to_int4

_LINEAR = (ColumnParallelLinear, RowParallelLinear, ReplicatedLinear)


class StraightThrough(torch.autograd.Function):
    """Rounds a weight; its gradient is the rounded one's."""

    @staticmethod
    def forward(context: Any, weight: torch.Tensor, group: int) -> torch.Tensor:
        """[N, K]"""
        return rounded_to_int4(weight, group)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """As it came."""
        return gradient, None


def compute_in_int4(chunk: GPTModel, group: int) -> None:
    """Round the weights of attention, MLPs and experts in every forward pass of this chunk, scoring passes too.

    Raises ConfigError for layers that are not torch's, and for columns that are no whole groups on this rank.
    """
    problems = []
    for name, module in chunk.decoder.layers.named_modules():
        if isinstance(module, _LINEAR):
            columns = module.weight.shape[1]
            if columns % group:
                problems.append(
                    f"--fake-quantization-group-size {group}: {name} has {columns} columns on a rank, no whole"
                    " number of groups. Fix: a size that divides them, or fewer tensor parallel ranks."
                )
            _round_weight_of(module, group)
        elif "router" not in name and any(p.dim() > 1 for p in module.parameters(recurse=False)):
            problems.append(
                f"--fake-quantization: {name} is a {type(module).__name__}, and only torch's layers can be given"
                " rounded weights. Fix: --attention-backend local."
            )
    if problems:
        raise ConfigError(problems[:1])


def _round_weight_of(linear: torch.nn.Module, group: int) -> None:
    """Let a layer find the rounded weight where it looks for its own, while it computes."""
    plain = linear.forward

    def forward(*args, **kwargs):
        weight = linear._parameters["weight"]
        # The parameter keeps its place: optimizers and gradient buffers know it, and not what stands in for it.
        linear._parameters["weight"] = StraightThrough.apply(weight, group)
        try:
            return plain(*args, **kwargs)
        finally:
            linear._parameters["weight"] = weight

    linear.forward = forward
