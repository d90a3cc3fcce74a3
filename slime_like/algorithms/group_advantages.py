"""Rewards of one prompt's samples -> one advantage per sample. NumPy only: the rollout side has no torch."""

from __future__ import annotations

import numpy as np

from slime_like.config.training import LossConfig
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
        raise DataError(f"a group of shape {rewards.shape} has no baseline: at least 2 rewards are needed. Fix: --n-samples-per-prompt 2 or more.")
    _check_finite(rewards)
    # An exact test: the mean of equal numbers may differ from them by a rounding error, which the deviation would blow up.
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


def normalize(rewards: np.ndarray, loss: LossConfig) -> np.ndarray:
    """Advantages [G] of one group as the loss flags ask for, whatever its size.

    A group of one has no baseline and returns its raw reward, as does --disable-rewards-normalization; with ppo the critic
    is the baseline, with reinforce_plus_plus the whole batch (token_advantages). reinforce_plus_plus_baseline (arXiv:2501.03262,
    sec. 3.2) subtracts the group's mean here; its scale is the whole batch's, too.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    estimator = loss.advantage_estimator
    if loss.disable_rewards_normalization or len(rewards) == 1 or estimator in ("ppo", "reinforce_plus_plus"):
        _check_finite(rewards)
        return rewards.copy()
    if estimator == "rloo":
        return leave_one_out_advantages(rewards)
    return group_advantages(rewards, normalize_std=not loss.disable_grpo_std_normalization and estimator != "reinforce_plus_plus_baseline")


def checked(advantages: object, num_samples: int, path: str) -> np.ndarray:
    """What a user's --custom-advantage-function-path gave for a group, as [G] float64. Raises DataError if it is anything but G finite numbers."""
    try:
        found = np.asarray(advantages, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"--custom-advantage-function-path {path}: gave no numbers: {error}") from error
    if found.shape != (num_samples,) or not np.isfinite(found).all():
        raise DataError(f"--custom-advantage-function-path {path}: gave {found.tolist()} for a group of {num_samples}. It must give one finite number each.")
    return found


def _check_finite(rewards: np.ndarray) -> None:
    if not np.isfinite(rewards).all():
        raise DataError(f"rewards must be finite numbers, got {rewards.tolist()}")
