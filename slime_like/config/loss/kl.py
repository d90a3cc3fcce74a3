"""The KL to a reference: in the loss or inside the rewards, and how the reference moves."""

from __future__ import annotations

import dataclasses

from slime_like.config.algorithms import ESTIMATORS
from slime_like.config.base import flag
from slime_like.config.loss.choice import LossChoice
from slime_like.errors import CheckpointError


@dataclasses.dataclass(frozen=True, kw_only=True)
class KlFlags(LossChoice):
    """Where the KL goes, its estimator, and when the reference becomes the policy."""

    use_kl_loss: bool = flag(False, help="Add --kl-loss-coef x KL(policy, reference) to the loss; loads the reference.")
    kl_loss_coef: float = flag(0.0, help="Weight of the KL loss. At 0 the KL is only measured.", least=0)
    kl_loss_type: str = flag(
        "k1",
        choices=("k1", "k2", "k3", "low_var_kl"),
        help=(
            "KL estimator of the KL loss (Schulman); low_var_kl is k3 clamped to +-10. k1 without --use-unbiased-kl"
            " teaches nothing on average."
        ),
    )
    use_unbiased_kl: bool = flag(
        False, help="Weigh the KL loss by new / old probability, so that it stays unbiased when samples are off-policy."
    )
    kl_coef: float = flag(
        0.0,
        help=(
            "Weight of a KL penalty (k1, to --ref-load) inside each token's reward; with ppo, reinforce_plus_plus or"
            " reinforce_plus_plus_baseline."
        ),
        least=0,
    )
    ref_update_interval: int | None = flag(
        None,
        help="Every this many rollouts the reference becomes the present policy. Default: it stays --ref-load.",
        least=1,
    )

    @property
    def kl_in_trainer(self) -> bool:
        """Whether the policy's trainer puts the KL into advantages by itself.

        With a critic, which needs it too, it comes with the samples.
        """
        return self.kl_coef > 0 and self.estimator.compares_with != "critic"

    def updates_reference_after(self, step: int) -> bool:
        """Whether the reference becomes the policy when rollout step `step` has been trained on."""
        return bool(self.ref_update_interval) and (step + 1) % (self.ref_update_interval or 1) == 0

    def check_resume(self, num_rollouts_done: int) -> None:
        """Raise CheckpointError if a checkpoint was written between two updates of the reference: the one of that time
        is not in it.
        """
        late = num_rollouts_done % (self.ref_update_interval or 1)
        if late:
            raise CheckpointError(
                f"a checkpoint after {num_rollouts_done} rollouts does not hold the reference, which was updated {late}"
                f" rollouts before (--ref-update-interval {self.ref_update_interval}). Fix: --ckpt-step of a multiple"
                " of the interval; or --finetune, with another --ref-load."
            )

    def problems(self) -> list[str]:
        """What is impossible about the KL and its reference."""
        problems = []
        if self.kl_loss_coef and not self.use_kl_loss:
            problems.append(f"--kl-loss-coef {self.kl_loss_coef} does nothing without --use-kl-loss. Fix: add it.")
        if self.kl_coef and not self.use_kl_loss and self.kl_loss_type != KlFlags.kl_loss_type:
            problems.append(
                f"--kl-loss-type {self.kl_loss_type} is for the KL loss; the KL of --kl-coef {self.kl_coef} is always"
                " k1. Fix: drop one of them."
            )
        if self.use_unbiased_kl and not self.use_kl_loss:
            problems.append("--use-unbiased-kl does nothing without --use-kl-loss. Fix: add it.")
        if self.use_unbiased_kl and self.kl_loss_type == "k2":
            problems.append(
                "--use-unbiased-kl with --kl-loss-type k2: half a square is no unbiased KL, however it is weighed. Fix:"
                " k1, k3 or low_var_kl."
            )
        if self.ref_update_interval is not None and self.ref_update_interval < 1:
            problems.append(f"--ref-update-interval {self.ref_update_interval}: must be at least 1.")
        if self.kl_coef < 0:
            problems.append(f"--kl-coef {self.kl_coef}: must not be negative.")
        if self.kl_coef and self.kl_loss_coef:
            problems.append(
                f"--kl-coef {self.kl_coef} and --kl-loss-coef {self.kl_loss_coef} punish the same KL twice. Fix: one of"
                " them."
            )
        if self.kl_coef and not self.estimator.takes_kl:
            takers = ", ".join(name for name, row in ESTIMATORS.items() if row.takes_kl)
            problems.append(
                f"--kl-coef {self.kl_coef} needs rewards per token: --advantage-estimator {takers}. Fix: --use-kl-loss"
                " --kl-loss-coef."
            )
        return problems
