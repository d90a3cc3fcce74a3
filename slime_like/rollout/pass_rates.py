"""How many prompts are answered rightly by one of k samples."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from slime_like.records import FAILED, SampleGroup


def pass_rates(groups: Sequence[SampleGroup], threshold: float) -> dict[str, float]:
    """pass@1, pass@2, pass@4, … up to the samples of a prompt, each the mean over the prompts.

    A sample passes with a reward of at least `threshold`.
    """
    passed = [
        [
            segments[-1].status != FAILED and reward >= threshold
            for segments, reward in zip(group.episodes, group.rewards, strict=True)
        ]
        for group in groups
    ]
    fewest = min(map(len, passed))
    sizes = [2**power for power in range(fewest.bit_length())]
    return {f"pass@{k}": float(np.mean([pass_at_k(len(flags), sum(flags), k) for flags in passed])) for k in sizes}


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """How likely at least one of k samples passes: the unbiased estimator of Chen et al. 2021 (arXiv:2107.03374, eq.

    1).
    1 - C(n - c, k) / C(n, k) of n samples of which c passed; needs k <= n. Example: 4, 1, 2 -> 1 - 3/6 = 0.5
    """
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)
