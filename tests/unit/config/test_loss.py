"""Flags of advantages, losses and corrections: what goes together is taken, what contradicts itself is refused with a
fix.
"""

import dataclasses

import pytest

from slime_like.config.algorithms import ESTIMATORS, POLICY_LOSSES
from slime_like.config.batch import BatchConfig
from slime_like.config.checkpoint import CheckpointConfig
from slime_like.config.loss import LossConfig
from slime_like.config.rollout import RolloutConfig
from slime_like.config.run import RunConfig
from slime_like.config.slime_flags.notices import notices
from slime_like.errors import CheckpointError

TAKEN = [
    {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True, "gamma": 0.99, "kl_coef": 0.01},
    {"advantage_estimator": "reinforce_plus_plus_baseline", "normalize_advantages": True, "kl_coef": 0.01},
    {"normalize_advantages": True},
    {"custom_advantage_function_path": "a.b", "advantage_estimator": "gspo"},
    {"policy_loss": "reinforce", "use_opsm": True},
    {"policy_loss": "cispo", "advantage_estimator": "rloo"},
    {"policy_loss": "clip", "advantage_estimator": "gspo", "eps_clip_c": 3.0},
    {"policy_loss": "gspo", "use_opd": True, "opd_teacher_load": "/teacher"},
    {"policy_loss": "gmpo", "eps_clip": 0.4, "normalize_advantages": True},
    {"policy_loss": "sapo", "sapo_temperature_neg": 1.2, "advantage_estimator": "grpo_batch_std"},
    {"policy_loss": "clip_cov", "clip_cov_ratio": 0.01, "clip_cov_lb": 0.5, "eps_clip": 1.0},
    {"policy_loss": "kl_cov", "kl_cov_ratio": 0.01, "ppo_kl_coef": 0.5},
    {"advantage_estimator": "dr_grpo", "loss_reduction": "constant", "loss_divisor": 1024},
    {"advantage_estimator": "ppo", "policy_loss": "gspo"},
    {
        "custom_policy_loss_function_path": "a.b",
        "use_tis": True,
        "use_opsm": True,
        "use_kl_loss": True,
        "kl_loss_coef": 0.1,
        "entropy_coef": 0.01,
        "custom_pg_loss_reducer_function_path": "a.c",
        "eps_clip_c": 3.0,
        "use_opd": True,
        "opd_teacher_load": "/teacher",
    },
    {"use_tis": True, "tis_reject_level": "sequence", "tis_reject_high": 2.0},
    {"use_kl_loss": True, "kl_coef": 0.1, "kl_loss_type": "k3", "advantage_estimator": "ppo"},
    {"loss_type": "custom_loss", "custom_loss_function_path": "a.b", "use_kl_loss": True, "get_mismatch_metrics": True},
    {"use_kl_loss": True, "use_unbiased_kl": True, "kl_loss_type": "low_var_kl", "kl_loss_coef": 0.1},
    {"use_tis": True, "tis_level": "sequence", "tis_mode": "mask", "tis_clip_low": 0.5, "tis_clip": 2.0},
    {"use_tis": True, "custom_tis_function_path": "a.b"},
    {"use_rollout_logprobs": True, "use_opsm": True, "opsm_delta": 0.01, "get_mismatch_metrics": True},
    {"loss_reduction": "constant", "loss_divisor": 1024, "disable_grpo_std_normalization": True},
    {"loss_reduction": "token", "calculate_per_token_loss": True},
    {"custom_pg_loss_reducer_function_path": "a.b"},
    {"use_opd": True, "opd_teacher_load": "/teacher", "opd_kl_coef": 0.5},
    {"reset_optimizer_states": True},
]
REFUSED = [
    ({"advantage_estimator": "reinforce_plus_plus"}, "Fix: --normalize-advantages"),
    ({"advantage_estimator": "reinforce_plus_plus_baseline"}, "Fix: --normalize-advantages"),
    (
        {
            "advantage_estimator": "reinforce_plus_plus",
            "normalize_advantages": True,
            "disable_rewards_normalization": True,
        },
        "compares with the whole batch",
    ),
    ({"advantage_estimator": "ppo", "custom_advantage_function_path": "a.b"}, "compares with a critic"),
    ({"custom_advantage_function_path": "a.b", "disable_grpo_std_normalization": True}, "Fix: drop one of them"),
    ({"advantage_estimator": "rloo", "kl_coef": 0.1}, "needs rewards per token"),
    (
        {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True, "lambd": 0.9},
        "--lambd does nothing without --advantage-estimator ppo",
    ),
    ({"policy_loss": "reinforce", "use_rollout_logprobs": True}, "--use-rollout-logprobs is about a ratio"),
    (
        {"policy_loss": "reinforce", "eps_clip_c": 3.0},
        "--eps-clip-c 3.0 does nothing with --policy-loss reinforce, only with clip. Fix: one of them",
    ),
    ({"advantage_estimator": "gspo", "eps_clip_c": 3.0}, "does nothing with --policy-loss gspo"),
    ({"policy_loss": "sapo", "eps_clip": 0.3}, "--eps-clip 0.3 does nothing with --policy-loss sapo"),
    ({"clip_cov_ub": 9.0}, "--clip-cov-ub 9.0 does nothing with --policy-loss clip, only with clip_cov"),
    ({"policy_loss": "clip_cov", "clip_cov_lb": 5.0}, "nothing lies between them"),
    ({"policy_loss": "kl_cov", "kl_cov_ratio": 0.0}, "a share of the tokens is above 0"),
    ({"policy_loss": "kl_cov", "ppo_kl_coef": -1.0}, "must not be negative"),
    ({"policy_loss": "sapo", "sapo_temperature_pos": 0.0}, "must be above 0"),
    (
        {"policy_loss": "gmpo", "use_opd": True, "opd_teacher_load": "/teacher"},
        "--policy-loss gmpo has one term a sample, and --use-opd gives each token",
    ),
    (
        {"policy_loss": "gmpo", "advantage_estimator": "ppo"},
        "has one term a sample, and --advantage-estimator ppo gives each token",
    ),
    (
        {"policy_loss": "gspo", "custom_policy_loss_function_path": "a.b"},
        "is what --custom-policy-loss-function-path replaces",
    ),
    (
        {"loss_type": "custom_loss", "custom_loss_function_path": "a.b", "policy_loss": "sapo"},
        "--policy-loss is a part of the policy loss",
    ),
    ({"advantage_estimator": "grpo_batch_std", "disable_grpo_std_normalization": True}, "Fix: dr_grpo"),
    ({"advantage_estimator": "ppo", "kl_coef": 0.1, "kl_loss_type": "k3"}, "the KL of --kl-coef 0.1 is always k1"),
    ({"use_tis": True, "tis_reject_level": "sequence"}, "needs --tis-reject-high"),
    ({"tis_reject_high": 2.0}, "do nothing without --tis-reject-level"),
    (
        {"use_tis": True, "tis_reject_level": "geometric", "tis_reject_low": 2.0, "tis_reject_high": 1.0},
        "need 0 <= low < high",
    ),
    (
        {"tis_reject_level": "geometric", "tis_reject_high": 1.0},
        "--tis-reject-level geometric does nothing without --use-tis",
    ),
    (
        {"use_tis": True, "custom_tis_function_path": "a.b", "tis_reject_level": "sequence", "tis_reject_high": 2.0},
        "--custom-tis-function-path replaces",
    ),
    ({"loss_type": "custom_loss"}, "belong together"),
    ({"custom_loss_function_path": "a.b"}, "belong together"),
    (
        {"loss_type": "custom_loss", "custom_loss_function_path": "a.b", "use_tis": True},
        "--use-tis is a part of the policy loss",
    ),
    ({"use_unbiased_kl": True}, "does nothing without --use-kl-loss"),
    ({"use_kl_loss": True, "use_unbiased_kl": True, "kl_loss_type": "k2"}, "Fix: k1, k3 or low_var_kl"),
    ({"use_tis": True, "use_rollout_logprobs": True}, "Fix: one of them"),
    ({"tis_level": "sequence"}, "--tis-level sequence does nothing without --use-tis"),
    ({"tis_mode": "mask"}, "--tis-mode mask does nothing without --use-tis"),
    ({"custom_tis_function_path": "a.b"}, "does nothing without --use-tis"),
    (
        {"use_tis": True, "custom_tis_function_path": "a.b", "tis_mode": "mask"},
        "which --custom-tis-function-path replaces",
    ),
    ({"opsm_delta": 0.1}, "does nothing without --use-opsm"),
    ({"use_opsm": True, "opsm_delta": -0.1}, "must not be negative"),
    ({"loss_reduction": "constant"}, "belong together"),
    ({"loss_divisor": 5}, "belong together"),
    ({"loss_reduction": "constant", "loss_divisor": 0}, "must be at least 1"),
    ({"loss_reduction": "sample", "calculate_per_token_loss": True}, "is --loss-reduction token"),
    ({"use_opd": True}, "needs --opd-teacher-load"),
    ({"opd_teacher_load": "/teacher"}, "do nothing without --use-opd"),
    ({"use_opd": True, "opd_teacher_load": "/teacher", "loss_type": "sft_loss"}, "has no such samples"),
    ({"ref_update_interval": 0}, "--ref-update-interval 0: must be at least 1"),
]


