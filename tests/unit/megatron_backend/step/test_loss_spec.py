"""Plain losses by hand."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from slime_like.algorithms.policy_losses import LossBatch
from slime_like.errors import RunError
from slime_like.megatron_backend.step.loss_spec import LossSpec


def batch(log_probs, sampled, advantages, weights):
    own = torch.tensor(log_probs, requires_grad=True)
    rows = [torch.tensor(values) for values in (sampled, advantages, weights)]
    return LossBatch(
        log_probs=own, entropy=own * 0, old_log_probs=own.detach(), trainer_log_probs=own.detach(),
        engine_log_probs=rows[0], advantages=rows[1],
        sample_of_token=torch.zeros(len(log_probs), dtype=torch.int64), weights=rows[2], policy_weights=rows[2],
    )  # fmt: skip


def loss_and_gradient(spec, tokens):
    parts = spec(tokens)
    parts.loss.backward()
    return parts.loss.item(), tokens.log_probs.grad.tolist()


def test_cross_entropy_is_a_weighed_sum():
    loss, gradient = loss_and_gradient(
        LossSpec(name="cross_entropy"), batch([-1.0, -2.0], [0.0, 0.0], [9.0, 9.0], [1.0, -0.5])
    )
    assert loss == pytest.approx(1.0 - 1.0) and gradient == [-1.0, 0.5]


def test_importance_sampling_is_taken_against_the_record():
    half = math.log(0.5)
    loss, gradient = loss_and_gradient(
        LossSpec(name="importance_sampling"), batch([half, -1.0], [0.0, -1.0], [3.0, -2.0], [1.0, 1.0])
    )
    assert loss == pytest.approx(-0.5 * 3 + 2) and gradient == pytest.approx([-1.5, 2.0])


def test_ppo_has_no_gradient_beyond_its_thresholds():
    """Ratio 2 and advantage 1 is held at the threshold; ratio 2 and advantage -1 is not."""
    double = math.log(2)
    spec = LossSpec(name="ppo", config={"clip_high_threshold": 1.5})
    loss, gradient = loss_and_gradient(spec, batch([double, double], [0.0, 0.0], [1.0, -1.0], [1.0, 1.0]))
    assert loss == pytest.approx(-1.5 + 2) and gradient == pytest.approx([0.0, 2.0])


#: How Tinker's documentation defines each, by numpy in float64: of log-probs, the sampler's, advantages, and for gspo
#: the mask and the sequences.
DEFINITIONS = {
    "cross_entropy": lambda p, q, a, m, s: -p,
    "importance_sampling": lambda p, q, a, m, s: -np.exp(p - q) * a,
    "ppo": lambda p, q, a, m, s: -np.minimum(np.exp(p - q) * a, np.clip(np.exp(p - q), 0.8, 1.2) * a),
    "dro": lambda p, q, a, m, s: -(p * a - 0.5 * 0.05 * (p - q) ** 2),
}


def gspo_and_gradient(p, q, a, m, s):
    """The value is a clipped sequence ratio's; the gradient of a token that is not clipped is ratio x advantage."""
    mean = np.array([(p - q)[(s == i) & m].mean() for i in s])
    ratio = np.exp(mean)
    value = -np.minimum(ratio * a, np.clip(ratio, 0.5, 1.5) * a)
    active = ratio * a <= np.clip(ratio, 0.5, 1.5) * a
    return value, np.where(active, -ratio * a, 0.0)


def drawn(seed=5, count=40):
    """Log-probs, the sampler's, advantages, weights, a mask and sequences, float64."""
    generator = np.random.default_rng(seed)
    sampled = -2 * generator.random(count)
    own = sampled + 0.4 * generator.normal(size=count)
    mask = generator.random(count) < 0.7
    sequences = np.sort(generator.integers(0, 5, count))
    return own, sampled, generator.normal(size=count), generator.random(count), mask, sequences


