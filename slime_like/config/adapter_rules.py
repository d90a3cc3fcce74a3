"""What sending engines the adapters alone needs of other flags."""

from __future__ import annotations

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
        "external engines are started without adapters": config.placement.rollout_external,
        "engines that give their memory back (--offload-rollout) lose the base": config.offload_rollout,
        "--custom-weight-transform-path is for whole weights": bool(config.sync.custom_weight_transform_path),
        "--use-rollout-routing-replay asks engines around the router": config.loss.use_rollout_routing_replay,
        "requests that run across syncs (--async-mode, --partial-rollout) were not tried with it": (
            config.asynchrony.is_async or config.asynchrony.partial_rollout
        ),
        "engines with --sglang-dp-size take no adapters while they run": config.engine_dp_size > 1,
    }
    return [f"{mode}: {why}. Fix: leave it out." for why, applies in wrong.items() if applies]
