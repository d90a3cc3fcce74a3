"""How a reward becomes the advantage of each token, and the critic that some estimators compare with."""

from __future__ import annotations

import dataclasses

from slime_like.config.algorithms import ESTIMATOR_FLAGS, ESTIMATORS, owners
from slime_like.config.base import flag
from slime_like.config.loss.choice import LossChoice, shown


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdvantageFlags(LossChoice):
    """Flags of advantages, most of them for some values of --advantage-estimator."""

    gamma: float = flag(1.0, help="Discount of a later token's reward; ppo, reinforce_plus_plus.", least=0, most=1)
    lambd: float = flag(1.0, help="GAE's lambda: 1 trusts the rewards, 0 the critic; ppo.", least=0, most=1)
    normalize_advantages: bool = flag(
        False, help="Whiten the advantages over the tokens of the rollout; needed by reinforce_plus_plus(_baseline)."
    )
    value_clip: float = flag(
        0.2,
        help="How far the critic's value of a token may move in one rollout step before its loss stops pulling; ppo.",
        above=0,
    )
    num_critic_only_steps: int = flag(0, help="Rollout steps at the start that train the critic only; ppo.", least=0)

    def problems(self) -> list[str]:
        """What the estimator has no use for, or lacks."""
        problems = []
        if not 0 <= self.gamma <= 1 or not 0 <= self.lambd <= 1:
            problems.append(f"--gamma {self.gamma}, --lambd {self.lambd}: must be from 0 to 1.")
        if self.value_clip <= 0:
            problems.append(f"--value-clip {self.value_clip}: must be above 0.")
        if self.num_critic_only_steps < 0:
            problems.append(f"--num-critic-only-steps {self.num_critic_only_steps}: must not be negative.")
        if self.estimator.is_whitened and not self.normalize_advantages:
            problems.append(
                f"--advantage-estimator {self.advantage_estimator} is defined with whitened advantages. Fix:"
                " --normalize-advantages."
            )
        for flag_name in self.changed(ESTIMATOR_FLAGS):
            if flag_name not in self.estimator.flags:
                known = " or ".join(reversed(owners(ESTIMATORS, flag_name)))
                problems.append(
                    f"{shown(flag_name)} does nothing without --advantage-estimator {known}. Fix: add it, or drop this."
                )
        return problems