@pytest.mark.parametrize("options", TAKEN, ids=lambda options: " ".join(options))
def test_what_goes_together_is_taken(options):
    assert LossConfig(**options).problems() == []


@pytest.mark.parametrize(
    ("options", "message"), REFUSED, ids=lambda value: " ".join(value) if isinstance(value, dict) else None
)
def test_what_contradicts_itself_is_refused(options, message):
    problems = LossConfig(**options).problems()
    assert len(problems) == 1 and message in problems[0], problems


def problems_of(loss, **checkpoint):
    problems = RunConfig(loss=LossConfig(**loss), checkpoint=CheckpointConfig(ref_load="/ref", **checkpoint)).problems()
    return [problem for problem in problems if "--ref-update-interval" in problem]


def test_a_moving_reference_needs_one_and_checkpoints_that_hold_it():
    kl = {"use_kl_loss": True, "ref_update_interval": 4}
    assert problems_of(kl, save="/save", save_interval=8) == []
    assert "needs a reference" in problems_of({"ref_update_interval": 4})[0]
    assert "--save-interval 6 is no multiple" in problems_of(kl, save="/save", save_interval=6)[0]
    loss = LossConfig(**kl)
    assert [step for step in range(9) if loss.updates_reference_after(step)] == [3, 7]
    assert not any(LossConfig().updates_reference_after(step) for step in range(9))
    loss.check_resume(8)
    with pytest.raises(CheckpointError, match=r"updated 2 rollouts before.*--ckpt-step"):
        loss.check_resume(6)


