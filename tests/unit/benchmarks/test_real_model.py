"""The page of runs of a real model has each run's own numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import real_model

REPORT = {
    "held_out": 64,
    "rewards": [0.25, 0.25, 0.25, 0.5, 0.75, 0.75, 0.75, 0.75],
    "pass": {"before": 0.4375, "after": 0.75},
    "logprob_abs_diff": {"mean": 8e-6, "largest": 9e-6},
    "seconds": {"step/seconds": 30.4, "rollout/seconds": 9.0, "train/seconds": 21.0, "sync/seconds": 0.4},
    "baselines": {"constant": 0.03125, "random": 1 / 3},
    "answers": [{"question": "A likes b. \nWho?", "label": "A", "said": ["B | C", "A"], "scores": [0.0, 1.0]}],
}


def written(folder: Path, **changes: dict) -> str:
    config = {"lora": {"lora_rank": 0}, "optimizer": {"bf16": False}, "sync": {}, "observability": {"seed": 2}}
    (folder / "grpo").mkdir(parents=True)
    (folder / "grpo/config.json").write_text(json.dumps(config | changes))
    (folder / "report.json").write_text(json.dumps(REPORT))
    return str(folder)


def test_a_run_is_a_line_a_curve_and_answers(tmp_path: Path, capsys: pytest.CaptureFixture):
    runs = [
        written(tmp_path / "plain"),
        written(tmp_path / "small", lora={"lora_rank": 16}, sync={"rollout_quantization": "int8"}),
    ]
    assert real_model.main([*runs, "--host", "two cores"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "two cores"
    # the last five of the rewards are 0.5 and four times 0.75
    line = "| plain | fp32, whole | 2 | 8 | 0.25 -> 0.70 | 0.438 -> 0.750 | 0.031 | 0.333 | 8.0e-06 | 30 |"
    assert line in lines
    assert line.replace("plain", "small").replace("fp32, whole", "fp32, LoRA 16, engine int8") in lines
    assert "| A likes b. Who? | A | B \\| C | A |" in lines
    assert any(line.startswith("plain ") and line.endswith("0.50 0.75 0.75 0.75 0.75") for line in lines)


def test_a_run_that_did_not_end_is_named(tmp_path: Path, capsys: pytest.CaptureFixture):
    assert real_model.main([str(tmp_path / "absent")]) == 2
    assert "absent/report.json" in capsys.readouterr().err
