"""Bounds, gates and picks of the policy losses: what each --policy-loss reads."""

from __future__ import annotations

import dataclasses

from slime_like.config.algorithms import POLICY_LOSS_FLAGS, POLICY_LOSSES, owners
from slime_like.config.base import flag
from slime_like.config.loss.choice import LossChoice, shown


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyLossFlags(LossChoice):
    """Flags of a token's loss, each for some values of --policy-loss."""

    eps_clip: float = flag(
        0.2,
        help="Clip range of the ratio below 1; with --policy-loss gmpo of the log-ratio below 0.",
        least=0,
    )
    eps_clip_high: float | None = flag(
        None,
        help="Clip range above 1 (clip-higher), gmpo: above 0. Default: --eps-clip.",
        least=0,
    )
    eps_clip_c: float | None = flag(
        None, help="Dual clip: bound for negative advantages, above 1; --policy-loss clip.", above=1
    )
    sapo_temperature_pos: float = flag(
        1.0,
        help="How fast the gate closes as the ratio leaves 1, where the advantage is positive; --policy-loss sapo.",
        above=0,
    )
    sapo_temperature_neg: float = flag(1.05, help="The same where the advantage is not positive.", above=0)
    clip_cov_ratio: float = flag(
        0.0002, help="Share of a train step's trained tokens that --policy-loss clip_cov leaves out; at least one."
    )
    clip_cov_lb: float = flag(
        1.0, help="Left out are tokens whose covariance is above this, drawn at random; clip_cov."
    )
    clip_cov_ub: float = flag(5.0, help="And below this; clip_cov.")
    kl_cov_ratio: float = flag(
        0.0002,
        help=(
            "Share of a train step's trained tokens that --policy-loss kl_cov holds back: those of highest covariance."
        ),
    )
    ppo_kl_coef: float = flag(1.0, help="Weight of their |log new - log old probability|; kl_cov.")

    @property
    def clip_high(self) -> float:
        """Clip range above 1."""
        return self.eps_clip if self.eps_clip_high is None else self.eps_clip_high

    def problems(self) -> list[str]:
        """Bounds that make no sense, and what --policy-loss, or the user's own loss of a token, has no use for."""
        problems = []
        if self.eps_clip < 0 or (self.eps_clip_high or 0) < 0:
            problems.append(f"--eps-clip {self.eps_clip}, --eps-clip-high {self.eps_clip_high}: must not be negative.")
        if self.eps_clip_c is not None and self.eps_clip_c <= 1:
            problems.append(f"--eps-clip-c {self.eps_clip_c}: must be above 1.")
        if self.loss_type != "policy_loss":
            return problems
        for flag_name in self.changed(POLICY_LOSS_FLAGS):
            if flag_name not in self.policy_row.flags:
                known = ", ".join(owners(POLICY_LOSSES, flag_name))
                problems.append(
                    f"{shown(flag_name)} {getattr(self, flag_name)} does nothing with --policy-loss"
                    f" {self.policy_loss_name}, only with {known}. Fix: one of them, or drop this."
                )
        if min(self.sapo_temperature_pos, self.sapo_temperature_neg) <= 0:
            problems.append(
                f"--sapo-temperature-pos {self.sapo_temperature_pos}, --sapo-temperature-neg"
                f" {self.sapo_temperature_neg}: must be above 0."
            )
        for flag_name in ("clip_cov_ratio", "kl_cov_ratio"):
            if not 0 < getattr(self, flag_name) <= 1:
                problems.append(
                    f"{shown(flag_name)} {getattr(self, flag_name)}: a share of the tokens is above 0 and at most 1."
                )
        if self.clip_cov_lb >= self.clip_cov_ub:
            problems.append(
                f"--clip-cov-lb {self.clip_cov_lb} and --clip-cov-ub {self.clip_cov_ub}: nothing lies between them."
                " Fix: lower < upper."
            )
        if self.ppo_kl_coef < 0:
            problems.append(f"--ppo-kl-coef {self.ppo_kl_coef}: must not be negative.")
        return problems
