"""Which groups are kept, and what a user's filter may answer."""

from __future__ import annotations

import numpy as np
import pytest

from slime_like.errors import RunError
from slime_like.records import Prompt, Sample, SampleGroup
from slime_like.rollout.filters import apply_filter, reward_nonzero_std


def group(*rewards: float) -> SampleGroup:
    arrays = {name: np.zeros(1) for name in ("tokens", "loss_mask", "engine_logprobs", "weight_versions")}
    samples = tuple(
        Sample(prompt_index=7, sample_index=index, response="", reward=reward, **arrays)
        for index, reward in enumerate(rewards)
    )
    return SampleGroup(prompt=Prompt(index=7, text="q", tokens=np.zeros(1)), samples=samples)


@pytest.mark.parametrize(
    ("rewards", "keep", "reason"),
    [((1, 0, 1), True, "all_rewards_1"), ((0.5, 0.5), False, "all_rewards_0.5"), ((0, 0), False, "all_rewards_0")],
)
def test_equal_rewards_teach_nothing(rewards: tuple[float, ...], keep: bool, reason: str):
    assert reward_nonzero_std(None, group(*rewards).samples) == (keep, reason)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (True, (True, "filtered")),
        (np.False_, (False, "filtered")),
        ((False, "too easy"), (False, "too easy")),
        ((False, ""), (False, "filtered")),
    ],
)
def test_what_a_filter_may_answer(answer, expected: tuple[bool, str]):
    assert apply_filter(lambda args, samples: answer, "a.b", None, group(1)) == expected


def test_a_filter_gets_the_arguments_and_all_samples():
    kept = apply_filter(
        lambda args, samples: (args == "view" and len(samples) == 3, "few"), "a.b", "view", group(1, 0, 1)
    )
    assert kept == (True, "few")


def test_a_bad_filter_is_named_with_its_prompt():
    with pytest.raises(
        RunError, match="--dynamic-sampling-filter-path a.b, prompt 7: the filter gave 1, neither a bool"
    ):
        apply_filter(lambda args, samples: 1, "a.b", None, group(1))
    with pytest.raises(RunError, match="--dynamic-sampling-filter-path a.b, prompt 7: the filter raised KeyError: 'x'"):
        apply_filter(lambda args, samples: {}["x"], "a.b", None, group(1))