def test_a_missing_teacher_is_named(tmp_path):
    loss = LossConfig(use_opd=True, opd_teacher_load=str(tmp_path / "none"))
    assert loss.missing_files() == [f"--opd-teacher-load {tmp_path}/none: no such folder."]
    assert dataclasses.replace(loss, opd_teacher_load=str(tmp_path)).missing_files() == []


def test_who_makes_the_advantages():
    assert not LossConfig().has_token_advantages
    for options in (
        {"normalize_advantages": True},
        {"use_opd": True},
        {"advantage_estimator": "ppo"},
        {"advantage_estimator": "reinforce_plus_plus"},
    ):
        assert LossConfig(**options).has_token_advantages
    assert LossConfig(advantage_estimator="reinforce_plus_plus_baseline", kl_coef=0.1).kl_in_trainer
    assert not LossConfig(advantage_estimator="ppo", kl_coef=0.1).kl_in_trainer
    assert (
        LossConfig(calculate_per_token_loss=True).reduction == LossConfig(loss_reduction="token").reduction == "token"
    )


def test_estimator_and_policy_loss_are_chosen_apart():
    """slime's gspo and cispo are pairs of both, unless --policy-loss says otherwise."""
    assert {
        name: LossConfig(advantage_estimator=name).policy_loss_name for name in ("grpo", "gspo", "cispo", "rloo", "ppo")
    } == {
        "grpo": "clip",
        "gspo": "gspo",
        "cispo": "cispo",
        "rloo": "clip",
        "ppo": "clip",
    }
    for estimator in ESTIMATORS:
        for name in POLICY_LOSSES:
            loss = LossConfig(
                advantage_estimator=estimator, policy_loss=name, normalize_advantages=ESTIMATORS[estimator].is_whitened
            )
            assert loss.policy_loss_name == name
            refused = POLICY_LOSSES[name].needs_sample_advantages and ESTIMATORS[estimator].tokens is not None
            assert bool(loss.problems()) == refused, (estimator, name, loss.problems())


def said(samples=4, steps=1, **flags):
    config = RunConfig(
        loss=LossConfig(**flags),
        rollout=RolloutConfig(n_samples_per_prompt=samples),
        batch=BatchConfig(num_steps_per_rollout=steps),
    )
    return notices(config)


@pytest.mark.parametrize(
    ("noticed", "silent", "text"),
    [
        ({"samples": 1}, {"samples": 2}, "advantages are raw rewards"),
        (
            {"samples": 1, "advantage_estimator": "rloo"},
            {"samples": 1, "advantage_estimator": "ppo"},
            "--advantage-estimator rloo nothing to compare with",
        ),
        (
            {"use_kl_loss": True, "kl_loss_coef": 0.1},
            {"use_kl_loss": True, "kl_loss_coef": 0.1, "use_unbiased_kl": True},
            "its mean gradient is 0 on policy",
        ),
        (
            {"kl_loss_type": "k3"},
            {"kl_loss_type": "k3", "use_kl_loss": True, "kl_loss_coef": 0.1},
            "--kl-loss-type k3 changes nothing",
        ),
        ({"policy_loss": "kl_cov"}, {"policy_loss": "kl_cov", "steps": 2}, "its penalty is flat at ratio 1"),
        ({"policy_loss": "kl_cov"}, {"policy_loss": "kl_cov", "use_rollout_logprobs": True}, "holds nothing back"),
    ],
)
def test_what_does_less_than_its_name_says_is_told(noticed, silent, text):
    (notice,) = said(**noticed)
    assert text in notice
    assert said(**silent) == []


def test_sequence_masking_is_never_idle():
    """It measures against the engine's log-probs, which differ in the first step, too."""
    assert said(use_opsm=True) == []
