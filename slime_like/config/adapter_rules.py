"""What sending engines the adapters alone needs of other flags."""

from __future__ import annotations

from slime_like.config.lora_targets import expert_of, target_modules
from slime_like.config.tree import ConfigTree


def adapter_problems(config: ConfigTree) -> list[str]:
    """What --update-weight-mode adapter needs, and what does not go with it."""
    if not config.sync.sends_adapters:
        return []
    mode = "--update-weight-mode adapter"
    if not config.lora.enabled:
        return [f"{mode} needs adapters: --lora-rank. Fix: add it, or drop this."]
    wrong = {
        "this run sends no weights": not config.uses_engines or config.placement.debug_rollout_only,
        "--custom-weight-transform-path is for whole weights": bool(config.sync.custom_weight_transform_path),
        "--use-rollout-routing-replay asks engines around the router": config.loss.use_rollout_routing_replay,
        "--update-weight-pause-mode does nothing, since requests go on with the version that they name": (
            config.sync.update_weight_pause_mode is not None
        ),
        # SGLang 0.5.23 computes them by Triton kernels; an engine on a CPU ends at the first such request.
        "adapters on experts cannot be served, only merged (--update-weight-mode full)": _has_expert_adapters(config),
        "engines with --sglang-dp-size take no adapters while they run": config.engine_dp_size > 1,
    }
    return [f"{mode}: {why}. Fix: leave it out." for why, applies in wrong.items() if applies]


def _has_expert_adapters(config: ConfigTree) -> bool:
    if not config.model.is_known:
        return False
    return any(expert_of(name) is not None and config.lora.targets(name) for name in target_modules(config.model))


def versions_at_once(config: ConfigTree) -> int:
    """Versions of the adapters that running requests name: the newest and the one before, and where generation never
    stops those of as many rollout steps as a group may be late.
    """
    asynchrony = config.asynchrony
    return 2 + (asynchrony.staleness_bound or 0 if asynchrony.is_full else 0)
