"""DAPO's soft overlong punishment, against its three lines written out."""

from __future__ import annotations

import dataclasses

import pytest

from slime_like.config.reward import RewardConfig
from slime_like.rollout.rewards.overlong import overlong_penalty, punish_overlong
from tests.unit.rollout.rewards.test_scorer import make_sample


def equation_13(length: int, longest: int, cache: int) -> float:
    """R_length(y) of arXiv:2503.14476, as printed."""
    if length <= longest - cache:
        return 0.0
    if longest - cache < length <= longest:
        return ((longest - cache) - length) / cache
    return -1.0


@pytest.mark.parametrize(("longest", "cache"), [(100, 20), (20480, 4096), (8, 8), (8, 1)])
def test_every_length(longest, cache):
    for length in range(0, longest + 3, max(1, longest // 200)):
        assert overlong_penalty(length, max_tokens=longest, buffer_tokens=cache) == pytest.approx(
            equation_13(length, longest, cache), abs=1e-12
        )


def test_the_parts_stay_apart():
    config = RewardConfig(overlong_buffer_len=4, overlong_penalty_factor=0.5)
    scored = dataclasses.replace(make_sample(), reward=1.0)  # two trained tokens
    shaped = punish_overlong(scored, config, max_response_tokens=4)
    assert shaped.reward == 0.75 and shaped.reward_parts == {"rule": 1.0, "overlong": -0.25}
    both = dataclasses.replace(scored, reward_parts={"rule": 2.0, "model": -1.0})
    assert punish_overlong(both, config, max_response_tokens=4).reward_parts == {
        "rule": 2.0,
        "model": -1.0,
        "overlong": -0.25,
    }
    assert punish_overlong(scored, RewardConfig(), max_response_tokens=4) is scored
