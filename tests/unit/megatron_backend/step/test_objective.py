"""A user's loss of a token: composed with means, corrections, KL and entropy, and checked."""

import dataclasses

import pytest
import torch

from slime_like.algorithms.loss_plugins import LossPlugins, load_loss_plugins
from slime_like.algorithms.policy_losses import LossBatch
from slime_like.config.loss import LossConfig
from slime_like.errors import PluginError, RunError
from slime_like.megatron_backend.step.objective import Objective

PATH = "a.b"


def batch():
    generator = torch.Generator().manual_seed(0)
    log_probs, old, engine, reference = (
        torch.randn(6, generator=generator, dtype=torch.float64) * 0.3 - 2 for _ in range(4)
    )
    weights = torch.full((6,), 1 / 6, dtype=torch.float64)
    return LossBatch(
        log_probs=log_probs.requires_grad_(),
        entropy=torch.ones(6, dtype=torch.float64),
        old_log_probs=old,
        trainer_log_probs=old,
        engine_log_probs=engine,
        advantages=torch.tensor([1.0, -1, 1, -1, 1, -1], dtype=torch.float64),
        sample_of_token=torch.tensor([0, 0, 1, 1, 2, 2]),
        weights=weights,
        policy_weights=weights * 2,
        reference_log_probs=reference,
    )


def parts(function, **options):
    loss = LossConfig(custom_policy_loss_function_path=PATH, **options)
    assert loss.problems() == []
    return Objective(loss, LossPlugins(policy_loss=function))(batch())


def plain(args, tokens):
    return -tokens.advantages * tokens.log_probs, {"seen": torch.ones_like(tokens.log_probs.detach())}


COMPOSED = {
    "use_tis": True,
    "tis_clip": 1.1,
    "use_opsm": True,
    "opsm_delta": 0.01,
    "use_kl_loss": True,
    "kl_loss_coef": 0.1,
    "kl_loss_type": "k2",
    "entropy_coef": 0.01,
}


def test_it_is_composed_like_a_built_in_one():
    """-advantage x log-prob is --policy-loss reinforce: everything is the same but clip_ratio, which it does not have,
    and what it reports itself.
    """
    ours = parts(plain, **COMPOSED)
    built_in = Objective(LossConfig(policy_loss="reinforce", **COMPOSED), LossPlugins())(batch())
    assert ours.loss.item() == built_in.loss.item()
    assert ours.sums.pop("train/seen").item() == pytest.approx(1.0)
    built_in.sums.pop("train/clip_ratio")
    assert ours.sums == built_in.sums
    assert {"train/tis", "train/opsm_masked_ratio", "train/kl_loss"} <= set(ours.sums)
    assert 0 < ours.sums["train/opsm_masked_ratio"] < 1 and 0 < ours.sums["train/tis_clip_ratio"] < 1


@pytest.mark.parametrize(
    ("gives", "message"),
    [
        (lambda args, tokens: -tokens.log_probs, r"gave Tensor; it must give \(pg_loss, metrics\)"),
        (
            lambda args, tokens: (-tokens.log_probs.mean(), {}),
            r"pg_loss is a tensor of shape \[\]; it must be a tensor of shape \[6\]",
        ),
        (lambda args, tokens: (-tokens.log_probs, {"x": 1.0}), "x is a float"),
        (lambda args, tokens: (-tokens.log_probs.detach(), {}), "the loss has no gradient"),
    ],
)
def test_what_it_gives_is_checked(gives, message):
    with pytest.raises(RunError, match=f"--custom-policy-loss-function-path a.b: {message}"):
        parts(gives)


def test_a_missing_function_is_known_before_the_start():
    with pytest.raises(PluginError, match="--custom-policy-loss-function-path"):
        load_loss_plugins(
            LossConfig(custom_policy_loss_function_path="tests.unit.megatron_backend.test_objective.none")
        )


def test_sequence_masking_looks_at_who_chose_the_tokens():
    """The old log-probs are the present ones, as in a rollout of one step: what the engine said tells how far a sample
    is.
    """
    off_policy = batch()
    tokens = LossBatch(
        **{name: getattr(off_policy, name) for name in off_policy.__dataclass_fields__}
        | {"old_log_probs": off_policy.log_probs.detach()}
    )
    sums = Objective(LossConfig(use_opsm=True, opsm_delta=0.01), LossPlugins())(tokens).sums
    far = [(tokens.engine_log_probs - tokens.log_probs)[2 * i : 2 * i + 2].mean().item() > 0.01 for i in range(3)]
    assert sums["train/opsm_masked_ratio"].item() == pytest.approx(sum(far) / 6) and any(far)


@pytest.mark.parametrize("level", ["sequence", "geometric"])
def test_rejected_samples_weigh_nothing_and_the_others_keep_their_token_weights(level):
    options = {"policy_loss": "reinforce", "use_tis": True, "tis_clip": 1.2}
    tokens = batch()
    gaps = (tokens.trainer_log_probs - tokens.engine_log_probs).reshape(3, 2)
    ratios = (gaps.sum(1) if level == "sequence" else gaps.mean(1)).exp()
    middle = ratios.sort().values[1].item()
    bounds = {"tis_reject_level": level, "tis_reject_low": middle * 0.9999, "tis_reject_high": middle * 1.0001}
    (gradient,) = torch.autograd.grad(
        Objective(LossConfig(**options, **bounds), LossPlugins())(tokens).loss, tokens.log_probs
    )
    (free,) = torch.autograd.grad(Objective(LossConfig(**options), LossPlugins())(tokens).loss, tokens.log_probs)
    kept = (ratios == ratios.sort().values[1]).double().repeat_interleave(2)
    assert gradient.tolist() == (free * kept).tolist() and kept.sum() == 2


@pytest.mark.parametrize("coefficient", [0.0, 0.01])
def test_an_entropy_that_is_only_measured_has_no_gradient(coefficient):
    entropy = torch.linspace(0.5, 1.0, 6, dtype=torch.float64, requires_grad=True)
    loss = LossConfig(entropy_coef=coefficient)
    measured = Objective(loss, LossPlugins())(dataclasses.replace(batch(), entropy=entropy))
    measured.loss.backward()
    assert measured.sums["train/entropy"].item() == pytest.approx(0.75)
    if coefficient:
        assert entropy.grad.tolist() == pytest.approx([-coefficient / 6] * 6)
    else:
        assert entropy.grad is None
