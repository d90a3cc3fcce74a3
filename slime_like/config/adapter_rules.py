"""What sending engines the adapters alone needs of other flags."""

from __future__ import annotations

from slime_like.config.lora_targets import OUTPUT, expert_of, target_modules
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
        "engines with --sglang-dp-size take no adapters while they run": config.engine_dp_size > 1,
    }
    problems = [f"{mode}: {why}. Fix: leave it out." for why, applies in wrong.items() if applies]
    return problems + (_module_problems(config, mode) if config.model.is_known else [])


def _module_problems(config: ConfigTree, mode: str) -> list[str]:
    """Modules whose adapters SGLang (0.5.23, lora/lora.py) joins wrongly, or not at all."""
    modules = [name for name in target_modules(config.model) if config.lora.targets(name)]
    fix = (
        "Fix: --lora-target-modules and --lora-exclude-modules, or --update-weight-mode full, which sends them merged."
    )
    if any(expert_of(name) is not None for name in modules):
        # It computes them by Triton kernels only: on a CPU it takes them, and ends at the first request for them.
        return [f"{mode}: adapters on experts cannot be served. {fix}"]
    joined: dict[str, set[str]] = {}
    for name in modules:
        parent, _, kind = name.rpartition(".")
        joined.setdefault(parent, set()).add(kind)
    attention = {frozenset(kinds & {"q_proj", "k_proj", "v_proj"}) for kinds in joined.values()} - {frozenset()}
    if attention - {frozenset({"q_proj", "v_proj"}), frozenset({"q_proj", "k_proj", "v_proj"})} or len(attention) > 1:
        return [
            f"{mode}: engines serve adapters on q_proj and v_proj, with or without k_proj, alike in all layers. {fix}"
        ]
    if any("up_proj" in kinds and "gate_proj" not in kinds for kinds in joined.values()):
        return [f"{mode}: engines serve no adapter on up_proj without one on gate_proj. {fix}"]
    several = config.asynchrony.is_full or config.asynchrony.partial_rollout
    if several and set(modules) & set(OUTPUT.modules):
        # It takes the whole batch's segments for the few rows that have logits: log-probs of a batch of several
        # adapters are 0.6 off on a CPU.
        return [f"{mode}: with answers of several versions at a time engines serve none on lm_head rightly. {fix}"]
    return []


def versions_at_once(config: ConfigTree) -> int:
    """Versions of the adapters that running requests name: the newest and the one before, and where generation never
    stops those of as many rollout steps as a group may be late.
    """
    asynchrony = config.asynchrony
    return 2 + (asynchrony.staleness_bound or 0 if asynchrony.is_full else 0)
