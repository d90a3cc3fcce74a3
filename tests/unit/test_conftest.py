"""What tests/conftest.py promises: a process left behind is found, and a run without a passed test fails."""

from __future__ import annotations

import subprocess
import sys
import uuid
from pathlib import Path

import psutil
import pytest

from tests.conftest import PROCESS_MARK, processes_left

#: Starts a sleeper in a session of its own, prints its pid and ends: the sleeper is an orphan then.
ORPHAN = """
import subprocess, sys
command = [sys.executable, "-c", "import time; time.sleep(60)"]
print(subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid)
"""


def children() -> set[int]:
    """What this process has started so far."""
    return {process.pid for process in psutil.Process().children(recursive=True)}


def test_an_orphan_is_found(monkeypatch: pytest.MonkeyPatch):
    mark = uuid.uuid4().hex
    monkeypatch.setenv(PROCESS_MARK, mark)
    before = children()  # engines and a Ray cluster that other tests keep for the whole session
    pid = int(
        subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, text=True, timeout=30, check=True).stdout
    )
    left = processes_left(mark, before)
    for process in left:
        process.kill()
    assert [process.pid for process in left] == [pid]


def test_a_process_that_was_there_before_is_not_ours():
    before = children()
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        assert processes_left(uuid.uuid4().hex, before | {process.pid}) == []
        assert [p.pid for p in processes_left(uuid.uuid4().hex, before)] == [process.pid]
    finally:
        process.kill()
        process.wait(timeout=10)


@pytest.mark.parametrize(
    ("body", "status"),
    [("pass", 0), ("pytest.skip('why')", 5), ("assert False", 1)],
    ids=["passed", "only-skipped", "failed"],
)
def test_nothing_passed_is_a_failure(repo_root: Path, tmp_path: Path, body: str, status: int):
    (tmp_path / "conftest.py").write_text((repo_root / "tests" / "conftest.py").read_text())
    (tmp_path / "test_it.py").write_text(f"import pytest\ndef test_it():\n    {body}\n")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        "--require-passed",
        str(tmp_path),
    ]
    assert subprocess.run(command, capture_output=True, timeout=60, check=False, cwd=tmp_path).returncode == status
