"""What passes between tensor parallel ranks, each with the gradient's way back, and marks of split parameters."""

from __future__ import annotations

import torch
import torch.distributed as dist


class CudaRNGStatesTracker:
    """Megatron derives its own from it, and uses that with --te-rng-tracker."""

    def reset(self) -> None:
        """Forget all states."""
        self.states_: dict = {}


def checkpoint(*_, **__):
    """Recomputation, which Megatron does by this with fp8 only."""
    raise NotImplementedError("transformer-engine's recomputation is not pretended")


def mark_split(parameter: torch.Tensor, dim: int) -> None:
    """As the real one marks every matrix, also those that no ranks share."""
    parameter.tensor_model_parallel = True
    parameter.partition_dim = dim
    parameter.partition_stride = 1


def _summed(tensor: torch.Tensor, group) -> torch.Tensor:
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _gathered(tensor: torch.Tensor, group) -> torch.Tensor:
    local = tensor.contiguous()
    parts = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(parts, local, group=group)
    return torch.cat(parts)


def _own_share(tensor: torch.Tensor, group) -> torch.Tensor:
    return _summed(tensor, group).chunk(group.size())[group.rank()]


_WAYS = {"copy": (lambda x, _: x.view_as(x), _summed), "sum": (_summed, lambda x, _: x)}
_WAYS |= {"gather": (_gathered, _own_share), "scatter": (_own_share, _gathered)}


class _Between(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, group, way):
        ctx.group, ctx.way = group, way
        return _WAYS[way][0](tensor, group)

    @staticmethod
    def backward(ctx, gradient):
        return _WAYS[ctx.way][1](gradient, ctx.group), None, None


def before(hidden: torch.Tensor, layer) -> torch.Tensor:
    """A layer's input [tokens, …, inputs] as its product takes it."""
    if layer.parallel_mode != "column" or layer.tp_size == 1:
        return hidden
    return _Between.apply(hidden, layer.tp_group, "gather" if layer.sequence_parallel else "copy")


def after(output: torch.Tensor, layer) -> torch.Tensor:
    """A layer's product as it leaves the layer."""
    if layer.parallel_mode != "row" or layer.tp_size == 1:
        return output
    return _Between.apply(output, layer.tp_group, "scatter" if layer.sequence_parallel else "sum")


activation_recompute_forward = checkpoint  # of fp8, too
