"""Megatron's optimizer and learning rate schedule from the flags."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import MegatronOptimizer, ParamKey, get_megatron_optimizer, get_standard_config_overrides
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.utils import get_model_config

from slime_like.config.lora import LoraConfig
from slime_like.config.optimizer import AdamParams, OptimizerConfig
from slime_like.config.parallel import ParallelConfig
from slime_like.errors import CheckpointError
from slime_like.megatron_backend.model.provider import trains_in_bf16


def build_optimizer(
    model: Sequence[DistributedDataParallel],
    optimizer: OptimizerConfig,
    parallel: ParallelConfig,
    lora: LoraConfig | None = None,
) -> MegatronOptimizer:
    """AdamW over this rank's chunks, with gradient clipping over the whole model. lora: of a model with adapters."""
    bf16 = trains_in_bf16(optimizer)
    config = MegatronOptimizerConfig(
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
    )
    overrides = None
    if lora is not None and lora.lora_plus_lr_ratio != 1.0:
        ratio = lora.lora_plus_lr_ratio  # also by itself: a checkpoint tells groups apart by it
        of_b = {"max_lr": optimizer.lr * ratio, "min_lr": optimizer.min_lr * ratio, "lr_mult": ratio}
        overrides = get_standard_config_overrides(config) | {ParamKey(name="*.lora_b"): of_b}
    built = get_megatron_optimizer(config, list(model), overrides)
    get_model_config(model[0]).grad_scale_func = built.scale_loss
    return built


@contextlib.contextmanager
def stepping_with(built: MegatronOptimizer, params: AdamParams | None) -> Iterator[None]:
    """Inside, the optimizer has these numbers; afterwards its own again. None: its own."""
    _step_in_one_pass(built)
    groups = built.param_groups if params is not None else []
    before = [{name: group[name] for name in ("lr", "betas", "eps", "weight_decay")} for group in groups]
    if params is not None:
        for group in groups:
            decay = params.weight_decay * group.get("wd_mult", 1.0)  # 0 for norms and biases
            rate = params.lr * group.get("lr_mult", 1.0)  # --lora-plus-lr-ratio
            group |= {"lr": rate, "betas": params.betas, "eps": params.eps, "weight_decay": decay}
    try:
        yield
    finally:
        for group, numbers in zip(groups, before, strict=True):
            group |= numbers


def _step_in_one_pass(built: MegatronOptimizer) -> None:
    """Let torch's Adam use its kernel of one pass on the host, where each pass over memory counts: 135 M parameters in
    0.07 s instead of 0.46 (an AMD EPYC core). Asked for at each step: a loaded state brings settings of its own.
    """
    for adam in _adams(built):
        if isinstance(adam, (torch.optim.Adam, torch.optim.AdamW)):
            for group in adam.param_groups:
                if all(parameter.device.type == "cpu" for parameter in group["params"]):
                    group["fused"] = True


def _adams(built: MegatronOptimizer) -> Iterator[torch.optim.Optimizer]:
    for part in getattr(built, "chained_optimizers", [built]):
        yield from getattr(part.optimizer, "sub_optimizers", [part.optimizer])


def forget_moments(built: MegatronOptimizer) -> None:
    """Zero Adam's moments and its count of steps, as before the first step.

    weights, main weights and the learning rate's schedule stay.
    """
    for adam in _adams(built):
        for state in adam.state.values():
            for name in ("exp_avg", "exp_avg_sq", "step"):
                if isinstance(state.get(name), torch.Tensor):
                    state[name].zero_()
                elif name in state:
                    state[name] = 0
        for group in adam.param_groups:  # where transformer-engine's Adam counts
            if "step" in group:
                group["step"] = torch.zeros_like(group["step"]) if isinstance(group["step"], torch.Tensor) else 0


def fit_optimizer_state(loaded: dict, optimizer: MegatronOptimizer) -> dict:
    """A loaded optimizer state in the form that `optimizer` takes.

    Raises CheckpointError if it cannot be brought into it.
    With expert parallelism Megatron (0.16.1) has two optimizers, of everything else and of the experts, and {0: state,
    1: state}; without it one, and one state. The moments belong to parameters and fit either way; settings and step
    count are moved over here.
    """
    number = len(optimizer.chained_optimizers)
    saved = [loaded[index] for index in (0, 1) if _has_settings(loaded.get(index, {}))] or [loaded]
    if len(saved) == number:
        return loaded
    if "param_state_sharding_type" not in saved[0]:
        raise CheckpointError(
            "the optimizer state was saved with another --expert-model-parallel-size and without"
            " --use-distributed-optimizer, which Megatron cannot load. Fix: the same size, or --no-load-optim."
        )
    groups = [group for part in saved for group in part["optimizer"]["param_groups"]]
    others = [{**group, "is_expert_parallel": not group["is_expert_parallel"]} for group in groups]
    parts = {
        index: {
            "optimizer": {"param_groups": others + groups},  # of two for the same parameters, Megatron takes the later
            "param_state": (loaded if number == 1 else loaded[index])["param_state"],
            "param_state_sharding_type": saved[0]["param_state_sharding_type"],
        }
        for index in range(number)
    }
    return parts[0] if number == 1 else parts


def _has_settings(part: dict) -> bool:
    """Whether an optimizer's settings were saved in this part of a state.

    In the others are at most this run's lists of parameters.
    """
    groups = part.get("optimizer", part).get("param_groups", ())  # a replicated fp32 optimizer has them at the top
    return bool(groups) and "wd_mult" in groups[0]


def build_scheduler(
    built: MegatronOptimizer, optimizer: OptimizerConfig, *, total_steps: int
) -> OptimizerParamScheduler:
    """Learning rate as a function of optimizer steps done.

    total_steps: of the whole run, where --lr-decay-iters is not given.
    """
    decay_steps = optimizer.lr_decay_iters or total_steps
    warmup_steps = (
        optimizer.lr_warmup_iters
        if optimizer.lr_warmup_fraction is None
        else int(optimizer.lr_warmup_fraction * decay_steps)
    )
    # a run may end within its warm-up; Megatron's scheduler wants a decay after it
    decay_steps = max(decay_steps, warmup_steps + 1)
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
