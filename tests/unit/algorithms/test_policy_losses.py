"""Every policy loss by hand, and value and gradient of each against loops over Python's floats written from the papers.

RLOO.
"""

import math

import numpy as np
import pytest
import torch

from slime_like.algorithms.group_advantages import leave_one_out_advantages, normalize
from slime_like.algorithms.policy_losses import (
    POLICY_LOSSES,
    LossBatch,
    cispo,
    gmpo,
    gspo,
    kl_cov,
    ppo_clip,
    reinforce,
    sapo,
)
from slime_like.config import algorithms as rows
from slime_like.config.loss import LossConfig
from slime_like.errors import DataError
from tests.helpers.loss_loops import float_losses

BOUNDS = {"clip_low": 0.2, "clip_high": 0.3}


def test_gspo_by_hand():
    """Sample 0 has token ratios 2 and 1/2: its own is 1. Sample 1 has 4 and 1: its own is 2, clipped at 1.3."""
    new = torch.tensor([2.0, 4.0, 0.5, 1.0]).log().requires_grad_()
    result = gspo(new, torch.zeros(4), torch.tensor([1.0, 1.0, 1.0, 1.0]), torch.tensor([0, 1, 0, 1]), **BOUNDS)
    assert result.ratio.tolist() == pytest.approx([1, 2, 1, 2])
    assert result.loss.tolist() == pytest.approx([-1, -1.3, -1, -1.3])
    assert result.clipped.tolist() == [0, 1, 0, 1]
    # mean over each sample's two tokens: gradient of -s is -s / length for each token
    (result.loss.sum() / 2).backward()
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
    ours = gspo(
        torch.tensor(new), torch.tensor(old), torch.tensor(per_sample[owner]), torch.tensor(owner), **BOUNDS
    ).loss
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


def test_the_tables_have_the_same_rows():
    assert list(POLICY_LOSSES) == list(rows.POLICY_LOSSES)


def test_gmpo_by_hand():
    """Sample 0, advantage 1, has ratios 2, held at 1.5, and 1/2: sqrt(.75).

    Sample 1, advantage -1, has 4 and 1/4, held at 1/1.5.
    """
    new = torch.tensor([2.0, 4.0, 0.5, 0.25], dtype=torch.float64).log().requires_grad_()
    advantages, bounds = (
        torch.tensor([1.0, -1.0, 1.0, -1.0]).double(),
        {"clip_low": math.log(1.5), "clip_high": math.log(1.5)},
    )
    result = gmpo(new, torch.zeros(4).double(), advantages, torch.tensor([0, 1, 0, 1]), **bounds)
    assert result.loss.tolist() == pytest.approx(
        [-math.sqrt(0.75), math.sqrt(4 / 1.5), -math.sqrt(0.75), math.sqrt(4 / 1.5)]
    )
    assert result.clipped.tolist() == [1, 0, 0, 1]
    (result.loss.sum() / 2).backward()  # of R with respect to a token that is not held: R / length
    assert new.grad.tolist() == pytest.approx([0, math.sqrt(4 / 1.5) / 2, -math.sqrt(0.75) / 2, 0])


def test_sapo_at_ratio_one_is_the_plain_policy_gradient():
    new = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    result = sapo(
        new, torch.zeros(2).double(), torch.tensor([3.0, -3.0]).double(), temperature_pos=0.7, temperature_neg=1.9
    )
    assert result.loss.tolist() == pytest.approx([-3 * 2 / 0.7, 3 * 2 / 1.9])
    result.loss.sum().backward()
    assert new.grad.tolist() == pytest.approx([-3, 3])


def test_kl_cov_is_flat_at_ratio_one():
    new = torch.zeros(1, requires_grad=True)
    kl_cov(new, torch.zeros(1), torch.ones(1), torch.ones(1), kl_coef=5.0).loss.sum().backward()
    assert new.grad.item() == -1


