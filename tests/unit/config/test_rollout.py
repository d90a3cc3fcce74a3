"""What is refused about sampling and rewards, and what is said about what is allowed."""

from __future__ import annotations

import dataclasses

import pytest

from slime_like.config.notices import notices
from slime_like.config.rollout import EvalConfig, RewardConfig, RolloutConfig
from slime_like.config.run import RunConfig
from slime_like.config.system import PlacementConfig
from slime_like.config.training import LossConfig


def said(config: RunConfig, word: str) -> list[str]:
    return [problem for problem in config.problems() if word in problem]


@pytest.mark.parametrize("cut", [{"rollout_top_p": 0.95}, {"rollout_top_k": 20}])
def test_training_on_a_part_of_the_distribution_is_refused(cut):
    config = RunConfig(rollout=RolloutConfig(**cut))
    (problem,) = said(config, "--rollout-top-p")
    assert "the policy gradient is biased" in problem and "--rollout-allow-filtered-sampling" in problem
    for untrained in ({"placement": PlacementConfig(debug_rollout_only=True)}, {"placement": PlacementConfig(debug_train_only=True)}):
        assert said(dataclasses.replace(config, **untrained), "gradient is biased") == []
    assert said(dataclasses.replace(config, loss=LossConfig(loss_type="sft_loss")), "gradient is biased") == []


def test_it_can_be_accepted_and_is_then_said_aloud():
    config = RunConfig(rollout=RolloutConfig(rollout_top_p=0.95, rollout_allow_filtered_sampling=True))
    assert said(config, "top-p") == []
    assert [notice for notice in notices(config) if notice.startswith("--rollout-allow-filtered-sampling")]
    assert not [notice for notice in notices(RunConfig()) if "filtered" in notice]


def test_evaluations_may_cut_what_they_like():
    assert said(RunConfig(eval=EvalConfig(eval_top_p=0.7, eval_top_k=5)), "top") == []


@pytest.mark.parametrize(
    ("group", "options", "message"),
    [
        (RolloutConfig, {"rollout_top_k": 0, "rollout_allow_filtered_sampling": True}, "--rollout-top-k 0: must be at least 1, or -1 for all tokens"),
        (RolloutConfig, {"rollout_allow_filtered_sampling": True}, "--rollout-allow-filtered-sampling does nothing without"),
        (RewardConfig, {"overlong_buffer_len": 0}, "--overlong-buffer-len 0: must be at least 1"),
        (RewardConfig, {"overlong_penalty_factor": 0.5}, "--overlong-penalty-factor 0.5 does nothing without --overlong-buffer-len"),
        (RewardConfig, {"overlong_buffer_len": 4, "overlong_penalty_factor": -1.0}, "--overlong-penalty-factor -1.0: must be above 0"),
        (EvalConfig, {"eval_pass_threshold": float("nan")}, "--eval-pass-threshold nan: must be a finite number"),
    ],
)
def test_impossible_flags_are_refused(group, options, message):
    (problem,) = group(**options).problems()
    assert message in problem


def test_a_buffer_is_the_end_of_the_response():
    rollout = RolloutConfig(rollout_max_response_len=100)
    assert said(RunConfig(rollout=rollout, reward=RewardConfig(overlong_buffer_len=100)), "overlong") == []
    (problem,) = said(RunConfig(rollout=rollout, reward=RewardConfig(overlong_buffer_len=101)), "overlong")
    assert problem.startswith("--overlong-buffer-len 101 is above --rollout-max-response-len 100")


@pytest.mark.parametrize("groups", [{"rollout": RolloutConfig(mask_truncated_samples=True)}, {"reward": RewardConfig(overlong_buffer_len=4)}])
def test_supervised_rows_are_never_overlong(groups):
    (problem,) = said(RunConfig(loss=LossConfig(loss_type="sft_loss"), **groups), "overlong")
    assert "--loss-type sft_loss samples none" in problem
