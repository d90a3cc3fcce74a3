"""Whether samples that begin alike share what they have in common: --share-prompt, and why not."""

from __future__ import annotations

from slime_like.config.tree import ConfigTree


def shares_prompts(config: ConfigTree) -> bool:
    """Whether trainers look for what samples have in common; `auto` only where all numbers stay what they were."""
    asked = config.batch.share_prompt
    if asked == "auto":
        return cannot_share(config) is None and changed_by_sharing(config) is None
    return asked == "on"


def cannot_share(config: ConfigTree) -> str | None:
    """What keeps prompts from being shared, and the fix; None if nothing does."""
    if config.parallel.context_parallel_size > 1:
        return (
            f"--context-parallel-size {config.parallel.context_parallel_size} cuts each sample into chunks of its own."
            " Fix: 1"
        )
    if not config.batch.use_dynamic_batch_size:
        return "micro-batches have a fixed number of samples. Fix: --use-dynamic-batch-size and --max-tokens-per-gpu"
    return None


def changed_by_sharing(config: ConfigTree) -> str | None:
    """What would come out otherwise, as it counts the tokens that are computed; None if nothing would."""
    model, adapters = config.model, config.adapters
    if model.num_experts and model.moe_aux_loss_coeff and model.moe_router_load_balancing_type == "aux_loss":
        return f"--moe-aux-loss-coeff {model.moe_aux_loss_coeff:g} balances experts over the tokens that are computed"
    if model.num_experts and model.moe_router_enable_expert_bias and model.moe_router_bias_update_rate:
        return (
            f"--moe-router-bias-update-rate {model.moe_router_bias_update_rate:g} balances experts over the tokens that"
            " are computed"
        )
    if adapters is not None and adapters.lora_dropout:
        return f"--lora-dropout {adapters.lora_dropout:g} would drop the same of a prompt for all of its samples"
    return None


def share_prompt_problems(config: ConfigTree) -> list[str]:
    """--share-prompt on where it cannot be."""
    reason = cannot_share(config) if config.batch.share_prompt == "on" else None
    return [f"--share-prompt on: {reason}, or --share-prompt auto."] if reason else []


def share_prompt_notices(config: ConfigTree) -> list[str]:
    """Why prompts that could be shared are not, or what changes because they are."""
    if config.rollout.n_samples_per_prompt == 1 or config.is_sft or config.placement.debug_rollout_only:
        return []
    if not config.batch.use_dynamic_batch_size:
        return []  # a plain run, whose samples come one by one
    cannot, changed = cannot_share(config), changed_by_sharing(config)
    if config.batch.share_prompt == "on" and changed:
        return [f"--share-prompt on: {changed}, each shared prompt once"]
    if config.batch.share_prompt == "auto" and cannot:
        return [f"--share-prompt is off, each sample's prompt is computed again: {cannot}"]
    if config.batch.share_prompt == "auto" and changed:
        return [
            f"--share-prompt is off, each sample's prompt is computed again: {changed}; --share-prompt on accepts it"
        ]
    return []
