"""The patches of the megatron modules (0.16.1) that move weights and gradients about, each with when it can go."""

from __future__ import annotations

from collections.abc import Callable

import torch


def _patch_bucket_ends(module) -> None:
    """optimizer/distrib_optimizer.py:1118 lays the buckets' state end to end without the padding between them, and
    :1494 then looks for each parameter where it lies with that padding: a checkpoint's moments are shifted by as many
    elements as a bucket's end was padded (megatron warns: "range exceeds unpadded buffer"). That happens wherever a
    buffer has several buckets and one of them is no multiple of lcm(data parallel size, 128): embeddings that two
    stages share, overlapping reductions. So all padding but the last counts as elements. Goes when both places agree.
    """
    cls = module._ParamAndGradBuffer
    make = cls.__init__

    def __init__(self, *args, **kwargs):
        make(self, *args, **kwargs)
        for bucket in self.buckets[:-1]:
            bucket.numel_unpadded = bucket.grad_data.numel()
        self.numel_unpadded = sum(bucket.numel_unpadded for bucket in self.buckets)

    cls.__init__ = __init__


def _patch_alone(module) -> None:
    """:285 and :443 gather and reduce also where a rank is alone in its group, in place. There is nothing to do, but
    gloo copies the buffer, twice: of 135 M parameters that is 0.75 s of a train step of 4.7 s (two CPU cores). Goes
    when megatron asks for the group's size, or gloo sees that input and output are one.
    """
    for name in ("dist_all_gather_func", "dist_reduce_scatter_func"):
        setattr(module, name, _unless_alone(getattr(module, name)))


def _unless_alone(collective: Callable) -> Callable:
    def call(output, own, *args, group, **options):
        if group.size() == 1 and output.data_ptr() == own.data_ptr():
            return None
        return collective(output, own, *args, group=group, **options)

    return call


def _patch_scale(module) -> None:
    """utils.py:1212, which clips gradients where transformer-engine and apex are missing, scales into new memory and
    copies it back. The same numbers in place: 135 M parameters in 0.03 s instead of 0.09. Goes when upstream does so.
    """

    def scale_in_place(chunk_size, noop_flag, tensor_lists, scale) -> None:
        for source, target in zip(*tensor_lists, strict=True):
            torch.mul(source, scale, out=target)

    module.local_multi_tensor_scale = scale_in_place


#: (module, patch, only without CUDA), as megatron.py lists its own.
BUFFER_PATCHES = (
    ("megatron.core.distributed.param_and_grad_buffer", _patch_bucket_ends, False),
    ("megatron.core.distributed.param_and_grad_buffer", _patch_alone, True),
    ("megatron.core.utils", _patch_scale, False),
)
