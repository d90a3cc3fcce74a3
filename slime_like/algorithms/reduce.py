"""Means over samples and tokens whose value does not depend on how the batch was cut up.

A mean over a global batch is written as a weighted sum with weights that are fixed before the batch is split:
every micro-batch and every data parallel rank then adds its part, and the parts are summed.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
import torch

from slime_like.errors import DataError


def token_weights(
    num_tokens: Sequence[int],
    *,
    reduction: str = "sample",
    rollouts: Sequence[Hashable] | None = None,
    divisor: int | None = None,
) -> np.ndarray:
    """What one trained token of each sample weighs in the mean over the global batch.

    num_tokens: [N], trained tokens of each sample of the *global* batch. Returns [N] float64. reduction:
    sample: mean over each sample's tokens, then over the N samples (GRPO, arXiv:2402.03300, eq. 3).
    token: mean over all trained tokens (DAPO, arXiv:2503.14476, eq. 8).
    rollout: as sample, where samples with the same entry in `rollouts` [N], parts of one response, count as one.
    constant: sum over tokens / (N x divisor), so that no length is favoured (Dr. GRPO, arXiv:2503.20783, sec. 3.2).
    A sample (or rollout) without trained tokens weighs 0 and still counts among the N. Raises ValueError for another
    reduction.
    Example: [1, 3] -> [1/4, 1/4] per token, [1/2, 1/6] per sample, [1/20, 1/20] with divisor 10; parts of one rollout:
    [1/4, 1/4].
    """
    counts = np.asarray(num_tokens, dtype=np.float64)
    if counts.size == 0:
        return counts
    if reduction == "token":
        weights = np.full(counts.size, 1.0 / max(counts.sum(), 1.0))
    elif reduction == "sample":
        weights = 1.0 / (np.maximum(counts, 1.0) * counts.size)
    elif reduction == "rollout":
        assert rollouts is not None, "means per rollout need to know the rollouts"
        totals: dict[Hashable, float] = dict.fromkeys(rollouts, 0.0)
        for rollout, count in zip(rollouts, counts.tolist(), strict=True):
            totals[rollout] += count
        weights = np.array([1.0 / (max(totals[rollout], 1.0) * len(totals)) for rollout in rollouts])
    elif reduction == "constant":
        assert divisor is not None, "a constant reduction needs its divisor"
        weights = np.full(counts.size, 1.0 / (counts.size * divisor))
    else:
        raise ValueError(f"reduction {reduction!r} is unknown. Known: sample, token, rollout, constant.")
    return np.where(counts > 0, weights, 0.0)


def checked_weights(weights: object, num_samples: int, path: str) -> np.ndarray:
    """What a user's --custom-pg-loss-reducer-function-path gave for a train step, as [N] float64.

    Raises DataError if it is not N finite numbers.
    """
    try:
        values = np.asarray(weights, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise DataError(f"--custom-pg-loss-reducer-function-path {path}: gave no numbers: {error}") from error
    if values.shape != (num_samples,) or not np.isfinite(values).all():
        raise DataError(
            f"--custom-pg-loss-reducer-function-path {path}: gave an array of shape {values.shape} for {num_samples}"
            " samples. It must give one finite number each: what a trained token of that sample weighs."
        )
    return values


def weighted_sum(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """This part's share of a mean: sum of values [K] x weights [K], a scalar."""
    return (values * weights).sum()
