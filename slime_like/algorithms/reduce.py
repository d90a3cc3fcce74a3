"""Means over samples and tokens whose value does not depend on how the batch was cut up.

A mean over a global batch is written as a weighted sum with weights that are fixed before the batch is split:
every micro-batch and every data parallel rank then adds its part, and the parts are summed.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


def token_weights(num_tokens: Sequence[int], *, per_token: bool) -> np.ndarray:
    """What one trained token of each sample weighs in the mean over the global batch.

    num_tokens: [N], trained tokens of each sample of the *global* batch. Returns [N] float64.
    per_token: mean over all trained tokens. Otherwise: mean over each sample's tokens, then over the N samples.
    A sample without trained tokens weighs 0 (and still counts among the N).
    Example: [1, 3] -> [1/4, 1/4] per token, [1/2, 1/6] per sample.
    """
    counts = np.asarray(num_tokens, dtype=np.float64)
    if counts.size == 0:
        return counts
    if per_token:
        return np.where(counts > 0, 1.0 / max(counts.sum(), 1.0), 0.0)
    return np.where(counts > 0, 1.0 / (np.maximum(counts, 1.0) * counts.size), 0.0)


def weighted_sum(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """This part's share of a mean: sum of values [K] x weights [K], a scalar."""
    return (values * weights).sum()
