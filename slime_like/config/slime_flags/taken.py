"""slime's flags that say what is done here anyway, and its built-in functions as ours: each with a notice."""

from __future__ import annotations

import dataclasses
import difflib

from slime_like.config.tree import ConfigTree

_RULES = "slime.rollout.rm_hub"
_SFT = "slime.rollout.sft_rollout.generate_rollout"

#: Flag -> (values that change nothing here, None for any; what is done). With another value the flag is refused.
SAID_ANYWAY: dict[str, tuple[tuple[str, ...] | None, str]] = {
    "--distributed-backend": (("nccl",), "NCCL on GPUs, gloo on CPU hosts"),
    "--train-env-vars": (("{}",), "the trainer has the environment of its machine"),
    "--check-weight-update-equal": ((), "engines prove every sync by digest (--verify-weight-sync)"),
    "--rollout-data-transport": (("object-store",), "samples go to trainers by Ray's object store"),
    "--model-name": (None, "the family is read from config.json of --hf-checkpoint"),
    "--use-rollout-entropy": ((), "train/entropy is always reported"),
    "--keep-old-actor": ((), "the weights that generated speak by the engine's own log-probs (docs/algorithms.md)"),
    "--recompute-loss-function": ((), "the probabilities of the loss are always computed again in backward"),
    "--no-check-for-nan-in-loss-and-grad": ((), "a loss or gradient that is not finite ends the run all the same"),
    "--enable-experimental": ((), "nothing here is behind it"),
    "--use-distributed-post": ((), "one event loop sends all requests; what is generated is the same"),
    "--http-proxy": (None, "requests go straight to the router; it has no effect in slime"),
    "--min-batch-collection-ratio": (None, "it has no effect in slime either"),
    "--tb-project-name": (None, "TensorBoard files lie in the run directory (--run-dir)"),
    "--tb-experiment-name": (None, "TensorBoard files lie in the run directory (--run-dir)"),
}

_TEMPLATES = "the chat template itself says what the assistant wrote, whichever model's it is (docs/supervised.md)"

#: (flag, value of slime's) -> (what stands in its place on the command line, why).
TRANSLATED: dict[tuple[str, str], tuple[tuple[str, ...], str]] = {
    **{("--loss-mask-type", name): (("--loss-mask-type", "all"), _TEMPLATES) for name in ("qwen", "qwen3", "qwen3_5")},
    ("--loss-mask-type", "distill_qwen"): (("--loss-mask-type", "last"), _TEMPLATES),
}

_WANDB = "mode dir key host team group project run-id always-use-train-step".split()
#: Flag that is refused -> the switch without which it says nothing in slime either: then it is a notice. Run scripts
#: often leave these when they comment the switch out.
IDLE_WITHOUT: dict[str, str] = {
    **dict.fromkeys((f"--wandb-{name}" for name in _WANDB), "--use-wandb"),
    "--disable-wandb-random-suffix": "--use-wandb",
    **dict.fromkeys(
        (f"--rollout-health-check-{name}" for name in ("interval", "timeout", "first-wait")), "--use-fault-tolerance"
    ),
    "--mtp-loss-scaling-factor": "--enable-mtp-training",
    "--fetch-trajectory-retry-times": "--rollout-buffer-url",
}

#: (flag, path of slime's) -> what stands in its place on the command line; () where it is what is done without it.
BUILT_IN: dict[tuple[str, str], tuple[str, ...]] = {
    ("--rollout-function-path", "slime.rollout.sglang_rollout.generate_rollout"): (),
    ("--rollout-function-path", _SFT): (),
    ("--rollout-function-path", "slime.rollout.fully_async_rollout.generate_rollout_fully_async"): (
        "--async-mode",
        "full",
    ),
    ("--eval-function-path", "slime.rollout.sglang_rollout.generate_rollout"): (),
    ("--data-source-path", "slime.rollout.data_source.RolloutDataSource"): (),
    ("--data-source-path", "slime.rollout.data_source.RolloutDataSourceWithBuffer"): (),
    ("--buffer-filter-path", "slime.rollout.data_source.pop_first"): (),
    ("--dynamic-sampling-filter-path", "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"): (
        "--dynamic-sampling-filter-path",
        "slime_like.rollout.filters.reward_nonzero_std",
    ),
    ("--custom-rm-path", f"{_RULES}.async_rm"): (),
    ("--custom-rm-path", f"{_RULES}.deepscaler.get_deepscaler_rule_based_reward"): ("--rm-type", "deepscaler_strict"),
    ("--custom-rm-path", f"{_RULES}.math_utils.grade_answer_verl"): ("--rm-type", "math_strict"),
}


