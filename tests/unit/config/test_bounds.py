"""Numbers that make no sense are refused where they are typed, by one rule for every flag."""

from __future__ import annotations

import argparse
import dataclasses
import typing

import pytest

from slime_like.config.base import _scalar_type
from slime_like.config.bounds import LARGEST_INT, Bounds, bounded
from slime_like.config.tree import GROUPS
from slime_like.errors import ConfigError
from slime_like.job.command_line import parse_args
from slime_like.megatron_backend.convert import _parser as convert_parser
from slime_like.observability import timeline
from slime_like.planning.advisor import advise
from slime_like.planning.simulate.command import make_parser as simulate_parser
from slime_like.tinker.options import ServerConfig, _server_flags
from slime_like.weight_sync.delta import receiver

#: Flags for which a number below 0 says something.
NEGATIVE = {"rollout_top_k", "eval_top_k", "log_probs_chunk_size", "eval_pass_threshold", "entropy_coef"}
#: Only meaningful with others, whose own rules refuse them: functions of advantages and ratios.
FREE = {"clip_cov_ratio", "clip_cov_lb", "clip_cov_ub", "kl_cov_ratio", "ppo_kl_coef", "opsm_delta"}


def numeric_flags(group: type) -> list[tuple[str, type]]:
    hints = typing.get_type_hints(group)
    kinds = [(field.name, _scalar_type(hints[field.name])[0]) for field in dataclasses.fields(group) if field.metadata]
    return [(name, kind) for name, kind in kinds if kind in (int, float)]


ALL = [one for group in GROUPS.values() for one in numeric_flags(group)]


def flag_of(name: str) -> str:
    return "--" + name.replace("_", "-")


def test_bounds_by_hand():
    assert Bounds(least=0).problem(0) == "" and Bounds(least=0).problem(-1) == "must be at least 0"
    assert Bounds(above=0, most=1).problem(0.0) == "must be above 0 and at most 1"
    assert Bounds(below=1).problem(1) == "must be below 1"
    for value in (float("nan"), float("inf"), -float("inf")):
        assert Bounds().problem(value) == "must be a finite number"
    assert Bounds().problem(LARGEST_INT) == "" and str(LARGEST_INT) in Bounds().problem(LARGEST_INT + 1)
    assert Bounds(most=2**60).problem(2**50) == ""


def test_no_flag_takes_nan_infinity_or_a_number_that_no_machine_counts_to():
    floats = [name for name, kind in ALL if kind is float]
    assert len(floats) > 60 and len(ALL) > 140
    values = {float: ("nan", "inf", "-inf", "NaN", "1e999"), int: ("9" * 20, "-" + "9" * 20, "9" * 5000)}
    argv = [f"{flag_of(name)}={value}" for name, kind in ALL for value in values[kind]]
    with pytest.raises(ConfigError) as error:
        parse_args([*argv, "--plan"])
    named = {problem.split(" ")[0] for problem in error.value.problems}
    assert named == {flag_of(name) for name, _ in ALL}
    assert len(error.value.problems) == len(argv), "one of them passed"
    assert max(map(len, error.value.problems)) < 300


def test_nothing_that_counts_or_waits_is_negative():
    argv = [f"{flag_of(name)}=-1" for name, _ in ALL if name not in NEGATIVE | FREE | {"reward_model_weight"}]
    with pytest.raises(ConfigError) as error:
        parse_args([*argv, "--plan"])
    refused = {problem.split(" ")[0] for problem in error.value.problems}
    assert {text.partition("=")[0] for text in argv} == refused


@pytest.mark.parametrize(
    "name",
    # but for the one of which 0 says that nobody asks
    [
        name
        for name, _ in ALL
        if name.endswith(("timeout", "_s", "timeout_minutes")) and not name.endswith("hang_timeout_s")
    ],
)
def test_a_deadline_is_above_zero_and_within_a_year(name):
    for value in ("0", "1e12" if dict(ALL)[name] is float else "999999999"):
        with pytest.raises(ConfigError, match=f"{flag_of(name)} {value}: must be"):
            parse_args([f"{flag_of(name)}={value}", "--plan"])


def test_the_same_rule_for_numbers_of_a_config_file(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("lr = nan\nclip-grad = inf\nreward-timeout-s = -3\n")
    with pytest.raises(ConfigError) as error:
        parse_args(["--config", str(path), "--plan"])
    text = str(error.value)
    assert "[optimizer]" not in text  # flat keys
    assert "lr: --lr nan: must be a finite number." in text
    assert "clip-grad: --clip-grad inf: must be a finite number." in text
    assert "--reward-timeout-s -3: must be above 0" in text


def test_the_server_s_own_flags():
    own = numeric_flags(ServerConfig)
    assert len(own) > 10
    for name, kind in own:
        for value in ("nan", "inf", "-1") if kind is float else ("-1", "9" * 20):
            with pytest.raises(ConfigError, match=f"{flag_of(name)} {value}"):
                _server_flags(["--base-model", "x", f"{flag_of(name)}={value}"])


@pytest.mark.parametrize("text", ["a\0b", "a\udcffb"])
def test_a_text_that_no_file_system_takes(text):
    with pytest.raises(ConfigError, match="--hf-checkpoint .* holds"):
        parse_args([f"--hf-checkpoint={text}", "--plan"])


def numeric_actions(parser: argparse.ArgumentParser) -> list[tuple[argparse.ArgumentParser, argparse.Action]]:
    pairs = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for sub in action.choices.values():
                pairs += numeric_actions(sub)
        elif getattr(action.type, "__name__", "") in ("int", "float"):
            pairs.append((parser, action))
    return pairs


@pytest.mark.parametrize(("parser", "count"), [(convert_parser(), 5), (simulate_parser(), 10)])
def test_numbers_of_other_commands(parser, count):
    actions = numeric_actions(parser)
    assert len(actions) >= count
    for owner, action in actions:
        for value in ("nan", "inf", "-inf") if action.type.__name__ == "float" else ("9" * 20,):
            with pytest.raises(argparse.ArgumentError):
                owner._get_value(action, value)


@pytest.mark.parametrize(
    ("main", "argv"),
    [
        (advise.main, ["--model", "x", "--gpus", "-1"]),
        (advise.main, ["--model", "x", "--gpus", "8", "--gpu-memory-gib", "nan"]),
        (receiver.main, ["--directory", "x", "--api-key-file", "x", "--port", "70000"]),
        (receiver.main, ["--directory", "x", "--api-key-file", "x", "--port", "0", "--max-bytes", "-1"]),
        (timeline.main, ["x", "--width", "0"]),
    ],
)
def test_commands_end_with_status_two(main, argv, capsys):
    with pytest.raises(SystemExit) as end:
        main(argv)
    assert end.value.code == 2 and "must be" in capsys.readouterr().err


def test_bounded_says_what_is_no_number():
    assert bounded(float, above=0)("0.5") == 0.5
    with pytest.raises(ValueError):
        bounded(int)("many")
