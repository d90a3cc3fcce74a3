"""The command from end to end: flags, a run, a plan, JSON, a sweep, a picture, and mistakes."""

from __future__ import annotations

import io
import json

import pytest

from slime_like.planning.simulate.command import main
from slime_like.planning.simulate.drawing import timeline
from slime_like.planning.simulate.outcome import Outcome
from slime_like.planning.simulate.table import mode_of
from tests.helpers.measured_runs import write_run

SMALL = [
    "--batch=4", "--group-size=1", "--response-tokens=100", "--decode-base=0.01", "--train-fixed=0.7",
    "--sync-seconds=0.1", "--workers=4", "--steps=4",
]  # fmt: skip


def answer(capsys, *argv: str) -> dict:
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_flags_to_json(capsys):
    result = answer(capsys, *SMALL)
    steps = {mode["name"]: mode["step_s"] for mode in result["modes"]}
    assert steps["off"] == pytest.approx(1.8) and steps["one-step"] == steps["full"] == pytest.approx(1.1)
    assert result["scenario"]["trainer"]["fixed_s"] == 0.7 and result["verdict"].startswith(result["best"])
    assert set(result["modes"][0]) >= set(Outcome.__dataclass_fields__)


def test_what_json_says_can_be_simulated_again(capsys, tmp_path):
    result = answer(capsys, *SMALL, "--response-tokens=50~120")
    path = tmp_path / "scenario.json"
    path.write_text(json.dumps(result))
    assert answer(capsys, "--scenario", str(path)) == result


def test_a_run_directory_with_flags_over_it(capsys, tmp_path):
    lengths = [[20.0 + (7 * i + 3 * step) % 50 for i in range(8)] for step in range(8)]
    path = write_run(
        tmp_path / "run", lengths, generate_s=lambda row: 0.01 * max(row), train_s=lambda tokens: 1e-3 * tokens
    )
    other = write_run(
        tmp_path / "also", lengths, generate_s=lambda row: 0.01 * max(row), train_s=lambda tokens: 1e-3 * tokens
    )
    one = answer(capsys, "--run-dir", path, "--also", other)
    assert one["scenario"]["work"]["batch"] == 8
    two = answer(capsys, "--run-dir", path, "--trainer-gpus=2", "--turns=2", "--environment-seconds=1")
    assert two["scenario"]["trainer"]["per_token_s"] == pytest.approx(one["scenario"]["trainer"]["per_token_s"] / 2)
    assert two["modes"][0]["step_s"] > one["modes"][0]["step_s"]


def test_a_plan_from_standard_input(capsys, monkeypatch):
    scenario = answer(capsys, *SMALL)["scenario"]
    monkeypatch.setattr(
        "sys.stdin", io.StringIO(json.dumps({"mode": "disaggregated", "async": {"scenario": scenario}}))
    )
    assert answer(capsys, "--plan", "-")["modes"][0]["step_s"] == pytest.approx(1.8)


def test_the_table_and_a_sweep(capsys):
    assert main([*SMALL, "--sweep=sync-seconds=0,2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = {line.split("  ")[0]: line for line in lines if "x  " in line}
    assert "  1.64x  " in rows["one-step"] and "1.1" in rows["one-step"]
    assert any(line.startswith("1 more GPU in off: for engines step") for line in lines)
    swept = [line.split() for line in lines if line.startswith(" " * 15) and line.split()[0] in ("0", "2")]
    assert [(row[0], row[1]) for row in swept] == [("0", "1.7"), ("2", "3.7")]


def test_a_picture(capsys, tmp_path):
    path = tmp_path / "modes.svg"
    assert main([*SMALL, "--sweep=engines=1,2", "--output", str(path)]) == 0
    text = path.read_text()
    assert text.startswith("<?xml") and "</svg>" in text
    assert f"written: {path}" in capsys.readouterr().out


def test_the_timeline_of_a_row_is_that_of_its_mode():
    from slime_like.planning.simulate.answer import compare
    from slime_like.planning.simulate.command import make_parser, scenario_from

    comparison = compare(scenario_from(make_parser().parse_args(SMALL)))
    off, one_step = (timeline(row) for row in comparison.rows if row.name in ("off", "one-step"))
    assert off.training[0] == pytest.approx((1.0, 1.7)) and off.syncing[0] == pytest.approx((1.7, 1.8))
    assert one_step.training[1] == pytest.approx((2.1, 2.8)) and max(one_step.requests) == 4
    assert mode_of("full, 3 + 5 GPUs") == "full" and mode_of("off, colocated") == "off, colocated"


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--batch=0"], "--batch 0: must be at least 1"),
        (["--response-tokens=many"], "--response-tokens many"),
        (["--output=modes.pdf"], "must end in .png or .svg"),
        (["--also", "x"], "--also has nothing to add to"),
        (["--sweep=gpus=1"], "cannot be swept"),
        (["--run-dir=/nowhere"], "no such file"),
        (["--plan=/nowhere"], "/nowhere: No such file"),
        (["--partial-rollout"], "does nothing without --over-sampling"),
        (["--stale-policy=keep"], "Known: wait, drop, requeue, train"),
        (["--trainer-gpus=0"], "--trainer-gpus 0"),
    ],
)
def test_mistakes(capsys, argv, message):
    assert main(argv) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"), [("no", "is no JSON"), ("{}", "holds no scenario"), ("[]", "no scenario")]
)
def test_files_without_a_scenario(capsys, tmp_path, text, message):
    path = tmp_path / "plan.json"
    path.write_text(text)
    for flag in ("--plan", "--scenario"):
        assert main([flag, str(path)]) == 2
        assert message in capsys.readouterr().err


def test_flags_that_replace_what_a_step_takes(capsys):
    result = answer(capsys, *SMALL, "--train-seconds=3", "--max-response-tokens=50", "--colocated", "--trainer-gpus=1")
    off = result["modes"][0]
    assert off["step_s"] == pytest.approx(0.5 + 3 + 0.1) and off["colocated"]
