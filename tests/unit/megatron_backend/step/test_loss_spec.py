"""Plain losses by hand."""

import math

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


def test_wrong_specs_are_refused():
    with pytest.raises(
        ValueError, match="'dpo' is unknown. Known: configured, cross_entropy, importance_sampling, ppo, custom"
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
