"""The patch of one megatron module (0.16.1) that buffers of several buckets need, with when it can go."""

from __future__ import annotations


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


#: (module, patch, only without CUDA), as megatron.py lists its own.
BUFFER_PATCHES = (("megatron.core.distributed.param_and_grad_buffer", _patch_bucket_ends, False),)
