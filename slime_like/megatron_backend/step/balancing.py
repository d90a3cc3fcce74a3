"""What the routers' balancing loss came to: Megatron adds it to the gradients only."""

from __future__ import annotations

import torch
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker, get_moe_layer_wise_logging_tracker

from slime_like.config.model import ModelConfig

_NAME = "load_balancing_loss"


def has_balancing_loss(model: ModelConfig) -> bool:
    """Whether routers are trained with --moe-aux-loss-coeff."""
    return (
        bool(model.num_experts) and model.moe_aux_loss_coeff > 0 and model.moe_router_load_balancing_type == "aux_loss"
    )


def take_balancing_loss(model: ModelConfig, num_micro_batches: int, device: torch.device) -> float:
    """The loss (Switch Transformer, arXiv:2101.03961, eq.

    4) without its coefficient, since it was last taken: 1 is perfect balance.
    A mean over layers with experts, micro-batches and data parallel ranks. Collective over all ranks, with the same
    result on each.
    """
    tracked = get_moe_layer_wise_logging_tracker().get(_NAME)
    # Each rank has the share of its own tokens and layers; several micro-batches were added up.
    total = torch.zeros((), dtype=torch.float64, device=device) if tracked is None else tracked["values"].double().sum()
    torch.distributed.all_reduce(total)
    clear_aux_losses_tracker()
    return total.item() / (parallel_state.get_data_parallel_world_size() * num_micro_batches * sum(model.expert_layers))
