"""Gradients of a tenant over the ranks: summed, measured and clipped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from megatron.core.transformer.module import param_is_not_shared

from slime_like.megatron_backend.lora.build import parts
from slime_like.megatron_backend.lora.tenant_memory import TenantMemory, TenantParameter


def adapter_entries(stage: Iterable[torch.nn.Module], *, lr_ratio_of_b: float) -> list[TenantParameter]:
    """Every A and B of a tenant's adapters here. lr_ratio_of_b: --lora-plus-lr-ratio."""
    matrices = [pair for _, part in parts(stage) for pair in part.named_parameters()]
    return [_entry(p, "sum" if _sees_part(p) else None, lr_ratio=lr_ratio_of_b if name == "lora_b" else 1.0)
            for name, p in matrices]  # fmt: skip


def model_entries(stage: Sequence[GPTModel]) -> list[TenantParameter]:
    """Every parameter of the model here; no weight decay for norms and biases, as Megatron has it."""
    entries = []
    for chunk in stage:
        for name, parameter in chunk.named_parameters():
            across = None
            if getattr(parameter, "average_gradients_across_tp_domain", False):
                across = "average"
            elif _sees_part(parameter) or (
                chunk.config.qk_layernorm and ("q_layernorm" in name or "k_layernorm" in name)
            ):
                across = "sum"
            decays = parameter.dim() > 1 and not name.endswith(".bias")
            entries.append(_entry(parameter, across, decays=decays))
    return entries


def _sees_part(parameter: torch.nn.Parameter) -> bool:
    """Whether sequence parallel ranks each saw their part of the tokens only."""
    return bool(getattr(parameter, "sequence_parallel", False))


def _entry(
    parameter: torch.nn.Parameter, across: str | None, *, lr_ratio: float = 1.0, decays: bool = True
) -> TenantParameter:
    return TenantParameter(
        parameter=parameter,
        lr_ratio=lr_ratio,
        decays=decays,
        across_tensor=across,
        is_expert=not getattr(parameter, "allreduce", True),
        counts_in_norm=param_is_not_shared(parameter) and param_is_not_tensor_parallel_duplicate(parameter),
    )


@torch.no_grad()
def sum_gradients(memory: TenantMemory) -> None:
    """A tenant's gradients are those of the loss of all ranks' rows. Collective."""
    if memory.gradient is None:
        memory.gradient = torch.zeros_like(memory.master)
    views = list(zip(memory.entries, memory.views(memory.gradient), strict=True))
    tensor_group = parallel_state.get_tensor_model_parallel_group()
    if tensor_group.size() > 1:
        for across, divisor in (("sum", 1), ("average", tensor_group.size())):
            _add_up([view.div_(divisor) for entry, view in views if entry.across_tensor == across], tensor_group)
    experts = [view for entry, view in views if entry.is_expert]
    data_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if not experts:
        if data_group.size() > 1:
            torch.distributed.all_reduce(memory.gradient, group=data_group)
        return
    _add_up([view for entry, view in views if not entry.is_expert], data_group)
    _add_up(experts, parallel_state.get_expert_data_parallel_group())


@torch.no_grad()
def sum_shared_embedding(memory: TenantMemory, stage: Sequence[GPTModel]) -> None:
    """Where first and last pipeline stage hold the same embedding, its gradient is both's. Collective over the two."""
    group = parallel_state.get_embedding_group(check_initialized=False)
    if group is None or group.size() < 2 or torch.distributed.get_rank() not in _ranks(group):
        return
    chunk = stage[0] if parallel_state.is_pipeline_first_stage(ignore_virtual=True) else stage[-1]
    if not chunk.share_embeddings_and_output_weights:
        return
    shared = chunk.shared_embedding_or_output_weight()
    assert memory.gradient is not None, "sum_gradients comes first"
    for entry, view in zip(memory.entries, memory.views(memory.gradient), strict=True):
        if entry.parameter is shared:
            torch.distributed.all_reduce(view, group=group)


@torch.no_grad()
def gradient_norm(memory: TenantMemory) -> float:
    """Of the whole model's gradients of this tenant, as Megatron counts it: each matrix once. Collective."""
    assert memory.gradient is not None, "sum_gradients comes first"
    views = list(zip(memory.entries, memory.views(memory.gradient), strict=True))
    total = torch.zeros((), dtype=torch.float64, device=memory.device)
    groups = (
        (False, parallel_state.get_model_parallel_group()),
        (True, parallel_state.get_expert_tensor_model_pipeline_parallel_group()),
    )
    for is_expert, group in groups:
        mine = [view for entry, view in views if entry.counts_in_norm and entry.is_expert is is_expert]
        square = torch.nn.utils.get_total_norm(mine).double() ** 2 if mine else torch.zeros_like(total)
        torch.distributed.all_reduce(square, group=group)
        total += square
    return float(total.sqrt())


def _add_up(views: list[torch.Tensor], group: torch.distributed.ProcessGroup) -> None:
    if not views or group.size() < 2:
        return
    joined = torch.cat([view.flatten() for view in views])
    torch.distributed.all_reduce(joined, group=group)
    for view, piece in zip(views, joined.split([view.numel() for view in views]), strict=True):
        view.copy_(piece.view(view.shape))


def _ranks(group: torch.distributed.ProcessGroup) -> list[int]:
    return torch.distributed.get_process_group_ranks(group)
