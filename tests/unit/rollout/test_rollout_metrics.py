"""What the kept samples are like, in numbers; test_manager.py collects whole rollouts."""

from __future__ import annotations

import dataclasses

import numpy as np

from slime_like.config.observability import ObservabilityConfig
from slime_like.records import COMPLETED, TRUNCATED, Prompt, Sample, SampleGroup
from slime_like.rollout.rollout_metrics import detail_metrics, part_means, sample_metrics


def sample(num_tokens: int, reward: float, *, status: str = COMPLETED, parts: dict | None = None) -> Sample:
    mask = np.array([0] + [1] * num_tokens, dtype=np.int8)
    arrays = {name: np.zeros(len(mask)) for name in ("tokens", "engine_logprobs", "weight_versions")}
    return Sample(
        prompt_index=0,
        sample_index=0,
        response="",
        reward=reward,
        status=status,
        loss_mask=mask,
        reward_parts=parts or {},
        **arrays,
    )


def group(*samples: Sample) -> SampleGroup:
    numbered = tuple(dataclasses.replace(one, sample_index=number) for number, one in enumerate(samples))
    return SampleGroup(prompt=Prompt(index=0, text="q", tokens=np.zeros(1)), samples=numbered)


def test_rewards_and_lengths():
    metrics = sample_metrics(
        (group(sample(2, 1.0), sample(4, 0.0)), group(sample(6, 1.0), sample(8, 1.0, status=TRUNCATED)))
    )
    expected = {
        "reward_mean": 0.75,
        "response_tokens_mean": 5.0,
        "response_tokens_max": 8.0,
        "tokens": 20.0,
        "truncated_ratio": 0.25,
        "zero_std_groups": 1.0,
    }
    assert {name: metrics[f"rollout/{name}"] for name in expected} == expected
    assert np.isclose(metrics["rollout/reward_std"], np.sqrt(0.1875))  # of 1, 0, 1, 1


def test_parts_of_rewards_are_averaged_over_the_samples_that_have_them():
    samples = [sample(1, 1.0, parts={"rule": 1.0, "model": 0.2}), sample(1, 0.0, parts={"rule": 0.0}), sample(1, 0.0)]
    assert part_means(samples, "reward/") == {"reward/rule": 0.5, "reward/model": 0.2}
    assert part_means([sample(1, 1.0)], "reward/") == {}


def test_pass_rates_of_a_rollout_on_request():
    groups = (group(sample(1, 1.0), sample(1, 0.0)), group(sample(1, 0.0), sample(1, 0.0)))
    assert detail_metrics(groups, ObservabilityConfig(), 1.0) == {}
    assert detail_metrics(groups, ObservabilityConfig(log_passrate=True), 1.0) == {
        "rollout/pass@1": 0.25,
        "rollout/pass@2": 0.5,
    }


def test_turns_are_what_the_policy_chose_and_the_rest_behind_the_prompt_is_observed():
    """Two prompt tokens, a turn of two, two observed, a turn of one: 2 turns, 2 observed tokens."""
    two_turns = dataclasses.replace(
        sample(6, 1.0), weight_versions=np.array([-1, -1, 4, 4, -1, -1, 5]), loss_mask=np.zeros(7, dtype=np.int8)
    )
    one_turn = dataclasses.replace(sample(2, 1.0), weight_versions=np.array([-1, 4, 4]))
    metrics = detail_metrics((group(two_turns, one_turn),), ObservabilityConfig(log_multi_turn=True), 1.0)
    assert metrics == {
        "rollout/turns_mean": 1.5,
        "rollout/turns_max": 2.0,
        "rollout/observed_tokens_mean": 1.0,
        "rollout/observed_tokens_max": 2.0,
    }


def test_samples_that_pass_are_measured_by_themselves():
    right = dataclasses.replace(sample(2, 1.0), engine_logprobs=np.array([0.0, -0.5, -1.5]))
    groups = (group(right, sample(9, 0.0), sample(9, 0.5), sample(9, 0.0)),)
    assert detail_metrics(groups, ObservabilityConfig(log_correct_samples=True), 1.0) == {
        "rollout/correct/share": 0.25,
        "rollout/correct/response_tokens_mean": 2.0,
        "rollout/correct/logprob_mean": -1.0,
    }
    assert detail_metrics(groups, ObservabilityConfig(log_correct_samples=True), 2.0) == {"rollout/correct/share": 0.0}
