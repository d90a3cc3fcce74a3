"""What the plan knows, but a real run cannot do yet: one place, so that nothing is accepted and then quietly left out."""

from __future__ import annotations

from slime_like.config.model import ModelConfig, ParallelConfig
from slime_like.config.training import LossConfig, OptimizerConfig

_PLAN_ONLY = "a real run cannot do it yet, only --plan"


def model_not_yet(model: ModelConfig) -> list[str]:
    """Architectures that the trainer does not build."""
    found = {
        f"--num-experts {model.num_experts}: mixture of experts other than Qwen3-MoE's (softmax router, --qk-layernorm, none shared, in every layer)": bool(
            model.num_experts
        )
        and not model.is_qwen3_moe,
        # A pack is one sequence to Megatron's router, so this would be the loss of aux_loss under another name.
        "--moe-router-load-balancing-type seq_aux_loss": model.moe_router_load_balancing_type == "seq_aux_loss" and model.moe_aux_loss_coeff != 0,
        "--multi-latent-attention": model.multi_latent_attention,
        "--post-self-attn-layernorm": model.post_self_attn_layernorm,
        "--post-mlp-layernorm": model.post_mlp_layernorm,
        "--rotary-interleaved": model.rotary_interleaved,
        f"--rotary-percent {model.rotary_percent}: rotating a part of each head": model.rotary_percent != 1.0,
    }
    return [f"{what}: {_PLAN_ONLY}." for what, given in found.items() if given]


def parallel_not_yet(parallel: ParallelConfig) -> list[str]:
    """Splits that the trainer does not do."""
    return [f"--{name.replace('_', '-')}: {_PLAN_ONLY}." for name in ("overlap_grad_reduce", "overlap_param_gather") if getattr(parallel, name)]


def training_not_yet(loss: LossConfig, optimizer: OptimizerConfig) -> list[str]:
    """Losses and optimizers that the trainer does not have."""
    found = {
        "--optimizer-cpu-offload": optimizer.optimizer_cpu_offload,
        "--use-precision-aware-optimizer": optimizer.use_precision_aware_optimizer,
    }
    return [f"{what}: {_PLAN_ONLY}." for what, given in found.items() if given]
