"""What CONTRIBUTING tells a reader to type works."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest


def examples(text: str) -> list[list[str]]:
    """The arguments of each `bash scripts/test.sh …` that has some: what pytest is asked for."""
    lines = re.findall(r"^bash scripts/test\.sh[ ](.*)$", text, re.MULTILINE)
    return [arguments for line in lines if (arguments := shlex.split(line, comments=True))]


@pytest.mark.slow
def test_its_examples_select_tests(repo_root: Path):
    selections = examples((repo_root / ".github/CONTRIBUTING.md").read_text())
    assert selections
    for arguments in selections:
        command = [sys.executable, "-m", "pytest", "--collect-only", "-q", *arguments]
        result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=repo_root)
        assert result.returncode == 0, result.stdout  # 5: none selected


def test_its_examples_name_scripts_that_are_there(repo_root: Path):
    text = (repo_root / ".github/CONTRIBUTING.md").read_text() + (repo_root / "README.md").read_text()
    names = set(re.findall(r"bash (scripts/[\w/.-]+\.sh)", text))
    assert {"scripts/check.sh", "scripts/test.sh"} <= names
    assert [name for name in sorted(names) if not (repo_root / name).is_file()] == []
