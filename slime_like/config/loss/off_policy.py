"""Corrections for samples that are not quite the policy's: another engine, other experts, older weights."""

from __future__ import annotations

import dataclasses

from slime_like.config.base import flag
from slime_like.config.loss.choice import LossChoice, shown


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffPolicyFlags(LossChoice):
    """Flags of the ratio's base, importance weights, routing replay and sequence masking."""

    use_rollout_logprobs: bool = flag(
        False,
        help="Take the ratio against the engine's log-probs instead of the trainer's before the rollout's first step.",
    )
    score_first_step: bool = flag(
        False,
        help=(
            "Also score the samples of a rollout's first train step before it. That step's own forward pass gives the"
            " same log-probs, as it has the same weights: this spends a pass to see that it does."
        ),
    )
    use_tis: bool | None = flag(
        None,
        help=(
            "Weigh each token's policy loss by trainer's / engine's probability (truncated importance sampling)."
            " Default: with --async-mode, --partial-rollout and --update-weights-interval, unless"
            " --use-rollout-logprobs."
        ),
    )
    tis_level: str = flag(
        "token",
        choices=("token", "sequence", "geometric"),
        help="Whose probability: the token's, the whole sample's (a product), or its tokens' geometric mean.",
    )
    tis_mode: str = flag(
        "truncate",
        choices=("truncate", "mask"),
        help="A weight beyond the bounds: truncate holds it at the bound, mask makes it 0 (IcePop).",
    )
    tis_clip: float = flag(2.0, help="Upper bound of that weight.", least=0)
    tis_clip_low: float = flag(0.0, help="Lower bound of that weight.", least=0)
    tis_reject_level: str | None = flag(
        None,
        choices=("sequence", "geometric"),
        help=(
            "Reject whole samples, too: those whose product of weights, or its mean per token, is outside"
            " --tis-reject-low and --tis-reject-high."
        ),
    )
    tis_reject_low: float | None = flag(None, help="Lower bound of what --tis-reject-level keeps. Default: 0.", least=0)
    tis_reject_high: float | None = flag(
        None, help="Upper bound of what --tis-reject-level keeps; needed by it.", above=0
    )
    custom_tis_function_path: str | None = flag(
        None,
        help=(
            "Instead of --tis-level and --tis-mode: function(args, pg_loss, train_log_probs, rollout_log_probs,"
            " sample_of_token) -> (pg_loss, metrics)."
        ),
    )
    get_mismatch_metrics: bool = flag(
        False,
        help=(
            "Report how far the engine's probabilities are from the trainer's (train/mismatch_*); changes no gradient."
        ),
    )
    use_rollout_routing_replay: bool = flag(
        False,
        help=(
            "Train with the experts that the engine's routers chose (R3); models with experts only. Log-probs of the"
            " policy are computed with them too."
        ),
    )
    use_routing_replay: bool = flag(
        False,
        help=(
            "Train each step of a rollout with the experts that the pass before the first step chose (R2);"
            " --use-rollout-routing-replay includes it."
        ),
    )
    use_opsm: bool = flag(
        False,
        help=(
            "Off-policy sequence masking: bad samples that the policy has moved away from by more than --opsm-delta"
            " teach nothing."
        ),
    )
    opsm_delta: float = flag(
        1e-4, help="That distance: mean over a sample's tokens of the engine's log-prob - the policy's."
    )

    def problems(self) -> list[str]:
        """What is impossible about these corrections."""
        problems = []
        if self.use_tis and self.use_rollout_logprobs:
            problems.append("--use-tis and --use-rollout-logprobs both correct for the engine. Fix: one of them.")
        if self.loss_type == "policy_loss" and self.use_rollout_logprobs and not self.policy_row.has_ratio:
            problems.append(
                f"--use-rollout-logprobs is about a ratio, and --policy-loss {self.policy_loss_name} has none. Fix:"
                " drop it."
            )
        if self.opsm_delta < 0:
            problems.append(f"--opsm-delta {self.opsm_delta}: must not be negative.")
        if self.opsm_delta != OffPolicyFlags.opsm_delta and not self.use_opsm:
            problems.append(f"--opsm-delta {self.opsm_delta} does nothing without --use-opsm. Fix: add it.")
        return problems + self._weight_problems()

    def _weight_problems(self) -> list[str]:
        """What is impossible about --use-tis and the flags that belong to it."""
        problems = []
        if not 0 <= self.tis_clip_low <= self.tis_clip:
            problems.append(
                f"--tis-clip-low {self.tis_clip_low} and --tis-clip {self.tis_clip}: need 0 <= low <= high."
            )
        if self.custom_tis_function_path and not self.use_tis:
            problems.append("--custom-tis-function-path does nothing without --use-tis. Fix: add it.")
        for name in self.changed(("tis_level", "tis_mode", "tis_reject_level")):
            setting = f"{shown(name)} {getattr(self, name)}"
            if not self.use_tis:
                problems.append(f"{setting} does nothing without --use-tis. Fix: add it.")
            if self.custom_tis_function_path:
                problems.append(
                    f"{setting} is for the built-in correction, which --custom-tis-function-path replaces. Fix: drop"
                    " one of them."
                )
        low, high = self.tis_reject_low or 0.0, self.tis_reject_high
        if self.tis_reject_level is None and (high is not None or self.tis_reject_low is not None):
            problems.append(
                "--tis-reject-low and --tis-reject-high do nothing without --tis-reject-level. Fix: add it, or drop"
                " them."
            )
        if self.tis_reject_level is not None and high is None:
            problems.append(
                f"--tis-reject-level {self.tis_reject_level} needs --tis-reject-high, above which a sample is rejected."
            )
        if high is not None and not 0 <= low < high:
            problems.append(f"--tis-reject-low {low} and --tis-reject-high {high}: need 0 <= low < high.")
        return problems
