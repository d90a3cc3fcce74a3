"""--eval-config: slime's YAML becomes sets; what does not fit is named with its place."""

from __future__ import annotations

import dataclasses
import json

import pytest

from arguments import parse_args
from slime_like.config.eval_sets import read_eval_sets
from slime_like.config.evaluation import EvalConfig
from slime_like.errors import ConfigError
from tests.unit.config.test_compat_flags import BASE

TEXT = """
eval:
  defaults: {n_samples_per_eval_prompt: 4, temperature: 0.7}
  datasets:
    - {name: aime, path: aime.jsonl, temperature: 0, rm_type: math, stop: ["END"]}
    - {name: gpqa, path: "gpqa.jsonl@[0:5]", top_p: 0.9, metadata_overrides: {level: 3}}
"""


def write(tmp_path, text: str) -> str:
    path = tmp_path / "eval.yaml"
    path.write_text(text)
    return str(path)


def test_a_set_goes_before_defaults_and_these_before_flags(tmp_path):
    sets, problems = read_eval_sets(write(tmp_path, TEXT))
    config = EvalConfig(eval_sets=sets, eval_temperature=0.1, eval_top_p=0.5, n_samples_per_eval_prompt=2)
    assert problems == [] and config.datasets() == {"aime": "aime.jsonl", "gpqa": "gpqa.jsonl@[0:5]"}
    assert [config.setting(name, "temperature") for name in config.sets()] == [0, 0.7]  # 0 is a setting, too
    assert [config.setting(name, "top_p") for name in config.sets()] == [0.5, 0.9]
    assert config.setting("gpqa", "n_samples_per_eval_prompt") == 4 and config.setting("gpqa", "top_k") is None
    assert config.setting("elsewhere", "n_samples_per_eval_prompt") == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("eval: {datasets: []}", "needs eval: with datasets"),
        ("- 1", "needs eval: with datasets"),
        ("eval: [", "while parsing"),
        ("eval: {datasets: [{name: a}]}", "data set 1: needs a name and a path"),
        ("eval: {datasets: [{name: a, path: b}, {name: a, path: c}]}", "data set 2: the name a is given twice"),
        ("eval: {datasets: [{name: a, path: b, temprature: 1}]}", "unknown key 'temprature'. Did you mean temperature"),
        ("eval: {datasets: [{name: a, path: b, temperature: -1}]}", "temperature is -1, which does not fit"),
        ("eval: {datasets: [{name: a, path: b, top_p: 0}]}", "top_p is 0, which does not fit"),
        ("eval: {datasets: [{name: a, path: b, top_k: 1.5}]}", "top_k is 1.5, which does not fit"),
        ("eval: {datasets: [{name: a, path: b, stop: END}]}", "stop is 'END', which does not fit"),
        ("eval: {datasets: [{name: a, path: b, rm_type: maths}]}", "--rm-type maths is unknown"),
        ("eval: {defaults: {name: x}, datasets: [{name: a, path: b}]}", "defaults: unknown key 'name'"),
        ("eval: {default: {}, datasets: [{name: a, path: b}]}", "unknown key 'default'"),
        ("eval: {datasets: [{name: a, path: b, max_response_len: true}]}", "max_response_len is True"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, text: str, message: str):
    sets, problems = read_eval_sets(write(tmp_path, text))
    assert sets == () and len(problems) == 1 and message in problems[0]


def test_the_command_line_takes_it_and_gives_it_back(tmp_path):
    without = ("--eval-prompt-data", "--hf-checkpoint")
    flags = {name: value for name, value in BASE.items() if name not in without}
    words = [word for name, value in flags.items() for word in (name, *(value or "").split())]
    path = write(tmp_path, TEXT)
    config = parse_args([*words, "--eval-config", path, "--plan"]).config
    assert list(config.eval.sets()) == ["aime", "gpqa"]
    run = tmp_path / "config.json"
    run.write_text(config.to_json())
    assert json.loads(config.to_json())["eval"]["eval_sets"][0] == dataclasses.asdict(config.eval.eval_sets[0])
    again = parse_args(["--config", str(run), "--plan"]).config
    assert again.eval == config.eval
    with pytest.raises(ConfigError, match="--eval-config and --eval-prompt-data exclude each other"):
        parse_args([*words, "--eval-config", path, "--eval-prompt-data", "x.jsonl", "--plan"])