@dataclasses.dataclass
class SlimesOwn:
    """A command line without slime's own, and what to tell of it."""

    argv: list[str] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    problems: list[str] = dataclasses.field(default_factory=list)
    is_sft: bool = False  # slime's supervised rollout was asked for

    def problems_with(self, config: ConfigTree) -> list[str]:
        """What the rest of the flags must say for it."""
        if self.is_sft and not config.is_sft:
            return [f"--rollout-function-path {_SFT} needs --loss-type sft_loss. Fix: add it."]
        return []


def take_idle(argv: list[str]) -> tuple[list[str], list[str]]:
    """(the command line without flags that say nothing because their switch is absent, a notice for each)."""
    rest: list[str] = []
    notes: list[str] = []
    parts = _flags(argv)
    here = {flag for flag, _, _ in parts}
    for flag, words, _ in parts:
        if IDLE_WITHOUT.get(flag, flag) in here:
            rest += words
        else:
            notes.append(f"{flag} changes nothing without {IDLE_WITHOUT[flag]}")
    return rest, notes


def take_slimes(argv: list[str]) -> SlimesOwn:
    """Replace what is slime's own by what is ours, flag by flag."""
    taken = SlimesOwn()
    for flag, words, values in _flags(argv):
        if flag in SAID_ANYWAY:
            notice_or_refuse(flag, values, taken)
        elif len(values) == 1 and (flag, values[0]) in TRANSLATED:
            ours, why = TRANSLATED[flag, values[0]]
            taken.argv += ours
            taken.notes.append(f"{flag} {values[0]} is taken as {' '.join(ours)}: {why}")
        elif flag.endswith("-path") and len(values) == 1 and values[0].startswith("slime."):
            _take_path(flag, values[0], taken)
        else:
            taken.argv += words
    return taken


def notice_or_refuse(flag: str, values: list[str], taken: SlimesOwn) -> None:
    """A notice for a flag that says what is done anyway; a problem if its values say something else."""
    accepted, what = SAID_ANYWAY[flag]
    shown = " ".join([flag, *values])
    if accepted is None or (not values if not accepted else " ".join(values) in accepted):
        taken.notes.append(f"{shown} changes nothing: {what}")
    else:
        only = f"only {' or '.join(accepted)}" if accepted else "it takes no value"
        taken.problems.append(f"{shown} is refused: {what}. Fix: leave it out ({only}).")


def _take_path(flag: str, path: str, taken: SlimesOwn) -> None:
    if (flag, path) in BUILT_IN:
        ours = BUILT_IN[flag, path]
        taken.argv += ours
        taken.is_sft |= path == _SFT
        what = f"taken as {' '.join(ours)}" if ours else "it is what is done without it"
        taken.notes.append(f"{flag} {path}: {what}")
        return
    known = [name for option, name in BUILT_IN if option == flag]
    close = difflib.get_close_matches(path, known, n=1)
    hint = f" Did you mean {close[0]}?" if close else ""
    taken.problems.append(
        f"{flag} {path} is refused: it is slime's own function and works on slime's records.{hint} Fix: a function over"
        " ours (docs/hooks.md, docs/from-slime.md)."
    )


def _flags(argv: list[str]) -> list[tuple[str, list[str], list[str]]]:
    """(flag, its words as they are, its values) in order; words before the first flag have the flag ""."""
    parts: list[tuple[str, list[str], list[str]]] = []
    for text in argv:
        if text.startswith("--"):
            flag, equals, value = text.partition("=")
            parts.append((flag, [text], [value] if equals else []))
        elif parts:
            parts[-1][1].append(text)
            parts[-1][2].append(text)
        else:
            parts.append(("", [text], [text]))
    return parts