def on(p, q, a, w, m, s):
    own, sampled, advantages, weights = (torch.tensor(x, dtype=torch.float64) for x in (p, q, a, w))
    own.requires_grad_()
    zeros = torch.zeros_like(sampled)
    return LossBatch(
        log_probs=own, entropy=zeros, old_log_probs=sampled, trainer_log_probs=zeros, engine_log_probs=sampled,
        advantages=advantages, sample_of_token=torch.tensor(s), weights=weights, policy_weights=weights,
        ratio_mask=torch.tensor(m, dtype=torch.float64),
    )  # fmt: skip


@pytest.mark.parametrize("name", DEFINITIONS)
def test_losses_and_gradients_are_the_definitions(name):
    p, q, a, w, m, s = drawn()
    loss, gradient = loss_and_gradient(LossSpec(name=name), on(p, q, a, w, m, s))
    of_tokens = DEFINITIONS[name]
    assert loss == pytest.approx(float((of_tokens(p, q, a, m, s) * w).sum()), abs=1e-9)
    step = 1e-6
    slope = (of_tokens(p + step, q, a, m, s) - of_tokens(p - step, q, a, m, s)) / (2 * step) * w
    np.testing.assert_allclose(gradient, slope, atol=1e-6)


def test_cispo_weighs_log_probs_by_a_held_ratio():
    p, q, a, w, m, s = drawn()
    held = np.clip(np.exp(p - q), 0.9, 3.0)
    spec = LossSpec(name="cispo", config={"clip_low_threshold": 0.9, "clip_high_threshold": 3.0})
    loss, gradient = loss_and_gradient(spec, on(p, q, a, w, m, s))
    assert loss == pytest.approx(float(-(held * p * a * w).sum()), abs=1e-9)
    np.testing.assert_allclose(gradient, -held * a * w, atol=1e-9)


def test_gspo_has_one_ratio_a_sequence_over_the_masked_tokens():
    p, q, a, w, m, s = drawn()
    value, slope = gspo_and_gradient(p, q, a, m, s)
    spec = LossSpec(name="gspo", config={"clip_low_threshold": 0.5, "clip_high_threshold": 1.5})
    loss, gradient = loss_and_gradient(spec, on(p, q, a, w, m, s))
    assert loss == pytest.approx(float((value * w).sum()), abs=1e-9)
    np.testing.assert_allclose(gradient, slope * w, atol=1e-9)


def test_gspo_without_a_mask_leaves_out_what_was_not_sampled():
    p, q, a, w, m, s = drawn()
    q, a = np.where(m, q, 0.0), np.where(m, a, 0.0)
    spec, tokens = LossSpec(name="gspo"), on(p, q, a, w, m, s)
    with_mask = loss_and_gradient(spec, tokens)
    without = loss_and_gradient(spec, dataclasses.replace(on(p, q, a, w, m, s), ratio_mask=None))
    assert without == with_mask


def test_wrong_specs_are_refused():
    with pytest.raises(
        ValueError,
        match="'dpo' is unknown. Known: configured, cross_entropy, importance_sampling, ppo, cispo, gspo, dro, custom",
    ):
        LossSpec(name="dpo")
    with pytest.raises(ValueError, match="'ppo' has no clip_high. It has: clip_low_threshold, clip_high_threshold"):
        LossSpec(name="ppo", config={"clip_high": 1.5})
    with pytest.raises(ValueError, match="a function belongs to the loss 'custom'"):
        LossSpec(name="custom")


def test_a_function_that_gives_no_loss_is_named():
    tokens = batch([-1.0], [0.0], [1.0], [1.0])
    with pytest.raises(RunError, match="gave float"):
        LossSpec(name="custom", function=lambda batch, numbers: 1.0)(tokens)
    with pytest.raises(RunError, match="loss is no scalar tensor"):
        LossSpec(name="custom", function=lambda batch, numbers: (batch.log_probs, {}))(tokens)
