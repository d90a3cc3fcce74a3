"""Fixtures and rules of every test: markers by folder, the tiny model, no process left behind, GPU
tests skipped aloud.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent
#: A test in tests/<folder>/ carries the marker of that name.
MARKED_FOLDERS = ("contract", "multiprocess", "e2e", "gpu", "pretend_gpu")
#: Tests that only run where -m names them: scripts/test_long.sh does.
LONG_MARKERS = ("parity_table", "fault_table", "long_run")
#: Put into the environment of what a test starts; whoever carries it after the test was left behind.
PROCESS_MARK = "SLIME_LIKE_TEST_MARK"
END_TIMEOUT_S = 10.0


def pytest_addoption(parser: pytest.Parser) -> None:
    """--require-passed: a run in which nothing passed is a failure (everything was skipped, or the path was wrong)."""
    parser.addoption("--require-passed", action="store_true", help="Fail if no test passed.")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by their folder, skip GPU tests where there is no GPU, and leave out what takes long unless -m names
    it.
    """
    unasked = [name for name in LONG_MARKERS if name not in config.option.markexpr]
    long = [item for item in items if any(item.get_closest_marker(name) for name in unasked)]
    if long:
        items[:] = [item for item in items if item not in long]
        config.hook.pytest_deselected(items=long)
    reason = _why_no_gpu() if any(_folder(item) == "gpu" or item.get_closest_marker("gpu") for item in items) else None
    for item in items:
        if _folder(item) in MARKED_FOLDERS:
            item.add_marker(_folder(item))
        if reason and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=reason))


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """With --require-passed, status 5 if nothing passed."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if (
        exitstatus == 0
        and session.config.getoption("--require-passed")
        and reporter is not None
        and not reporter.stats.get("passed")
    ):
        reporter.write_line("no test passed: nothing was checked", red=True)
        session.exitstatus = 5


@pytest.fixture(scope="session")
def repo_root() -> Path:
    """The folder that holds train.py."""
    return ROOT


@pytest.fixture(scope="session")
def tiny_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """models/tiny-qwen3 with weights from seed 0, in fp32; made once, not to be written to."""
    folder = tmp_path_factory.mktemp("models") / "tiny-qwen3"
    _run_script("make_tiny_model.py", str(folder), "--seed", "0")
    return folder


@pytest.fixture(scope="session")
def tiny_data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """sft.jsonl, train.jsonl and eval.jsonl of "sort four digits", seed 0; made once, not to be written to."""
    folder = tmp_path_factory.mktemp("data") / "sort4"
    _run_script("make_tiny_data.py", "sort4", str(folder), "--seed", "0")
    return folder


@pytest.fixture
def no_process_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails a test after which a process that it started still runs, and ends that process."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv(PROCESS_MARK, mark)
    before = {process.pid for process in psutil.Process().children(recursive=True)}
    yield
    deadline = time.monotonic() + END_TIMEOUT_S
    while (left := processes_left(mark, before)) and time.monotonic() < deadline:
        time.sleep(0.2)
    names = [_describe(process) for process in left]
    for process in left:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue  # it ended by itself meanwhile
    assert not names, f"still running {END_TIMEOUT_S:.0f} s after the test: {names}"


def processes_left(mark: str, before: set[int]) -> list[psutil.Process]:
    """Processes whose environment carries the mark (also orphans), and new descendants of ours (forked ones show our
    old environment).
    """
    ours = {process.pid for process in psutil.Process().children(recursive=True)} - before
    processes = []
    for process in psutil.process_iter():
        try:
            marked = process.pid in ours or process.environ().get(PROCESS_MARK) == mark
            command = " ".join(process.cmdline())
            helper = process.ppid() == os.getpid() and (
                "multiprocessing.resource_tracker" in command or "multiprocessing.forkserver" in command
            )
            if marked and not helper and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                processes.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue  # gone, or another user's
    return processes


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:200]}"
    except psutil.NoSuchProcess:
        return str(process.pid)


def _folder(item: pytest.Item) -> str:
    parts = item.path.relative_to(ROOT / "tests").parts if item.path.is_relative_to(ROOT / "tests") else ()
    return parts[0] if len(parts) > 1 else ""


def _why_no_gpu() -> str | None:
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False
        ).stdout.strip()
    except FileNotFoundError:
        return "needs CUDA: this host has no nvidia-smi"
    return None if listed else "needs CUDA: nvidia-smi lists no GPU"


def _run_script(name: str, *arguments: str) -> None:
    result = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / name), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == 0, f"{name} failed:\n{result.stderr}"
