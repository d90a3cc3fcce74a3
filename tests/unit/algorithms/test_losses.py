import math

import numpy as np
import pytest
import torch

from slime_like.algorithms.losses import kl_estimate, unbiased_kl_estimate
from slime_like.algorithms.policy_losses import ppo_clip

LOG2 = math.log(2.0)


def ratio_loss(ratio, advantage, **options):
    bounds = {"clip_low": 0.2, "clip_high": 0.3} | options
    result = ppo_clip(torch.tensor([math.log(ratio)]), torch.zeros(1), torch.tensor([float(advantage)]), **bounds)
    return round(result.loss.item(), 5), result.clipped.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "clipped"),
    [
        (1.1, 2, -2.2, 0),  # inside the bounds: -ratio x advantage
        (1.5, 2, -2.6, 1),  # clip-higher at 1.3
        (0.5, 2, -1.0, 0),  # going down with a good answer is never clipped
        (0.5, -2, 1.6, 1),  # bounded below at 0.8
        (1.5, -2, 3.0, 0),  # going up with a bad answer is never clipped …
    ],
)
def test_clipped_surrogate_by_hand(ratio, advantage, loss, clipped):
    assert ratio_loss(ratio, advantage) == (loss, clipped)


def test_dual_clip_bounds_the_loss_of_bad_answers_only():
    assert ratio_loss(5.0, -2, dual_clip=3.0) == (6.0, 1)  # … but for dual clip: 3 x |-2|
    assert ratio_loss(2.0, -2, dual_clip=3.0) == (4.0, 0)
    assert ratio_loss(5.0, 2, dual_clip=3.0) == (-2.6, 1)


def test_gradient_flows_only_where_nothing_clips():
    log_probs = torch.tensor([math.log(1.1), math.log(1.5)], requires_grad=True)
    ppo_clip(log_probs, torch.zeros(2), torch.tensor([2.0, 2.0]), clip_low=0.2, clip_high=0.2).loss.sum().backward()
    np.testing.assert_allclose(log_probs.grad, [-2.2, 0.0], atol=1e-6)


def test_ratio_is_capped_before_it_overflows():
    result = ppo_clip(torch.tensor([100.0]), torch.tensor([0.0]), torch.tensor([-1.0]), clip_low=0.2, clip_high=0.2)
    assert torch.isfinite(result.loss).all()


@pytest.mark.parametrize(
    ("kind", "value"),
    [("k1", LOG2), ("k2", LOG2**2 / 2), ("k3", 0.5 - 1 + LOG2), ("low_var_kl", 0.5 - 1 + LOG2)],
)
def test_kl_by_hand(kind, value):
    # Policy 0.5, reference 0.25.
    estimate = kl_estimate(torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)]), kind)
    assert estimate.item() == pytest.approx(value, rel=1e-5)


def test_low_var_kl_is_clamped():
    far = torch.tensor([-8.0]), torch.tensor([0.0])
    assert kl_estimate(*far, "low_var_kl").item() == 10.0
    assert kl_estimate(*far, "k3").item() == pytest.approx(math.exp(8) - 9, rel=1e-5)


def test_k3_averages_to_the_divergence():
    policy, reference = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.3, 0.5])
    per_token = kl_estimate(torch.tensor(np.log(policy)), torch.tensor(np.log(reference)), "k3").numpy()
    assert (policy * per_token).sum() == pytest.approx((policy * np.log(policy / reference)).sum(), rel=1e-9)


def test_reference_gets_no_gradient():
    log_probs, reference = torch.zeros(1, requires_grad=True), torch.ones(1, requires_grad=True)
    kl_estimate(log_probs, reference, "k2").sum().backward()
    assert reference.grad is None
    assert log_probs.grad.tolist() == [-1.0]


def test_unknown_estimator_lists_the_known():
    with pytest.raises(ValueError, match="k1, k2, k3, low_var_kl"):
        kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


def test_unbiased_kl_by_hand():
    # New .5, old .25: ratio 2. k3 against reference .25 is .5 - 1 + log 2. Gradient in log p: 2 x k3 + 2 x (1 - q/p) =
    # 2 k3 + 1.
    log_probs = torch.tensor([math.log(0.5)], requires_grad=True)
    estimate = unbiased_kl_estimate(log_probs, torch.tensor([math.log(0.25)]), torch.tensor([math.log(0.25)]), "k3")
    assert estimate.item() == pytest.approx(2 * (LOG2 - 0.5), rel=1e-6)
    estimate.sum().backward()
    assert log_probs.grad.item() == pytest.approx(2 * (LOG2 - 0.5) + 1, rel=1e-6)


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_unbiased_kl_averages_to_the_divergence_and_its_gradient(kind):
    """Over tokens that an older policy chose, value and gradient are those of the new policy's KL, written out in
    float64.
    """
    logits = torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True)
    old, reference = np.array([0.2, 0.5, 0.3]), np.array([0.5, 0.3, 0.2])
    log_policy = torch.log_softmax(logits, 0)
    estimate = unbiased_kl_estimate(log_policy, torch.tensor(np.log(old)), torch.tensor(np.log(reference)), kind)
    mean = (torch.tensor(old) * estimate).sum()
    (gradient,) = torch.autograd.grad(mean, logits)
    exponents = np.exp([0.3, -0.2, 0.9])
    policy = exponents / exponents.sum()
    divergence = sum(p * math.log(p / q) for p, q in zip(policy, reference, strict=True))
    assert mean.item() == pytest.approx(divergence, rel=1e-12)
    # d KL / d logit_i = p_i (log p_i / q_i - KL)
    assert gradient.tolist() == pytest.approx(
        [p * (math.log(p / q) - divergence) for p, q in zip(policy, reference, strict=True)], rel=1e-9
    )
    biased = (torch.tensor(old) * kl_estimate(log_policy.detach(), torch.tensor(np.log(reference)), kind)).sum()
    assert abs(biased.item() - divergence) > 0.01


