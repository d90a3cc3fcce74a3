"""Advantages, losses, corrections for off-policy samples, and what a mean is taken over: one file a subject, one group
of flags.

docs/algorithms.md has the papers.
"""

from __future__ import annotations

import dataclasses

from slime_like.config.loss.advantages import AdvantageFlags
from slime_like.config.loss.choice import LossChoice
from slime_like.config.loss.distillation import DistillationFlags
from slime_like.config.loss.kl import KlFlags
from slime_like.config.loss.off_policy import OffPolicyFlags
from slime_like.config.loss.policy_loss import PolicyLossFlags
from slime_like.config.loss.reduction import ReductionFlags

#: In the order of --help: a dataclass takes the fields of its last base first.
_PARTS = (
    LossChoice,
    PolicyLossFlags,
    KlFlags,
    AdvantageFlags,
    DistillationFlags,
    OffPolicyFlags,
    ReductionFlags,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig(ReductionFlags, OffPolicyFlags, DistillationFlags, AdvantageFlags, KlFlags, PolicyLossFlags):
    """Loss and advantages"""

    @property
    def varies_within_samples(self) -> bool:
        """Whether the tokens of one sample may have different advantages."""
        return self.estimator.tokens is not None or self.kl_coef > 0 or self.use_opd

    @property
    def has_token_advantages(self) -> bool:
        """Whether the trainer makes an advantage for each token; else every token has its sample's."""
        return (self.varies_within_samples or self.normalize_advantages) and self.loss_type != "sft_loss"

    def problems(self) -> list[str]:
        """What is impossible about the loss."""
        problems = [problem for part in _PARTS for problem in part.problems(self)]
        if self.loss_type == "policy_loss" and self.policy_row.needs_sample_advantages and self.varies_within_samples:
            origin = (
                "--use-opd"
                if self.use_opd
                else f"--advantage-estimator {self.advantage_estimator}" + (" with --kl-coef" if self.kl_coef else "")
            )
            problems.append(
                f"--policy-loss {self.policy_loss_name} has one term a sample, and {origin} gives each token an"
                " advantage of its own. Fix: --policy-loss gspo or clip."
            )
        return problems
