"""GAE, KL in the reward, whitening and the value loss: by hand, and against float64 written from the papers."""

import math

import numpy as np
import pytest
import torch

from slime_like.algorithms.group_advantages import normalize
from slime_like.algorithms.losses import clipped_value_loss
from slime_like.algorithms.token_advantages import gae, sample_advantages, token_rewards, whiten
from slime_like.config.loss import LossConfig
from slime_like.errors import DataError
from slime_like.records import TrainSample, per_token


def alone(tensor):
    return tensor


def tensor(*rows):
    return torch.tensor(rows, dtype=torch.float64)


def mask(*rows):
    return torch.tensor(rows, dtype=torch.bool)


def sample(values, loss_mask, *, reward=1.0, kl=None):
    length = len(loss_mask)
    return TrainSample(
        prompt_index=3,
        sample_index=1,
        tokens=np.arange(length, dtype=np.int32),
        loss_mask=np.array(loss_mask, dtype=np.int8),
        engine_logprobs=np.zeros(length, dtype=np.float32),
        weight_versions=np.zeros(length, dtype=np.int32),
        reward=reward,
        advantages=per_token(reward, loss_mask),
        weights=per_token(1.0, loss_mask),
        values=None if values is None else np.array(values, dtype=np.float32),
        kl=None if kl is None else np.array(kl, dtype=np.float32),
    )


def ppo(**options):
    return LossConfig(advantage_estimator="ppo", **options)


def test_reward_stands_at_the_last_trained_token():
    rewards = token_rewards(torch.tensor([2.0, 5.0]).double(), mask([0, 1, 1, 0], [0, 0, 0, 0]))
    assert rewards.tolist() == [[0, 0, 2, 0], [0, 0, 0, 0]]


def test_kl_is_punished_at_every_trained_token():
    rewards = token_rewards(
        torch.tensor([1.0]).double(), mask([0, 1, 0, 1]), kl=tensor([0.5, 0.5, math.nan, 0.5]), kl_coef=0.1
    )
    assert rewards[0].tolist() == pytest.approx([0, -0.05, 0, 0.95])


def test_gae_by_hand():
    # Deltas with gamma .5: last 1 - .2 = .8; middle .5 x .2 - .4 = -.3; first .5 x .4 - .6 = -.4. Lambda .5: carried x
    # .25.
    advantages, returns = gae(tensor([0, 0, 1]), tensor([0.6, 0.4, 0.2]), mask([1, 1, 1]), gamma=0.5, lambd=0.5)
    assert advantages[0].tolist() == pytest.approx([-0.4 + 0.25 * (-0.3 + 0.25 * 0.8), -0.3 + 0.25 * 0.8, 0.8])
    assert returns[0].tolist() == pytest.approx([0.175, 0.3, 1.0])


def test_masked_tokens_are_no_steps():
    """A tool's answer in the middle: neither its values nor its length is seen, also not by the discount."""
    plain, plain_returns = gae(tensor([0, 0, 1]), tensor([0.6, 0.4, 0.2]), mask([1, 1, 1]), gamma=0.5, lambd=0.5)
    rewards, values = tensor([9, 0, 9, 9, 0, 1, 9]), tensor([7, 0.6, 7, 7, 0.4, 0.2, 7])
    advantages, returns = gae(rewards, values, mask([0, 1, 0, 0, 1, 1, 0]), gamma=0.5, lambd=0.5)
    assert advantages[0, [1, 4, 5]].tolist() == plain[0].tolist()
    assert returns[0, [1, 4, 5]].tolist() == plain_returns[0].tolist()
    assert advantages[0, [0, 2, 3, 6]].tolist() == returns[0, [0, 2, 3, 6]].tolist() == [0, 0, 0, 0]


def oracle(reward, values, trained, kl, *, gamma, lambd, kl_coef):
    """GAE as the double sum of the paper (eq. 16), over the trained tokens, in plain Python floats."""
    steps = [t for t in range(1, len(values)) if trained[t]]
    state = [float(values[t]) for t in steps] + [0.0]
    earned = [-kl_coef * float(kl[t]) for t in steps]
    if earned:
        earned[-1] += reward
    delta = [earned[k] + gamma * state[k + 1] - state[k] for k in range(len(steps))]
    advantages = np.zeros(len(values))
    for k, t in enumerate(steps):
        advantages[t] = sum((gamma * lambd) ** (j - k) * delta[j] for j in range(k, len(steps)))
    return advantages


@pytest.mark.parametrize(
    ("gamma", "lambd", "kl_coef"),
    [(1.0, 1.0, 0.0), (0.9, 0.8, 0.0), (0.97, 0.95, 0.2), (1.0, 0.0, 0.1), (0.0, 1.0, 0.1)],
)
def test_ragged_samples_equal_the_double_sum(gamma, lambd, kl_coef):
    rng = np.random.default_rng(0)
    samples = []
    for number in range(12):
        length = int(rng.integers(2, 30))
        trained = rng.integers(0, 2, length) * (number != 4)  # one sample has nothing to train on
        samples.append(sample(rng.normal(size=length), trained, reward=float(rng.normal()), kl=rng.normal(size=length)))
    advantages, returns = sample_advantages(samples, ppo(gamma=gamma, lambd=lambd, kl_coef=kl_coef), alone)
    for one, ours, target in zip(samples, advantages, returns, strict=True):
        theirs = oracle(one.reward, one.values, one.loss_mask, one.kl, gamma=gamma, lambd=lambd, kl_coef=kl_coef)
        np.testing.assert_allclose(ours, theirs, atol=1e-6, rtol=1e-6)
        where = (one.loss_mask != 0) & (np.arange(len(one.tokens)) > 0)
        np.testing.assert_allclose(target, np.where(where, theirs + one.values, 0), atol=1e-6, rtol=1e-6)
    assert not advantages[4].any() and not returns[4].any()


