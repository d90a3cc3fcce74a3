"""Rewards of one prompt's samples -> one advantage per sample. NumPy only: the rollout side has no torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from slime_like.config.loss import LossConfig
from slime_like.errors import DataError

#: Added to the standard deviation, so that nearly equal rewards do not explode.
STD_EPSILON = 1e-6


def group_advantages(rewards: np.ndarray, *, normalize_std: bool) -> np.ndarray:
    """Center the rewards of one prompt's samples (GRPO, arXiv:2402.03300, sec. 4.1).

    rewards: [G], any scale. Returns [G] float64, summing to 0; all zeros if every reward is equal.
    The deviation has G - 1 in its denominator. Raises DataError if G < 2 or a reward is not finite.
    Example: [1, 0, 0, 1] -> [.5, -.5, -.5, .5] without std.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    if rewards.ndim != 1 or len(rewards) < 2:
        raise DataError(
            f"a group of shape {rewards.shape} has no baseline: at least 2 rewards are needed. Fix:"
            " --n-samples-per-prompt 2 or more."
        )
    _check_finite(rewards)
    # An exact test: the mean of equal numbers may differ from them by a rounding error, which the deviation would blow
    # up.
    if np.all(rewards == rewards[0]):
        return np.zeros_like(rewards)
    centered = rewards - rewards.mean()
    return centered / (rewards.std(ddof=1) + STD_EPSILON) if normalize_std else centered


def leave_one_out_advantages(rewards: np.ndarray) -> np.ndarray:
    """Each reward minus the mean of the group's others (RLOO, arXiv:2402.14740, eq. 6).

    rewards: [G], any scale. Returns [G] float64, summing to 0. Raises DataError if G < 2 or a reward is not finite.
    Example: [1, 0, 0] -> [1, -.5, -.5].
    """
    centered = group_advantages(rewards, normalize_std=False)
    return centered * len(centered) / (len(centered) - 1)


def _centered(rewards: np.ndarray) -> np.ndarray:
    return group_advantages(rewards, normalize_std=False)


#: Estimator.baseline -> rewards of a group [G >= 2] minus it.
BASELINES: dict[str, Callable[[np.ndarray], np.ndarray]] = {"mean": _centered, "others": leave_one_out_advantages}


def batch_deviation(groups: Iterable[np.ndarray]) -> float:
    """Standard deviation of the rewards of a whole rollout, with their number - 1 in its denominator.

    0 for fewer than two.
    """
    rewards = np.concatenate([np.zeros(0), *groups])
    return float(rewards.std(ddof=1)) if len(rewards) > 1 else 0.0


def normalize(rewards: np.ndarray, loss: LossConfig, *, group_size: int = 1, deviation: float = 0.0) -> np.ndarray:
    """Advantages [G] of one group as the estimator's row says (config/algorithms.py), whatever the group's size.

    group_size: how many samples of a prompt were asked for. A single one that is left of several, as the others failed,
    has nothing to be compared with and teaches nothing: 0. Where one was asked for, its raw reward is its advantage:
    plain REINFORCE. So it is with --disable-rewards-normalization, and with estimators that compare with a critic or
    the whole batch (token_advantages).
    deviation: that of the rollout's rewards, for estimators whose scale it is (arXiv:2508.08221: the group's mean, the
    batch's deviation).
    """
    rewards, row = np.asarray(rewards, dtype=np.float64), loss.estimator
    _check_finite(rewards)
    if loss.disable_rewards_normalization or row.baseline is None:
        return rewards.copy()
    if len(rewards) == 1:
        return rewards.copy() if group_size == 1 else np.zeros(1)
    compared = BASELINES[row.baseline](rewards)
    if row.scale == "group" and not loss.disable_grpo_std_normalization:
        return compared / (rewards.std(ddof=1) + STD_EPSILON)
    return compared / (deviation + STD_EPSILON) if row.scale == "batch" else compared


def checked(advantages: object, num_samples: int, path: str) -> np.ndarray:
    """What a user's --custom-advantage-function-path gave for a group, as [G] float64.

    Raises DataError if it is anything but G finite numbers.
    """
    try:
        values = np.asarray(advantages, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"--custom-advantage-function-path {path}: gave no numbers: {error}") from error
    if values.shape != (num_samples,) or not np.isfinite(values).all():
        raise DataError(
            f"--custom-advantage-function-path {path}: gave {values.tolist()} for a group of {num_samples}. It must"
            " give one finite number each."
        )
    return values


def _check_finite(rewards: np.ndarray) -> None:
    if not np.isfinite(rewards).all():
        raise DataError(f"rewards must be finite numbers, got {rewards.tolist()}")
