"""show_rise.py judges a run by its metrics."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest


def show_rise(
    repo_root: Path, run: Path, rewards: list[float], *options: str, more_lines: Sequence[str] = ()
) -> subprocess.CompletedProcess:
    run.mkdir(exist_ok=True)
    lines = [
        json.dumps({"kind": "rollout", "step": i, "time": 0, "rollout/reward_mean": r}) + "\n"
        for i, r in enumerate(rewards)
    ]
    (run / "metrics.jsonl").write_text("".join([*lines, *more_lines]))
    command = [sys.executable, str(repo_root / "scripts" / "show_rise.py"), str(run), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(
    ("rewards", "status", "text"),
    [
        ([0.2, 0.3, 0.4, 0.5, 0.6, 0.8, 0.8, 0.8, 0.8, 0.8], 0, "0.30 -> 0.80  (rise +0.50;"),
        ([0.2, 0.3, 0.4, 0.5, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6], 1, "0.30 -> 0.60  (rise +0.30;"),
    ],
    ids=["enough", "too-little"],
)
@pytest.mark.slow
def test_the_rise_decides(repo_root: Path, tmp_path: Path, rewards: list[float], status: int, text: str):
    result = show_rise(repo_root, tmp_path / "run", rewards, "--least-rise", "0.4")
    assert (result.returncode, text in result.stdout) == (status, True), result.stdout + result.stderr
    assert (tmp_path / "run" / "reward.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_held_out_pass_rate_is_shown(repo_root: Path, tmp_path: Path):
    rewards = {"eval/sort4/reward_mean": -0.4, "eval/sort4/pass@1": 0.3, "eval/sort4/pass@2": 0.5}
    evaluations = [json.dumps({"kind": "eval", "step": step, "time": 0} | rewards) + "\n" for step in (0, 10)]
    result = show_rise(repo_root, tmp_path / "run", [0.3, 0.3], more_lines=evaluations)
    assert "\neval/sort4/pass@1  0.30 after 0  0.30 after 10\n" in result.stdout
    assert "reward_mean" not in result.stdout and "pass@2" not in result.stdout


@pytest.mark.slow
def test_a_short_run_is_not_judged(repo_root: Path, tmp_path: Path):
    result = show_rise(repo_root, tmp_path / "run", [0.3, 0.3], "--least-rise", "0.4", "--least-rollouts", "20")
    assert result.returncode == 0 and "Not judged: 2 rollouts are fewer than 20." in result.stdout


def test_a_run_without_a_reward_is_the_users_mistake(repo_root: Path, tmp_path: Path):
    result = show_rise(repo_root, tmp_path / "run", [])
    assert result.returncode == 2 and "Traceback" not in result.stderr