def test_unbiased_low_var_kl_is_clamped_after_the_weight():
    # k3 at log-ratio 2 is e^2 - 3 = 4.39; times ratio 4 it is beyond 10.
    far = torch.tensor([-2.0]), torch.tensor([-2.0 - math.log(4)]), torch.tensor([0.0])
    assert unbiased_kl_estimate(*far, "low_var_kl").item() == 10.0
    assert unbiased_kl_estimate(*far, "k3").item() == pytest.approx(4 * (math.exp(2) - 3), rel=1e-6)


def closed_forms(log_p, old, log_q, kind, unbiased):
    """(estimate, its derivative in log p) in float64, from the definitions.

    k3's is written so that nothing large is taken from something large.
    """
    gap, ratio = log_q - log_p, math.exp(log_p - old)
    if kind == "k1":
        return (ratio * -gap, ratio * (1 - gap)) if unbiased else (-gap, 1.0)
    if kind == "k2":
        return gap**2 / 2, -gap
    if unbiased:
        return math.exp(log_q - old) - ratio * (1 + gap), -ratio * gap
    return math.expm1(gap) - gap, -math.expm1(gap)


#: log q/p (reference to policy) and log p/old, far beyond where exp() overflows fp32 on both sides.
GAPS = [-200.0, -60.0, -21.0, -19.5, -3.0, -0.1, 0.0, 0.1, 3.0, 9.0, 16.0, 19.5, 20.5, 21.0, 40.0]
DISTANCES = [-60.0, -21.0, -5.0, -0.1, 0.0, 0.1, 5.0, 19.5]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
def test_kl_against_closed_forms(kind, dtype):
    for gap in GAPS:
        log_probs = torch.tensor([-30.0], dtype=dtype, requires_grad=True)
        estimate = kl_estimate(log_probs, torch.tensor([-30.0 + gap], dtype=dtype), kind)
        (gradient,) = torch.autograd.grad(estimate.sum(), log_probs)
        value, slope = closed_forms(-30.0, 0.0, -30.0 + gap, kind, unbiased=False)
        if kind == "low_var_kl" and value > 10:
            value, slope = 10.0, 0.0
        elif kind == "k3" and gap > 20:
            value, slope = math.expm1(20) - 20, 0.0  # held: nobody can take a step of e^20
        assert estimate.item() == pytest.approx(value, rel=2e-5, abs=1e-6), gap
        assert gradient.item() == pytest.approx(slope, rel=2e-5, abs=1e-6), gap


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", ["k1", "k3", "low_var_kl"])
def test_unbiased_kl_against_closed_forms(kind, dtype):
    """The gradient of k3 is -ratio x log q/p wherever the ratio is not held: -21 at 21, not 4.85e8.

    fp32 has it as exactly as fp64.
    """
    for gap in GAPS:
        for distance in DISTANCES:
            log_probs = torch.tensor([-4.0], dtype=dtype, requires_grad=True)
            estimate = unbiased_kl_estimate(
                log_probs, torch.tensor([-4.0 - distance], dtype=dtype), torch.tensor([-4.0 + gap], dtype=dtype), kind
            )
            (gradient,) = torch.autograd.grad(estimate.sum(), log_probs)
            value, slope = closed_forms(-4.0, -4.0 - distance, -4.0 + gap, kind, unbiased=True)
            if kind != "k1" and gap > 20:  # the value is held, the gradient is not
                value = math.exp(distance) * (math.expm1(20) - 20)
            if kind == "low_var_kl" and value > 10:
                value, slope = 10.0, 0.0
            assert estimate.item() == pytest.approx(value, rel=5e-5, abs=1e-6), (gap, distance)
            assert gradient.item() == pytest.approx(slope, rel=5e-5, abs=1e-6), (gap, distance)


@pytest.mark.parametrize("kind", ["k1", "k3", "low_var_kl"])
def test_a_held_ratio_has_no_gradient(kind):
    """Where the ratio itself is held, at e^20, half a gradient would point anywhere."""
    log_probs = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    unbiased_kl_estimate(
        log_probs, torch.tensor([-26.0]).double(), torch.tensor([-3.0]).double(), kind
    ).sum().backward()
    assert log_probs.grad.item() == 0


def test_what_each_estimator_teaches_on_policy():
    """Mean gradients over the policy's own tokens: k1's is 0; k2's is that of KL(p || q), k3's that of KL(q || p)."""
    logits, reference = (
        torch.tensor([0.3, -0.2, 0.9], dtype=torch.float64, requires_grad=True),
        torch.tensor([0.5, 0.3, 0.2]).double(),
    )

    def gradient(objective):
        log_policy = torch.log_softmax(logits, 0)
        return torch.autograd.grad(objective(log_policy, log_policy.exp().detach()), logits)[0].tolist()

    def of(kind):
        return gradient(lambda log_p, p: (p * kl_estimate(log_p, reference.log(), kind)).sum())

    assert of("k1") == pytest.approx([0, 0, 0], abs=1e-12)
    assert of("k2") == pytest.approx(
        gradient(lambda log_p, _: (log_p.exp() * (log_p - reference.log())).sum()), rel=1e-9
    )
    assert of("k3") == pytest.approx(gradient(lambda log_p, _: (reference * (reference.log() - log_p)).sum()), rel=1e-9)
