"""Pass rates against the share of draws, by hand and by counting."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from slime_like.records import FAILED, Prompt, SampleGroup
from slime_like.rollout.pass_rates import pass_at_k, pass_rates
from tests.unit.rollout.rewards.test_scorer import make_sample


def test_pass_at_k_is_the_share_of_draws_that_hold_a_passing_sample():
    for n, c in ((1, 0), (1, 1), (4, 1), (5, 2), (8, 7), (8, 8)):
        flags = [True] * c + [False] * (n - c)
        for k in range(1, n + 1):
            draws = list(itertools.combinations(flags, k))
            assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, draws)) / len(draws), abs=1e-12)


def group_of(*rewards, failed=()):
    prompt = Prompt(index=0, text="p", tokens=np.array([1, 2], dtype=np.int32))
    samples = [
        dataclasses.replace(make_sample(status=FAILED if place in failed else "completed"), sample_index=place)
        for place in range(len(rewards))
    ]
    return SampleGroup(
        prompt=prompt,
        samples=tuple(
            dataclasses.replace(sample, reward=reward) for sample, reward in zip(samples, rewards, strict=True)
        ),
    )


def test_rewards_are_no_pass_rates():
    groups = [group_of(-1.0, -1.0, 0.9, -1.0, 1.0), group_of(-1.0, -1.0, -1.0, -1.0, -1.0)]
    assert pass_rates(groups, 1.0) == pytest.approx({"pass@1": 0.1, "pass@2": 0.2, "pass@4": 0.4})
    assert pass_rates(groups, 0.5) == pytest.approx({"pass@1": 0.2, "pass@2": 0.35, "pass@4": 0.5})


def test_what_was_never_generated_does_not_pass():
    assert pass_rates([group_of(0.0, 0.0, failed=(1,))], 0.0) == {"pass@1": 0.5, "pass@2": 1.0}
