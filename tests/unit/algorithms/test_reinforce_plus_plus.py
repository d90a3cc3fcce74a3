"""REINFORCE++, its baseline variant, whitening and distillation: by hand, and against loops in Python's floats."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from slime_like.algorithms.group_advantages import checked, normalize
from slime_like.algorithms.token_advantages import discounted_returns, sample_advantages
from slime_like.config.loss import LossConfig
from slime_like.errors import DataError
from slime_like.records import TrainSample, per_token


def alone(tensor):
    return tensor


def sample(loss_mask, *, reward=1.0, advantage=0.0, kl=None, distillation=None):
    length = len(loss_mask)
    return TrainSample(
        prompt_index=0,
        sample_index=0,
        tokens=np.arange(length, dtype=np.int32),
        loss_mask=np.array(loss_mask, dtype=np.int8),
        engine_logprobs=np.zeros(length, dtype=np.float32),
        weight_versions=np.zeros(length, dtype=np.int32),
        reward=reward,
        advantages=per_token(advantage, loss_mask),
        weights=per_token(1.0, loss_mask),
        kl=None if kl is None else np.array(kl, dtype=np.float32),
        distillation=None if distillation is None else np.array(distillation, dtype=np.float32),
    )


def test_returns_by_hand_skip_masked_tokens():
    rewards = torch.tensor([[9.0, 0.5, 9.0, 1.0, 9.0]]).double()
    returns = discounted_returns(rewards, torch.tensor([[0, 1, 0, 1, 0]]).bool(), gamma=0.5)
    assert returns.tolist() == [[0, 1.0, 0, 1.0, 0]]  # .5 + .5 x 1: the masked token is no step of the discount


def test_reward_and_kl_by_hand():
    # Reward 1 at the last token, KL .5 at both: rewards [-.05, .95], returns with gamma 1 [.9, .95].
    loss = LossConfig(advantage_estimator="reinforce_plus_plus", kl_coef=0.1)
    (advantages,), (returns,) = sample_advantages([sample([0, 1, 1], kl=[0, 0.5, 0.5])], loss, alone)
    np.testing.assert_allclose(advantages, [0, 0.9, 0.95], atol=1e-7)
    np.testing.assert_array_equal(advantages, returns)


def test_baseline_by_hand():
    # Rewards 1, 0, 0.5 of one prompt: centred .5, -.5, 0, whatever --disable-grpo-std-normalization says; the KL of a
    # token comes off there only.
    loss = LossConfig(advantage_estimator="reinforce_plus_plus_baseline", kl_coef=0.1)
    assert normalize(np.array([1.0, 0.0, 0.5]), loss).tolist() == [0.5, -0.5, 0.0]
    (advantages,), _ = sample_advantages([sample([0, 1, 0, 1], advantage=0.5, kl=[0, 1, 9, 2])], loss, alone)
    np.testing.assert_allclose(advantages, [0, 0.4, 0, 0.3], atol=1e-7)


def test_reinforce_plus_plus_takes_rewards_as_they_are():
    assert normalize(np.array([1.0, 0.0, 0.5]), LossConfig(advantage_estimator="reinforce_plus_plus")).tolist() == [
        1,
        0,
        0.5,
    ]


def test_distillation_by_hand():
    # The policy likes its token by 1 more than the teacher does: .5 off. Rewards have been compared before.
    loss = LossConfig(use_opd=True, opd_kl_coef=0.5, opd_teacher_load="/teacher")
    (advantages,), _ = sample_advantages([sample([0, 1, 0, 1], advantage=2.0, distillation=[9, 1, 9, -1])], loss, alone)
    np.testing.assert_allclose(advantages, [0, 1.5, 0, 2.5], atol=1e-7)


def batch(seed=0):
    rng = np.random.default_rng(seed)
    samples = []
    for number in range(10):
        length = int(rng.integers(2, 25))
        mask = rng.integers(0, 2, length) * (number != 4)  # one sample has nothing to train on
        options = {"reward": float(rng.normal()), "advantage": float(rng.normal())}
        samples.append(sample(mask, **options, kl=rng.normal(size=length), distillation=rng.normal(size=length)))
    return samples


def oracle(samples, loss):
    """{(sample, token): advantage} over trained tokens, in loops over Python's floats."""
    advantages = {}
    for number, one in enumerate(samples):
        steps = [t for t in range(1, len(one.tokens)) if one.loss_mask[t]]
        for place, t in enumerate(steps):
            if loss.advantage_estimator == "reinforce_plus_plus":
                value = sum(
                    loss.gamma**ahead * -loss.kl_coef * float(one.kl[u]) for ahead, u in enumerate(steps[place:])
                )
                value += loss.gamma ** (len(steps) - 1 - place) * one.reward
            else:
                value = float(one.advantages[t]) - loss.kl_coef * float(one.kl[t])
            if loss.use_opd:
                value -= loss.opd_kl_coef * float(one.distillation[t])
            advantages[number, t] = value
    if loss.normalize_advantages:
        mean = sum(advantages.values()) / len(advantages)
        variance = sum((value - mean) ** 2 for value in advantages.values()) / (len(advantages) - 1)
        advantages = {place: (value - mean) / math.sqrt(variance + 1e-8) for place, value in advantages.items()}
    return advantages


