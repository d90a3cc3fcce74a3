"""The whole answer, and ended by the model itself."""

from __future__ import annotations

import numpy as np
import pytest

from slime_like.records import COMPLETED, TRUNCATED, Sample
from slime_like.rollout.rewards.exact import exact


@pytest.mark.parametrize(
    ("response", "label", "status", "reward"),
    [
        ("0237", "0237", COMPLETED, 1.0),
        (" 0237\n", "0237 ", COMPLETED, 1.0),
        ("7", 7, COMPLETED, 1.0),
        ("0237.", "0237", COMPLETED, 0.0),
        ("237", "0237", COMPLETED, 0.0),
        ("0237", "0237", TRUNCATED, 0.0),
    ],
)
def test_all_or_nothing(response: str, label, status: str, reward: float):
    arrays = {name: np.zeros(1) for name in ("tokens", "loss_mask", "engine_logprobs", "weight_versions")}
    assert (
        exact(Sample(prompt_index=0, sample_index=0, response=response, label=label, status=status, **arrays)) == reward
    )
