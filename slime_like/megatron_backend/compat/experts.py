"""The patches of single megatron modules (0.16.1) that mixture of experts needs, each with when it can go."""

from __future__ import annotations

import torch


def _patch_router_gemm(module) -> None:
    """transformer/moe/moe_utils.py:1192 asks whether te_general_gemm is None, which it never defines without
    transformer-engine (NameError in every router). Goes when the failed import sets it.
    """
    module.__dict__.setdefault("te_general_gemm", None)


def _patch_token_counts(module) -> None:
    """transformer/moe/moe_utils.py:1093 turns only CUDA tensors into NumPy arrays, and all_to_all_single takes no
    tensors for the sizes of its parts. Goes when it looks at as_numpy for CPU tensors too.
    """

    def maybe_move_tensor_to_cpu(tensor, as_numpy: bool = False, record_stream: bool = False):
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    module.maybe_move_tensor_to_cpu = maybe_move_tensor_to_cpu


def _patch_uneven_parts(module) -> None:
    """tensor_parallel/mappings.py:150,205 gather and scatter parts of different lengths (tokens of experts that are
    split over tensor parallel ranks), which gloo refuses. Goes when gloo takes them.
    """
    gather, scatter = module._gather_along_first_dim, module._reduce_scatter_along_first_dim

    def gather_parts(input_, group, output_split_sizes=None, use_global_buffer=False):
        if output_split_sizes is None or group.size() == 1:
            return gather(input_, group, output_split_sizes, use_global_buffer)
        parts = []
        for rank, length in enumerate(output_split_sizes):
            part = input_.contiguous() if rank == group.rank() else input_.new_empty((int(length), *input_.shape[1:]))
            torch.distributed.broadcast(part, torch.distributed.get_global_rank(group, rank), group=group)
            parts.append(part)
        return torch.cat(parts)

    def scatter_parts(input_, group, input_split_sizes=None, use_global_buffer=False):
        if input_split_sizes is None or group.size() == 1:
            return scatter(input_, group, input_split_sizes, use_global_buffer)
        total = input_.clone(memory_format=torch.contiguous_format)
        torch.distributed.all_reduce(total, group=group)
        return torch.split(total, [int(length) for length in input_split_sizes])[group.rank()]

    module._gather_along_first_dim, module._reduce_scatter_along_first_dim = gather_parts, scatter_parts


def _patch_padding(module) -> None:
    """transformer/moe/router.py:542 masks the [tokens, experts] routing of a router with a bias by [tokens]; and a
    micro-batch of nothing but padding divides its balancing loss by no tokens. Goes when the mask is broadcast and the
    count is at least 1.
    """
    count_by_bias, count = module.TopKRouter._apply_expert_bias, module.get_tokens_per_expert_and_token_count

    def apply_expert_bias(self, routing_map, padding_mask=None):
        return count_by_bias(
            self, routing_map, padding_mask=None if padding_mask is None else padding_mask.unsqueeze(-1)
        )

    def count_tokens(*args, **kwargs):
        per_expert, local, total = count(*args, **kwargs)
        return per_expert, local, total.clamp(min=1) if torch.is_tensor(total) else total

    module.TopKRouter._apply_expert_bias, module.get_tokens_per_expert_and_token_count = apply_expert_bias, count_tokens


#: (module, patch, only without CUDA), as megatron.py lists its own.
EXPERT_PATCHES = (
    ("megatron.core.transformer.moe.moe_utils", _patch_router_gemm, False),
    ("megatron.core.transformer.moe.moe_utils", _patch_token_counts, True),
    ("megatron.core.transformer.moe.router", _patch_padding, False),
    ("megatron.core.tensor_parallel.mappings", _patch_uneven_parts, True),
)
