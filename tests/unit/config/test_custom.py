"""--custom-config-path: the user's own values reach the user's own functions, and only those."""

from __future__ import annotations

import json

import pytest

from arguments import parse_args
from slime_like.config.custom import read_custom_config
from slime_like.errors import ConfigError
from tests.unit.config.test_compat_flags import BASE


def command_line(path) -> list[str]:
    flags = {name: value for name, value in BASE.items() if name not in ("--hf-checkpoint", "--ref-load")}
    words = [word for name, value in flags.items() for word in (name, *(value or "").split())]
    return [*words, "--ref-load", "/models/x", "--custom-config-path", str(path), "--plan"]


def test_values_are_attributes_of_args(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("tool_url: http://localhost:1\nweights: {a: 1, b: [2, 3]}\n")
    config = parse_args(command_line(path)).config
    args = config.plugin_args()
    assert args.tool_url == "http://localhost:1" and args.weights == {"a": 1, "b": [2, 3]}
    assert args.rollout_batch_size == 32
    with pytest.raises(AttributeError, match="no flag named --nothing"):
        _ = args.nothing
    assert json.loads(config.to_json())["custom"] == {
        "tool_url": "http://localhost:1",
        "weights": {"a": 1, "b": [2, 3]},
    }


def test_a_run_given_back_reads_the_file_again(tmp_path):
    path, run = tmp_path / "mine.toml", tmp_path / "config.json"
    path.write_text("depth = 1\n")
    config = parse_args(command_line(path)).config
    run.write_text(config.to_json())
    path.write_text("depth = 2\n")
    assert parse_args(["--config", str(run), "--plan"]).config.custom == {"depth": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("lr: 1", "lr is a flag of ours. Fix: --lr, or a file for --config"),
        ("- 1", "must be names with values"),
        ("a-b: 1", "must be names with values"),
        ("a: [", "while parsing a flow"),
        ("day: 2026-01-01", "texts, numbers, lists and tables only"),
    ],
)
def test_what_is_refused(tmp_path, text: str, message: str):
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        parse_args(command_line(path))


def test_no_such_file(tmp_path):
    values, problems = read_custom_config(str(tmp_path / "no.yaml"))
    assert values == {} and problems == [f"--custom-config-path {tmp_path}/no.yaml: no such file or directory."]
    empty = tmp_path / "empty.yaml"
    empty.write_text("")
    assert read_custom_config(str(empty)) == ({}, [])