def test_gspo_token_is_gspo_where_a_samples_tokens_have_one_advantage():
    generator = torch.Generator().manual_seed(1)
    new, old = torch.randn(2, 20, generator=generator, dtype=torch.float64) * 0.1
    owner = torch.arange(20) % 3
    advantages = torch.tensor([1.0, -2.0, 0.5]).double()[owner]
    gradients = []
    for by_token in (False, True):
        own = new.clone().requires_grad_()
        loss = gspo(own, old, advantages, owner, **BOUNDS, by_token=by_token).loss
        gradients.append(torch.autograd.grad(loss.sum(), own)[0].tolist() + loss.tolist())
    assert gradients[0] == pytest.approx(gradients[1], rel=1e-12)


FLAGS = {
    "gspo": {"eps_clip": 0.05, "eps_clip_high": 0.1},
    "gmpo": {"eps_clip": 0.4, "eps_clip_high": 0.3},
    "sapo": {"sapo_temperature_pos": 1.5, "sapo_temperature_neg": 2.0},
    "kl_cov": {"ppo_kl_coef": 0.7},
    "reinforce": {},
}
CASES = [(name, {}) for name in rows.POLICY_LOSSES] + [("gspo", {"use_opd": True})]


@pytest.mark.parametrize(
    ("name", "extra"), CASES, ids=lambda value: value if isinstance(value, str) else " ".join(value)
)
def test_value_and_gradient_against_loops_over_floats(name, extra):
    """Values, and the gradient of a weighted sum against central differences, in float64.

    A sample has one advantage but with --use-opd.
    """
    rng = np.random.default_rng(7)
    size, owner = 40, np.arange(40) % 7
    old, weights = rng.normal(size=size) - 2, rng.uniform(0.1, 1, size=size)
    new = old + 0.4 * rng.normal(size=size)
    advantages = rng.normal(size=size) if extra else rng.normal(size=7)[owner]
    chosen = set(rng.permutation(size)[:9].tolist())
    options = FLAGS.get(name, {"eps_clip": 0.2, "eps_clip_high": 0.3})
    theirs = (
        "gspo_token" if extra else name,
        new.tolist(),
        new.tolist(),
        old.tolist(),
        advantages.tolist(),
        owner.tolist(),
        chosen,
    )
    log_probs = torch.tensor(new, requires_grad=True)
    batch = LossBatch(
        log_probs=log_probs,
        entropy=log_probs,
        old_log_probs=torch.tensor(old),
        trainer_log_probs=torch.tensor(old),
        engine_log_probs=torch.tensor(old),
        advantages=torch.tensor(advantages),
        sample_of_token=torch.tensor(owner),
        weights=torch.tensor(weights),
        policy_weights=torch.tensor(weights),
        picked=torch.tensor([float(t in chosen) for t in range(size)]),
    )
    result = POLICY_LOSSES[name](batch, LossConfig(policy_loss=name, **options, **extra))
    assert result.loss.tolist() == pytest.approx(float_losses(*theirs, **options), rel=1e-9)
    (gradient,) = torch.autograd.grad((result.loss * batch.weights).sum(), log_probs)

    def total(values):
        return sum(w * x for w, x in zip(weights, float_losses(theirs[0], values, *theirs[2:], **options), strict=True))

    for t in range(size):
        up, down = list(new), list(new)
        up[t], down[t] = new[t] + 1e-6, new[t] - 1e-6
        assert gradient[t].item() == pytest.approx((total(up) - total(down)) / 2e-6, rel=1e-5, abs=1e-7), t
    assert not result.ratio.requires_grad and not result.clipped.requires_grad
    if name in ("clip", "gspo", "cispo", "gmpo", "clip_cov", "kl_cov"):
        assert 0 < result.clipped.sum() < size


@pytest.mark.parametrize("name", list(rows.POLICY_LOSSES))
def test_a_micro_batch_without_tokens_has_a_loss_of_none(name):
    empty = torch.zeros(0, requires_grad=True)
    fields = (
        "entropy",
        "old_log_probs",
        "trainer_log_probs",
        "engine_log_probs",
        "advantages",
        "weights",
        "policy_weights",
        "picked",
    )
    batch = LossBatch(
        log_probs=empty, sample_of_token=torch.zeros(0, dtype=torch.int64), **dict.fromkeys(fields, torch.zeros(0))
    )
    loss = POLICY_LOSSES[name](batch, LossConfig(policy_loss=name)).loss
    assert loss.shape == (0,) and loss.requires_grad
