"""What --deterministic cannot hold to the bit, and what it asks of engines."""

from __future__ import annotations

from slime_like.config.tree import ConfigTree

#: SGLang's arguments that undo what --deterministic sets.
_SEEDED = "enable_deterministic_inference"


def seeded_engine_flags(config: ConfigTree, *, on_gpu: bool) -> dict[str, bool]:
    """SGLang's arguments, beside the user's, of the engines that this run starts.

    Without a GPU there is no prefix cache: a prefix that was once generated, and one that was read as part of a prompt,
    differ in the last bit, and which of them is there depends on what came before. On a GPU SGLang decides by its
    attention backend.
    """
    if not config.observability.deterministic:
        return {}
    return {_SEEDED: True} if on_gpu else {_SEEDED: True, "disable_radix_cache": True}


def deterministic_problems(config: ConfigTree) -> list[str]:
    """Combinations with --deterministic in which what is trained on depends on who was faster."""
    if not config.observability.deterministic:
        return []
    asynchrony, rollout, checkpoint = config.asynchrony, config.rollout, config.checkpoint
    interval = asynchrony.update_weights_interval
    save_interval = checkpoint.save_interval or interval
    size = rollout.over_sampling_batch_size
    clashes = [
        (
            asynchrony.is_full,
            "--async-mode full: weights change under running answers, whenever that happens to be. Fix: one-step, off",
        ),
        (asynchrony.partial_rollout, "--partial-rollout: where an answer is ended depends on who was faster"),
        (size is not None, f"--over-sampling-batch-size {size}: how much is drawn depends on which groups end first"),
        (
            checkpoint.no_save_optim and checkpoint.resume is not None,
            "--no-save-optim and --resume: the optimizer would begin anew",
        ),
        (config.serving.serve_rollout, "--serve-rollout: foreign agents decide what is asked, and when"),
        (
            config.placement.rollout_external and config.uses_engines,
            "engines of somebody else's, which we do not start with --enable-deterministic-inference",
        ),
        (
            config.uses_engines and save_interval % interval != 0,
            f"--save-interval {save_interval}, no multiple of --update-weights-interval {interval}: a resume syncs",
        ),
    ]
    problems = [f"--deterministic does not go with {why}." for is_wrong, why in clashes if is_wrong]
    if str(config.engine.sglang.get(_SEEDED, True)).lower() == "false":
        problems.append(f"--deterministic needs --sglang-{_SEEDED.replace('_', '-')}. Fix: leave it to us.")
    return problems
