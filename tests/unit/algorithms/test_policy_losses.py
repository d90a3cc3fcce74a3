"""GSPO, CISPO, REINFORCE and RLOO: by hand, and against float64 written from the papers."""

import math

import numpy as np
import pytest
import torch

from slime_like.algorithms.group_advantages import leave_one_out_advantages, normalize
from slime_like.algorithms.losses import cispo, gspo, ppo_clip, reinforce
from slime_like.config.training import LossConfig
from slime_like.errors import DataError

BOUNDS = {"clip_low": 0.2, "clip_high": 0.3}


def test_gspo_by_hand():
    """Sample 0 has token ratios 2 and 1/2: its own is 1. Sample 1 has 4 and 1: its own is 2, clipped at 1.3."""
    new = torch.tensor([2.0, 4.0, 0.5, 1.0]).log().requires_grad_()
    result = gspo(new, torch.zeros(4), torch.tensor([1.0, 1.0, 1.0, 1.0]), torch.tensor([0, 1, 0, 1]), **BOUNDS)
    assert result.ratio.tolist() == pytest.approx([1, 2, 1, 2])
    assert result.loss.tolist() == pytest.approx([-1, -1.3, -1, -1.3])
    assert result.clipped.tolist() == [0, 1, 0, 1]
    (result.loss.sum() / 2).backward()  # mean over each sample's two tokens: gradient of -s is -s / length for each token
    assert new.grad.tolist() == pytest.approx([-0.5, 0, -0.5, 0])


def test_gspo_of_one_token_samples_is_ppo():
    generator = torch.Generator().manual_seed(0)
    new, old, advantages = (torch.randn(16, generator=generator) for _ in range(3))
    ours = gspo(new, old, advantages, torch.arange(16), **BOUNDS)
    assert torch.equal(ours.loss, ppo_clip(new, old, advantages, **BOUNDS).loss)


def test_gspo_of_an_empty_micro_batch_is_empty():
    empty = torch.zeros(0)
    assert gspo(empty, empty, empty, torch.zeros(0, dtype=torch.int64), **BOUNDS).loss.shape == (0,)


def test_gspo_against_float64():
    rng = np.random.default_rng(0)
    new, old, owner = rng.normal(size=20) - 2, rng.normal(size=20) - 2, np.sort(rng.integers(0, 4, 20))
    per_sample = rng.normal(size=4)
    ours = gspo(torch.tensor(new), torch.tensor(old), torch.tensor(per_sample[owner]), torch.tensor(owner), **BOUNDS).loss
    for sample in range(4):
        at = owner == sample
        s = math.exp((new[at] - old[at]).mean())
        expected = -min(s * per_sample[sample], min(max(s, 0.8), 1.3) * per_sample[sample])
        assert ours[torch.tensor(at)].tolist() == pytest.approx([expected] * at.sum())


def test_cispo_by_hand_keeps_every_gradient():
    new = torch.tensor([2.0, 0.5, 1.1]).log().requires_grad_()
    result = cispo(new, torch.zeros(3), torch.tensor([1.0, 1.0, -1.0]), **BOUNDS)
    assert result.clipped.tolist() == [1, 1, 0]
    result.loss.sum().backward()
    assert new.grad.tolist() == pytest.approx([-1.3, -0.8, 1.1])  # -clipped ratio x advantage: nothing vanishes


def test_rloo_by_hand():
    assert leave_one_out_advantages(np.array([1.0, 0, 0])).tolist() == [1, -0.5, -0.5]
    assert normalize(np.array([1.0, 0, 0]), LossConfig(advantage_estimator="rloo")).tolist() == [1, -0.5, -0.5]
    rewards = np.random.default_rng(1).normal(size=7)
    others = [rewards[np.arange(7) != i].mean() for i in range(7)]
    assert leave_one_out_advantages(rewards) == pytest.approx(rewards - others)


def test_equal_rewards_teach_nothing():
    assert leave_one_out_advantages(np.full(4, 0.1)).tolist() == [0, 0, 0, 0]
    with pytest.raises(DataError):
        leave_one_out_advantages(np.ones(1))


def test_reinforce_by_hand_has_no_ratio():
    """Log-probs log 2 and log .5 against old ones 0: the loss is -A log p, the gradient -A, whatever the ratio."""
    new = torch.tensor([2.0, 0.5]).log().requires_grad_()
    result = reinforce(new, torch.zeros(2), torch.tensor([1.0, -3.0]))
    assert result.loss.tolist() == pytest.approx([-math.log(2), 3 * math.log(0.5)])
    assert result.ratio.tolist() == pytest.approx([2, 0.5]) and result.clipped.tolist() == [0, 0]
    result.loss.sum().backward()
    assert new.grad.tolist() == [-1, 3]


def test_reinforce_and_ppo_agree_at_ratio_one():
    new = torch.randn(8, generator=torch.Generator().manual_seed(0)).requires_grad_()
    advantages = torch.linspace(-1, 1, 8)
    gradients = []
    for loss in (reinforce(new, new, advantages), ppo_clip(new, new, advantages, **BOUNDS)):
        (gradient,) = torch.autograd.grad(loss.loss.sum(), new)
        gradients.append(gradient.tolist())
    assert gradients[0] == pytest.approx(gradients[1])