@pytest.mark.parametrize(
    "options",
    [
        {"advantage_estimator": "reinforce_plus_plus", "gamma": 0.9, "kl_coef": 0.2, "normalize_advantages": True},
        {"advantage_estimator": "reinforce_plus_plus", "gamma": 1.0},
        {"advantage_estimator": "reinforce_plus_plus_baseline", "kl_coef": 0.3, "normalize_advantages": True},
        {"advantage_estimator": "grpo", "normalize_advantages": True},
        {"advantage_estimator": "grpo", "use_opd": True, "opd_kl_coef": 0.7},
        {
            "advantage_estimator": "reinforce_plus_plus_baseline",
            "kl_coef": 0.3,
            "use_opd": True,
            "normalize_advantages": True,
        },
    ],
)
def test_ragged_samples_equal_the_loops(options):
    loss, samples = LossConfig(**options), batch()
    advantages, _ = sample_advantages(samples, loss, alone)
    expected = [np.zeros(len(one.tokens)) for one in samples]
    for (number, t), value in oracle(samples, loss).items():
        expected[number][t] = value
    for ours, theirs in zip(advantages, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6, rtol=1e-6)


def test_whitened_advantages_have_mean_0_and_variance_1():
    samples = batch(1)
    advantages, _ = sample_advantages(
        samples, LossConfig(advantage_estimator="reinforce_plus_plus", normalize_advantages=True), alone
    )
    kept = [
        row[t] for row, one in zip(advantages, samples, strict=True) for t in range(1, len(row)) if one.loss_mask[t]
    ]
    assert np.mean(kept) == pytest.approx(0, abs=1e-6)
    assert np.var(kept, ddof=1) == pytest.approx(1, rel=1e-5)


def test_a_missing_array_is_named():
    with pytest.raises(DataError, match="no kl"):
        sample_advantages([sample([0, 1])], LossConfig(advantage_estimator="reinforce_plus_plus", kl_coef=0.1), alone)
    with pytest.raises(DataError, match="no distillation"):
        sample_advantages([sample([0, 1])], LossConfig(use_opd=True), alone)
    short = dataclasses.replace(sample([0, 1, 1]), distillation=np.zeros(2, dtype=np.float32))
    with pytest.raises(DataError, match="of 3 tokens has 2 distillation"):
        sample_advantages([short], LossConfig(use_opd=True), alone)


@pytest.mark.parametrize("advantages", [[1.0], [1.0, math.inf], "ab", None, [[1.0, 2.0]]])
def test_a_users_advantages_must_be_one_number_each(advantages):
    with pytest.raises(DataError, match="--custom-advantage-function-path my.function"):
        checked(advantages, 2, "my.function")
