"""Whether generation waits for training, and how old what is trained on may be."""

from __future__ import annotations

import dataclasses

from slime_like.config.base import flag

ASYNC_MODES = ("off", "one-step", "full")
#: What becomes of a group that would be trained on too late: the trainer waits for it before it does, or not.
STALE_POLICIES = ("wait", "drop", "requeue", "train")


@dataclasses.dataclass(frozen=True, kw_only=True)
class AsyncConfig:
    """Asynchrony: generating while training"""

    async_mode: str = flag(
        "off",
        choices=ASYNC_MODES,
        help=(
            "off: generate, train and sync take turns. one-step: the next rollout is generated while this one is"
            " trained on. full: generation never stops, and weights change under it."
        ),
    )
    max_staleness: int | None = flag(
        None,
        help=(
            "Most rollout steps that lie between the weights with which a group was begun and those that are trained"
            " with it. Default: 1 with --async-mode full; without a bound with --partial-rollout."
        ),
        least=0,
    )
    stale_policy: str = flag(
        "wait",
        choices=STALE_POLICIES,
        help=(
            "A group that --max-staleness would leave behind: the trainer waits for it; or it is dropped, or its prompt"
            " is asked again; or it is trained on all the same."
        ),
    )
    update_weights_interval: int = flag(1, help="Rollout steps from one weight sync to the next.", least=1)
    eval_async: bool = flag(
        False,
        help="Evaluate beside the next rollout and train step, on the weights of its turn: the next sync waits for it.",
    )
    eval_num_engines: int = flag(
        0,
        help=(
            "With --eval-async: so many engines keep the weights for it and answer nothing else meanwhile; syncs go to"
            " the others, and no sync waits. 0: all engines evaluate."
        ),
        least=0,
        most=1_000_000,
    )
    partial_rollout: bool = flag(
        False,
        help=(
            "Once a rollout is full, end the answers that still run, and go on with them in the next one. With"
            " --over-sampling-batch-size that many prompts are worked on at a time."
        ),
    )
    mask_offpolicy_in_partial_rollout: bool = flag(
        False, help="With --partial-rollout: do not train on tokens of earlier rollouts' weights."
    )

    @property
    def is_async(self) -> bool:
        """Whether anything is generated while something is trained on."""
        return self.async_mode != "off"

    @property
    def is_full(self) -> bool:
        """Whether generation never stops."""
        return self.async_mode == "full"

    @property
    def is_stale(self) -> bool:
        """Whether tokens of several weights meet in one train step."""
        return self.is_async or self.partial_rollout or self.update_weights_interval > 1

    @property
    def staleness_bound(self) -> int | None:
        """--max-staleness with its default; None: there is none."""
        return 1 if self.is_full and self.max_staleness is None else self.max_staleness

    def problems(self) -> list[str]:
        """What is impossible about the flags by themselves."""
        problems, interval, bound = [], self.update_weights_interval, self.staleness_bound
        if interval < 1:
            problems.append(f"--update-weights-interval {interval}: must be at least 1.")
        if bound is not None and bound < 0:
            problems.append(f"--max-staleness {bound}: must not be negative.")
        if self.eval_num_engines < 0:
            problems.append(f"--eval-num-engines {self.eval_num_engines}: must not be negative.")
        if self.eval_num_engines > 0 and not self.eval_async:
            problems.append(
                f"--eval-num-engines {self.eval_num_engines} does nothing without --eval-async. Fix: add it, or drop"
                " this."
            )
        if self.max_staleness is not None and not (self.is_full or self.partial_rollout):
            problems.append(
                f"--max-staleness {self.max_staleness} does nothing with --async-mode {self.async_mode}, where it is"
                f" {interval - (not self.is_async)} by construction. Fix: --async-mode full or --partial-rollout, or"
                " drop it."
            )
        elif bound is None and self.stale_policy != "wait":
            problems.append(
                f"--stale-policy {self.stale_policy} does nothing without --max-staleness. Fix: add it, or drop this."
            )
        if self.is_full and bound is not None and 0 <= bound < interval - 1:
            problems.append(
                f"--max-staleness {bound} cannot be kept with --update-weights-interval {interval}: the last rollout"
                f" before a sync is {interval - 1} steps behind. Fix: --max-staleness {interval - 1} or more."
            )
        if self.is_full and self.partial_rollout:
            problems.append(
                "--partial-rollout does nothing with --async-mode full, where no answer is ended for a rollout's sake."
                " Fix: drop it; --update-weight-pause-mode abort keeps partial answers through a sync."
            )
        if self.mask_offpolicy_in_partial_rollout and not self.partial_rollout:
            problems.append(
                "--mask-offpolicy-in-partial-rollout does nothing without --partial-rollout. Fix: add it, or drop this."
            )
        return problems
