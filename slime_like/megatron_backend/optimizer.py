"""Megatron's optimizer and learning rate schedule from the flags."""

from __future__ import annotations

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import get_model_config

from slime_like.config.model import ParallelConfig
from slime_like.config.training import OptimizerConfig
from slime_like.megatron_backend.model_provider import trains_in_bf16


def build_optimizer(model: DistributedDataParallel, optimizer: OptimizerConfig, parallel: ParallelConfig) -> MegatronOptimizer:
    """AdamW over this rank's stage, with gradient clipping over the whole model."""
    bf16 = trains_in_bf16(optimizer)
    built = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer=optimizer.optimizer,
            lr=optimizer.lr,
            min_lr=optimizer.min_lr,
            weight_decay=optimizer.weight_decay,
            adam_beta1=optimizer.adam_beta1,
            adam_beta2=optimizer.adam_beta2,
            adam_eps=optimizer.adam_eps,
            clip_grad=optimizer.clip_grad,
            bf16=bf16,
            params_dtype=torch.bfloat16 if bf16 else torch.float32,
            use_distributed_optimizer=parallel.use_distributed_optimizer,
        ),
        [model],
    )
    get_model_config(model).grad_scale_func = built.scale_loss
    return built


def build_scheduler(built: MegatronOptimizer, optimizer: OptimizerConfig, *, total_steps: int) -> OptimizerParamScheduler:
    """Learning rate as a function of optimizer steps done. total_steps: of the whole run, where --lr-decay-iters is not given."""
    decay_steps = optimizer.lr_decay_iters or total_steps
    warmup_steps = optimizer.lr_warmup_iters if optimizer.lr_warmup_fraction is None else int(optimizer.lr_warmup_fraction * decay_steps)
    decay_steps = max(decay_steps, warmup_steps + 1)  # a run may end within its warm-up; Megatron's scheduler wants a decay after it
    return OptimizerParamScheduler(
        built,
        init_lr=0.0,
        max_lr=optimizer.lr,
        min_lr=optimizer.min_lr,
        lr_warmup_steps=warmup_steps,
        lr_decay_steps=max(decay_steps, 1),
        lr_decay_style=optimizer.lr_decay_style,
        start_wd=optimizer.weight_decay,
        end_wd=optimizer.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
        # The flags of this run rule; a checkpoint restores only how many steps were done.
        use_checkpoint_opt_param_scheduler=False,
        override_opt_param_scheduler=True,
    )