def test_a_sample_does_not_depend_on_its_neighbours():
    long, short = sample(np.linspace(0, 1, 40), [0] + [1] * 39), sample([0.1, 0.2, 0.3], [0, 1, 1])
    both, one = (sample_advantages(samples, ppo(gamma=0.9, lambd=0.7), alone) for samples in ([long, short], [short]))
    np.testing.assert_array_equal(both[0][1], one[0][0])
    np.testing.assert_array_equal(both[1][1], one[1][0])


def test_no_samples_are_no_advantages():
    assert sample_advantages([], ppo(normalize_advantages=True), alone) == ([], [])


def test_whitening_by_hand():
    whitened = whiten(tensor([1, 9, 2], [3, 9, 9]), mask([1, 0, 1], [1, 0, 0]), alone)
    np.testing.assert_allclose(whitened.numpy(), [[-1, 0, 0], [1, 0, 0]], atol=1e-7)


def test_whitening_over_ranks_is_whitening_at_once():
    rng = np.random.default_rng(1)
    advantages, where = (
        torch.from_numpy(rng.normal(3, 2, (6, 9))),
        torch.from_numpy(rng.integers(0, 2, (6, 9)).astype(bool)),
    )
    shares = [(advantages[:2], where[:2]), (advantages[2:], where[2:]), (advantages[:0], where[:0])]
    sums = iter([])

    def recorded(tensor):
        partial.append(tensor)
        return next(sums, tensor)

    # First round: what each rank adds; the count and mean are then known, and the deviations in the second.
    partial: list = []
    for part in shares:
        whiten(*part, recorded)
    first = sum(partial[::2])
    second = None
    for _ in range(2):
        partial, rounds = [], []
        for part in shares:
            sums = iter([first, second] if second is not None else [first])
            rounds.append(whiten(*part, recorded))
        second = sum(partial[1::2])
    kept = advantages[where].numpy()
    expected = np.where(where.numpy(), (advantages.numpy() - kept.mean()) / np.sqrt(kept.var(ddof=1) + 1e-8), 0)
    np.testing.assert_allclose(torch.cat(rounds).numpy(), expected, atol=1e-12)
    assert rounds[2].shape == (0, 9)


def test_equal_rewards_and_an_ignorant_critic_teach_nothing():
    samples = [sample([0, 0, 0, 0], [0, 1, 1, 1], reward=1.0) for _ in range(4)]
    advantages, returns = sample_advantages(samples, ppo(normalize_advantages=True), alone)
    np.testing.assert_allclose(advantages, 0, atol=1e-6)
    assert [row.tolist() for row in returns] == [[0, 1, 1, 1]] * 4


def test_a_missing_array_is_named():
    with pytest.raises(DataError, match="sample 3/1 of 2 tokens has no values"):
        sample_advantages([sample(None, [0, 1])], ppo(), alone)
    with pytest.raises(DataError, match="sample 3/1 of 2 tokens has no kl"):
        sample_advantages([sample([0, 0], [0, 1])], ppo(kl_coef=0.1), alone)


def test_ppo_takes_rewards_as_they_are():
    assert normalize(np.array([1.0, 0.0, 0.5]), ppo()).tolist() == [1, 0, 0.5]


@pytest.mark.parametrize(
    ("value", "old", "target", "loss", "clipped"),
    [
        # moved too far towards the return: the bound's error counts, without gradient
        (1.0, 0.0, 2.0, 0.5 * 1.5**2, 1),
        (1.0, 0.0, -1.0, 0.5 * 4.0, 0),  # moved too far away from it: the full error counts
        (0.3, 0.0, 2.0, 0.5 * 1.7**2, 0),  # within the bound
    ],
)
def test_value_loss_by_hand(value, old, target, loss, clipped):
    values = torch.tensor([value], requires_grad=True)
    result = clipped_value_loss(values, torch.tensor([old]), torch.tensor([target]), value_clip=0.5)
    assert result.loss.item() == pytest.approx(loss)
    assert result.clipped.item() == clipped
    result.loss.sum().backward()
    assert values.grad.item() == pytest.approx(0 if clipped else value - target)


def test_rounding_is_not_clipping():
    values, old = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
    old = values + 0.4 * old.clamp(-1, 1)
    assert not clipped_value_loss(values, old, torch.zeros(1000), value_clip=0.5).clipped.any()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 0.9}, "--gamma does nothing without --advantage-estimator ppo"),
        ({"kl_coef": 0.1}, "Fix: --use-kl-loss"),
        ({"num_critic_only_steps": 2}, "--num-critic-only-steps does nothing"),
        ({"advantage_estimator": "ppo", "lambd": 1.5}, "must be from 0 to 1"),
        ({"advantage_estimator": "ppo", "value_clip": 0.0}, "--value-clip 0.0"),
        ({"advantage_estimator": "ppo", "kl_coef": 0.1, "use_kl_loss": True, "kl_loss_coef": 0.1}, "twice"),
    ],
)
def test_flags_that_make_no_sense_are_refused(options, message):
    assert any(message in problem for problem in LossConfig(**options).problems())


def test_flags_of_a_critic_are_taken():
    assert ppo(gamma=0.9, lambd=0.95, kl_coef=0.1, normalize_advantages=True, num_critic_only_steps=3).problems() == []
