"""Runs of a known law are predicted, their mode is their own, and the sleeping stack takes what it sleeps."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from benchmarks.simulated_modes import CASES, main, predict, sleep_run
from slime_like.planning.simulate.measured import read_run
from tests.helpers.measured_runs import write_run


def run(folder, count: int, steps: int = 12) -> str:
    random = np.random.default_rng(count)
    return write_run(
        folder,
        [random.integers(20, 100, size=count).astype(float).tolist() for _ in range(steps)],
        generate_s=lambda lengths: 0.1 + 0.01 * max(lengths) + 0.001 * sum(lengths),
        train_s=lambda tokens: 0.2 + 1e-4 * tokens,
    )


def test_from_its_first_half_and_from_others(tmp_path):
    paths = [run(tmp_path / str(count), count) for count in (4, 16, 40)]
    runs = [read_run(path) for path in paths]
    own, other = predict(runs[1], []), predict(runs[1], [runs[0], runs[2]])
    assert own.steps == 6 and other.steps == 11 and other.calibrated_on == "4, 40"
    assert abs(own.error) < 0.05 and abs(other.error) < 0.05


def test_an_async_run_is_compared_in_its_own_mode(tmp_path):
    sync, path = read_run(run(tmp_path / "off", 8)), run(tmp_path / "full", 8)
    config = json.loads((tmp_path / "full" / "config.json").read_text())
    config["asynchrony"] = {"async_mode": "one-step"}
    (tmp_path / "full" / "config.json").write_text(json.dumps(config))
    line = predict(read_run(path), [sync])
    assert line.mode == "one-step" and line.staleness_predicted == 1 and line.predicted_s < 0.9 * line.measured_s


def test_the_table_is_written(tmp_path, capsys):
    main([run(tmp_path / "r", 8), "--output", str(tmp_path / "out" / "modes")])
    text = (tmp_path / "out" / "modes.md").read_text()
    assert capsys.readouterr().out == text and text.count("\n") == 3
    (line,) = json.loads((tmp_path / "out" / "modes.json").read_text())
    assert line["error"] == pytest.approx(line["predicted_s"] / line["measured_s"] - 1)


@pytest.mark.slow
def test_the_real_loop_on_sleeps(tmp_path):
    case = dataclasses.replace(CASES[0], batch=4, token_s=0.004, steps=4)
    measured = read_run(str(sleep_run(case, tmp_path)))
    for step in measured.steps:
        assert 0.004 * step.longest_tokens <= step.generate_s < 0.004 * step.longest_tokens + 0.5
        assert step.train_s >= 0.2 + 1e-4 * step.train_tokens and step.sync_s >= 0.1
    assert len(measured.lengths) == 0  # 24 answers are too few to stand for others
