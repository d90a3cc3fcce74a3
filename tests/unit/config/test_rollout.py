"""Data, sampling, reward and evaluation flags: what they come to, and what is impossible about them."""

from __future__ import annotations

from pathlib import Path

import pytest

from slime_like.config.rollout import DataConfig, EvalConfig, RewardConfig, RolloutConfig, split_slice


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
    assert EvalConfig(eval_prompt_data=["x", "a.jsonl", "y", "b.jsonl@[:9]"]).datasets() == {"x": "a.jsonl", "y": "b.jsonl@[:9]"}


def test_missing_files(tmp_path: Path):
    path = tmp_path / "d.jsonl"
    assert DataConfig().missing_files() == ["--prompt-data is missing: a JSONL file of prompts."]
    assert DataConfig(prompt_data=f"{path}@[:3]").missing_files() == [f"--prompt-data {path}: no such file."]
    assert EvalConfig(eval_prompt_data=["x", f"{path}@[:3]"]).missing_files() == [f"--eval-prompt-data x: {path}: no such file."]
    path.write_text("")
    assert DataConfig(prompt_data=f"{path}@[:3]").missing_files() == EvalConfig(eval_prompt_data=[str(path)]).missing_files() == []


def test_possible_flags_have_no_problems():
    configs = (DataConfig(num_rollout=1), RolloutConfig(), RewardConfig(rm_type="math"), EvalConfig(eval_prompt_data=["a"], eval_interval=2))
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
        (RolloutConfig(rollout_batch_size=8, over_sampling_batch_size=4), "--over-sampling-batch-size 4 is below --rollout-batch-size 8."),
        (RewardConfig(rm_type="maths"), "--rm-type maths is unknown. Known: math, "),
        (RewardConfig(rm_type="math", custom_rm_path="a.b"), "exclude each other"),
        (RewardConfig(rm_type="remote_rm"), "needs --rm-url"),
        (RewardConfig(rm_type="remote_rm", rm_url="ftp://a/b"), "is no http(s) URL"),
        (RewardConfig(rm_type="math", group_rm=True), "--group-rm does nothing without --custom-rm-path"),
        (EvalConfig(eval_prompt_data=["x", "a", "y"], eval_interval=1), "takes pairs of name and path, but got 3 values"),
        (EvalConfig(eval_prompt_data=["x", "a", "x", "b"], eval_interval=1), "names a data set twice"),
        (EvalConfig(eval_interval=1), "--eval-interval needs --eval-prompt-data."),
        (EvalConfig(eval_prompt_data=["a"]), "--eval-prompt-data needs --eval-interval."),
    ],
)
def test_what_is_impossible_is_told(config, message: str):
    assert any(message in problem for problem in config.problems()), config.problems()
