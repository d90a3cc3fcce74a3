"""What --advantage-estimator and --policy-loss choose from: a row each, with all that flags and code need to know of
it. Imports no torch.

A new estimator or policy loss is a row here, with its flags in config/loss/, and a function in algorithms/ under the
name that the row gives: group_advantages.BASELINES, token_advantages.TOKEN_ADVANTAGES or policy_losses.POLICY_LOSSES.
docs/algorithms.md has the papers.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimator:
    """One value of --advantage-estimator.

    Example: grpo = the group's mean is subtracted, the group's deviation divides, the loss is PPO's.
    """

    summary: str  # for --help
    compares_with: str = "group"  # group, batch or critic
    #: what is subtracted within a group: mean, or others (the mean of the group's others); None: nothing
    baseline: str | None = "mean"
    scale: str | None = None  # whose standard deviation divides: group, or batch (the rollout); None: nobody's
    #: how a sample's reward becomes an advantage for each token: gae or returns; None: each has the sample's
    tokens: str | None = None
    takes_kl: bool = False  # whether --kl-coef has a place in it
    is_whitened: bool = False  # whether its definition ends with --normalize-advantages
    flags: tuple[str, ...] = ()  # LossConfig fields that mean something with it, and not with every estimator
    policy_loss: str = "clip"  # what --policy-loss is by default


ESTIMATORS = {
    "grpo": Estimator(summary="group mean and deviation", scale="group"),
    "dr_grpo": Estimator(summary="group mean"),
    "grpo_batch_std": Estimator(summary="group mean, the rollout's deviation", scale="batch"),
    "gspo": Estimator(summary="grpo with --policy-loss gspo", scale="group", policy_loss="gspo"),
    "cispo": Estimator(summary="grpo with --policy-loss cispo", scale="group", policy_loss="cispo"),
    "rloo": Estimator(summary="mean of the group's others", baseline="others"),
    "reinforce_plus_plus": Estimator(
        summary="discounted rewards, whitened over the batch",
        compares_with="batch",
        baseline=None,
        tokens="returns",
        takes_kl=True,
        is_whitened=True,
        flags=("gamma",),
    ),
    "reinforce_plus_plus_baseline": Estimator(
        summary="group mean, whitened over the batch", takes_kl=True, is_whitened=True
    ),
    "ppo": Estimator(
        summary="a critic",
        compares_with="critic",
        baseline=None,
        tokens="gae",
        takes_kl=True,
        flags=("gamma", "lambd", "value_clip", "num_critic_only_steps"),
    ),
}

_BOUNDS = ("eps_clip", "eps_clip_high")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """One value of --policy-loss.

    Example: clip = PPO's bounded ratio, to which --eps-clip, --eps-clip-high and --eps-clip-c belong.
    """

    summary: str  # for --help
    flags: tuple[str, ...] = _BOUNDS  # LossConfig fields that mean something with it, and not with every policy loss
    has_ratio: bool = True  # whether it looks at new / old probability
    needs_sample_advantages: bool = False  # whether all tokens of a sample must have one advantage
    #: which tokens of a train step it treats apart, by their covariance: band or highest (algorithms/covariance.py)
    picks: str | None = None


POLICY_LOSSES = {
    "clip": PolicyLoss(summary="PPO's bounded ratio", flags=(*_BOUNDS, "eps_clip_c")),
    "gspo": PolicyLoss(summary="one bounded ratio a sample"),
    "cispo": PolicyLoss(summary="bounded weight on log-probs"),
    "gmpo": PolicyLoss(
        summary="geometric mean of ratios that are bounded one by one, in log space", needs_sample_advantages=True
    ),
    "sapo": PolicyLoss(
        summary="sigmoid of the ratio instead of bounds", flags=("sapo_temperature_pos", "sapo_temperature_neg")
    ),
    "clip_cov": PolicyLoss(
        summary="clip, without some tokens of high covariance",
        flags=(*_BOUNDS, "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"),
        picks="band",
    ),
    "kl_cov": PolicyLoss(
        summary="unbounded, with a KL penalty on tokens of the highest covariance",
        flags=("kl_cov_ratio", "ppo_kl_coef"),
        picks="highest",
    ),
    "reinforce": PolicyLoss(summary="-advantage x log-prob, without ratio or bound", flags=(), has_ratio=False),
}

#: LossConfig fields that belong to some estimators or policy losses only, in the order of their rows.
ESTIMATOR_FLAGS = tuple(dict.fromkeys(name for row in ESTIMATORS.values() for name in row.flags))
POLICY_LOSS_FLAGS = tuple(dict.fromkeys(name for row in POLICY_LOSSES.values() for name in row.flags))

#: The row of --custom-policy-loss-function-path: the function may read every flag.
CUSTOM_POLICY_LOSS = PolicyLoss(summary="the user's own", flags=POLICY_LOSS_FLAGS)


def owners(rows: dict, flag_name: str) -> list[str]:
    """Names of the rows that a flag belongs to.

    Example: owners(ESTIMATORS, "gamma") -> ["reinforce_plus_plus", "ppo"].
    """
    return [name for name, row in rows.items() if flag_name in row.flags]


def summaries(rows: dict) -> str:
    """One line for --help. Example: "clip (PPO's bounded ratio), gspo (one bounded ratio a sample), …"."""
    return ", ".join(f"{name} ({row.summary})" for name, row in rows.items())
