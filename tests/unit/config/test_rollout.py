"""What is refused about sampling and rewards, and what is said about what is allowed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from slime_like.config.data import DataConfig, split_slice
from slime_like.config.evaluation import EvalConfig
from slime_like.config.loss import LossConfig
from slime_like.config.placement import PlacementConfig
from slime_like.config.reward import RewardConfig
from slime_like.config.rollout import RolloutConfig
from slime_like.config.run import RunConfig
from slime_like.config.slime_flags.notices import notices


def said(config: RunConfig, word: str) -> list[str]:
    return [problem for problem in config.problems() if word in problem]


@pytest.mark.parametrize("cut", [{"rollout_top_p": 0.95}, {"rollout_top_k": 20}])
def test_training_on_a_part_of_the_distribution_is_refused(cut):
    config = RunConfig(rollout=RolloutConfig(**cut))
    (problem,) = said(config, "--rollout-top-p")
    assert "the policy gradient is biased" in problem and "--rollout-allow-filtered-sampling" in problem
    for untrained in (
        {"placement": PlacementConfig(debug_rollout_only=True)},
        {"placement": PlacementConfig(debug_train_only=True)},
    ):
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
        (
            RolloutConfig,
            {"rollout_top_k": 0, "rollout_allow_filtered_sampling": True},
            "--rollout-top-k 0: must be at least 1, or -1 for all tokens",
        ),
        (
            RolloutConfig,
            {"rollout_allow_filtered_sampling": True},
            "--rollout-allow-filtered-sampling does nothing without",
        ),
        (RewardConfig, {"overlong_buffer_len": 0}, "--overlong-buffer-len 0: must be at least 1"),
        (
            RewardConfig,
            {"overlong_penalty_factor": 0.5},
            "--overlong-penalty-factor 0.5 does nothing without --overlong-buffer-len",
        ),
        (
            RewardConfig,
            {"overlong_buffer_len": 4, "overlong_penalty_factor": -1.0},
            "--overlong-penalty-factor -1.0: must be above 0",
        ),
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


@pytest.mark.parametrize(
    "groups", [{"rollout": RolloutConfig(mask_truncated_samples=True)}, {"reward": RewardConfig(overlong_buffer_len=4)}]
)
def test_supervised_rows_are_never_overlong(groups):
    (problem,) = said(RunConfig(loss=LossConfig(loss_type="sft_loss"), **groups), "overlong")
    assert "--loss-type sft_loss samples none" in problem


@pytest.mark.parametrize(
    ("text", "path", "rows"),
    [
        ("d.jsonl", "d.jsonl", [0, 1, 2, 3]),
        ("d.jsonl@[1:3]", "d.jsonl", [1, 2]),
        ("d.jsonl@[:2]", "d.jsonl", [0, 1]),
        ("d.jsonl@[-1:]", "d.jsonl", [3]),
        ("d@[1]/x.jsonl", "d@[1]/x.jsonl", [0, 1, 2, 3]),
    ],
)
def test_slices_of_a_file(text: str, path: str, rows: list[int]):
    name, part = split_slice(text)
    assert (name, list(range(4))[part]) == (path, rows)


def test_data_sets_of_an_evaluation():
    assert EvalConfig().datasets() == {}
    assert EvalConfig(eval_prompt_data=["a.jsonl"]).datasets() == {"eval": "a.jsonl"}
    assert EvalConfig(eval_prompt_data=["x", "a.jsonl", "y", "b.jsonl@[:9]"]).datasets() == {
        "x": "a.jsonl",
        "y": "b.jsonl@[:9]",
    }


def test_missing_files(tmp_path: Path):
    path = tmp_path / "d.jsonl"
    assert DataConfig().missing_files() == ["--prompt-data is missing: a JSONL or Parquet file of prompts."]
    assert DataConfig(prompt_data=f"{path}@[:3]").missing_files() == [f"--prompt-data {path}: no such file."]
    assert EvalConfig(eval_prompt_data=["x", f"{path}@[:3]"]).missing_files() == [
        f"--eval-prompt-data x: {path}: no such file."
    ]
    path.write_text("")
    assert (
        DataConfig(prompt_data=f"{path}@[:3]").missing_files()
        == EvalConfig(eval_prompt_data=[str(path)]).missing_files()
        == []
    )


def test_possible_flags_have_no_problems():
    configs = (
        DataConfig(num_rollout=1),
        RolloutConfig(),
        RewardConfig(rm_type="math"),
        EvalConfig(eval_prompt_data=["a"], eval_interval=2),
    )
    assert [config.problems() for config in configs] == [[], [], [], []]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DataConfig(), "exactly one of --num-rollout and --num-epoch"),
        (DataConfig(num_rollout=1, num_epoch=1), "exactly one of --num-rollout and --num-epoch"),
        (DataConfig(num_rollout=-1), "--num-rollout -1: must not be negative."),
        (DataConfig(num_rollout=1, apply_chat_template_kwargs="[1]"), "is no JSON object"),
        (RolloutConfig(n_samples_per_prompt=0), "--n-samples-per-prompt 0: must be at least 1."),
        (RolloutConfig(rollout_temperature=0.0), "--rollout-temperature 0.0: must be above 0"),
        (
            RolloutConfig(rollout_batch_size=8, over_sampling_batch_size=4),
            "--over-sampling-batch-size 4 is below --rollout-batch-size 8.",
        ),
        (RewardConfig(rm_type="maths"), "--rm-type maths is unknown. Known: math, "),
        (RewardConfig(rm_type="math", custom_rm_path="a.b"), "exclude each other"),
        (RewardConfig(rm_type="remote_rm"), "needs --rm-url"),
        (RewardConfig(rm_type="remote_rm", rm_url="ftp://a/b"), "is no http(s) URL"),
        (RewardConfig(rm_type="math", group_rm=True), "--group-rm does nothing without --custom-rm-path"),
        (
            EvalConfig(eval_prompt_data=["x", "a", "y"], eval_interval=1),
            "takes pairs of name and path, but got 3 values",
        ),
        (EvalConfig(eval_prompt_data=["x", "a", "x", "b"], eval_interval=1), "names a data set twice"),
        (EvalConfig(eval_interval=1), "--eval-interval needs --eval-prompt-data."),
        (EvalConfig(eval_prompt_data=["a"]), "--eval-prompt-data needs --eval-interval."),
    ],
)
def test_what_is_impossible_is_told(config, message: str):
    assert any(message in problem for problem in config.problems()), config.problems()
