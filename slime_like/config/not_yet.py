"""What the plan knows, but a real run cannot do yet: one place, so that nothing is accepted and then quietly left out."""

from __future__ import annotations

from slime_like.config.model import ModelConfig, ParallelConfig
from slime_like.config.training import LossConfig, OptimizerConfig

_PLAN_ONLY = "a real run cannot do it yet, only --plan"


def model_not_yet(model: ModelConfig) -> list[str]:
    """Architectures that the trainer does not build."""
    found = {
        f"--num-experts {model.num_experts}: mixture of experts": bool(model.num_experts),
        "--multi-latent-attention": model.multi_latent_attention,
        "--post-self-attn-layernorm": model.post_self_attn_layernorm,
        "--post-mlp-layernorm": model.post_mlp_layernorm,
        "--rotary-interleaved": model.rotary_interleaved,
        f"--rotary-percent {model.rotary_percent}: rotating a part of each head": model.rotary_percent != 1.0,
    }
    return [f"{what}: {_PLAN_ONLY}." for what, given in found.items() if given]


def parallel_not_yet(parallel: ParallelConfig) -> list[str]:
    """Splits that the trainer does not do."""
    found = {
        f"--context-parallel-size {parallel.context_parallel_size}": parallel.context_parallel_size != 1,
        f"--expert-model-parallel-size {parallel.expert_model_parallel_size}": parallel.expert_model_parallel_size != 1,
    }
    overlaps = [f"--{name.replace('_', '-')}: {_PLAN_ONLY}." for name in ("overlap_grad_reduce", "overlap_param_gather") if getattr(parallel, name)]
    return overlaps + [f"{what}: {_PLAN_ONLY}. Fix: 1." for what, given in found.items() if given]


def training_not_yet(loss: LossConfig, optimizer: OptimizerConfig) -> list[str]:
    """Losses and optimizers that the trainer does not have."""
    found = {
        "--advantage-estimator ppo (a critic)": loss.advantage_estimator == "ppo",
        f"--kl-coef {loss.kl_coef} (a KL penalty in the reward)": loss.kl_coef != 0,
        "--optimizer-cpu-offload": optimizer.optimizer_cpu_offload,
        "--use-precision-aware-optimizer": optimizer.use_precision_aware_optimizer,
    }
    return [f"{what}: {_PLAN_ONLY}." for what, given in found.items() if given]
