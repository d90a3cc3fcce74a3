"""A flag that appears, disappears or changes its default does so on purpose."""

from __future__ import annotations

import difflib
import subprocess
import sys
from pathlib import Path

HOW = (
    "If that is meant: .venv/bin/python scripts/list_flags.py > tests/unit/flags.txt, and a line in"
    " .github/CHANGELOG.md."
)


def listed_flags(repo_root: Path) -> list[str]:
    command = [sys.executable, str(repo_root / "scripts" / "list_flags.py")]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()


def difference(recorded: list[str], now: list[str]) -> str:
    return "\n".join(
        line
        for line in difflib.unified_diff(recorded, now, "tests/unit/flags.txt", "train.py", lineterm="", n=0)
        if not line.startswith("@@")
    )


def test_flags_are_the_recorded_ones(repo_root: Path):
    recorded = (repo_root / "tests" / "unit" / "flags.txt").read_text().splitlines()
    now = listed_flags(repo_root)
    assert len(now) > 100
    assert now == recorded, f"the command line changed:\n{difference(recorded, now)}\n{HOW}"


def test_a_changed_default_shows_in_the_difference():
    assert difference(["--lr = 1e-06"], ["--lr = 1e-05"]).splitlines()[2:] == ["---lr = 1e-06", "+--lr = 1e-05"]
