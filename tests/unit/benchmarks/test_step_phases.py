"""The benchmark's arithmetic, by hand."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def step_phases(repo_root: Path) -> dict:
    return runpy.run_path(str(repo_root / "benchmarks" / "step_phases.py"))


def step(seconds: float, generate: float, overhead: float) -> dict:
    return {
        "kind": "step",
        "step/seconds": seconds,
        "step/generate_seconds": generate,
        "step/overhead_seconds": overhead,
    }


def test_medians_leave_out_the_warming_up(step_phases: dict):
    records = [
        {"kind": "start", "start/ray_seconds": 4.0},
        step(100, 90, 10),
        step(2, 1, 0.2),
        step(4, 3, 0.4),
        step(3, 2, 0.3),
    ]
    result = step_phases["summary"](records, skip=1)
    assert result["median_seconds"] == {"generate_seconds": 2, "overhead_seconds": 0.3, "seconds": 3}
    assert result["overhead_ratio"] == pytest.approx(0.1)
    assert result["start_seconds"] == {"ray": 4.0} and result["steps"] == 3


def test_no_step_left_is_said(step_phases: dict):
    with pytest.raises(SystemExit, match="no step is left"):
        step_phases["phase_medians"]([step(1, 1, 0)], skip=1)
