"""What a train step adds up: the entropy bonus, what a mean is taken over, and moments that start anew."""

from __future__ import annotations

import dataclasses

from slime_like.config.base import flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReductionFlags:
    """Flags of a train step's sums and means."""

    entropy_coef: float = flag(0.0, help="Weight of the entropy bonus.")
    calculate_per_token_loss: bool = flag(
        False,
        help="Mean over all tokens of the batch instead of per sample, then over samples: --loss-reduction token.",
    )
    loss_reduction: str | None = flag(
        None,
        choices=("sample", "token", "rollout", "constant"),
        help=(
            "sample: mean over each sample's tokens, then over samples (default). token: over all tokens. rollout: as"
            " sample, where samples that are parts of one response count as one. constant: sum over tokens / (samples x"
            " --loss-divisor)."
        ),
    )
    loss_divisor: int | None = flag(
        None,
        help="Tokens that a sample is divided by with --loss-reduction constant, whatever its length (Dr. GRPO).",
        least=1,
    )
    custom_pg_loss_reducer_function_path: str | None = flag(
        None,
        help=(
            "function(args, samples) -> what one trained token of each sample of a train step weighs in the policy"
            " loss, instead of --loss-reduction."
        ),
    )
    reset_optimizer_states: bool = flag(
        False, help="Forget Adam's moments and step count before each rollout's first step."
    )

    @property
    def reduction(self) -> str:
        """sample, token, rollout or constant."""
        return self.loss_reduction or ("token" if self.calculate_per_token_loss else "sample")

    def problems(self) -> list[str]:
        """What is impossible about means."""
        problems = []
        if self.calculate_per_token_loss and self.loss_reduction not in (None, "token"):
            problems.append(
                f"--calculate-per-token-loss is --loss-reduction token, not {self.loss_reduction}. Fix: one of them."
            )
        if (self.loss_reduction == "constant") != (self.loss_divisor is not None):
            problems.append("--loss-reduction constant and --loss-divisor belong together. Fix: give both, or neither.")
        if self.loss_divisor is not None and self.loss_divisor < 1:
            problems.append(f"--loss-divisor {self.loss_divisor}: must be at least 1.")
        return problems
