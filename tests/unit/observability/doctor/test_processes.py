"""Whose processes the doctor looks at, and where they are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from slime_like.observability.doctor.processes import drives, output_of, phase_of, processes_of, shown, with_stacks

#: Holds the lock as a run's driver does; its child writes a log, as a trainer does.
DRIVER = """
import subprocess, sys, time
lock = open(sys.argv[1] + "/.lock", "w")
lock.write(str(__import__("os").getpid())); lock.flush()
with open(sys.argv[1] + "/logs/actor-1.log", "w") as log:
    child = subprocess.Popen([sys.executable, "-c", sys.argv[2]], stdout=log)
print("ready", flush=True)
def wait_for_the_trainer():
    time.sleep(60)
wait_for_the_trainer()
"""
TRAINER = """
import subprocess, sys, time
helper = subprocess.Popen(["sleep", "60"], stdout=subprocess.DEVNULL)
def reduce_gradients():
    time.sleep(60)
reduce_gradients()
"""


@pytest.fixture
def run(tmp_path) -> Iterator[tuple[Path, int]]:
    """A run directory whose driver and trainer live; the driver's process."""
    folder = tmp_path / "run"
    (folder / "logs").mkdir(parents=True)
    with subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(folder), TRAINER], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        try:
            yield folder, process.pid
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def wait_for(condition, seconds: float = 10.0):
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return answer


def test_the_driver_and_whoever_writes_a_log_with_their_children(run):
    folder, driver = run
    assert drives(driver, str(folder)) and not drives(os.getpid(), str(folder)) and not drives(None, str(folder))

    def all_up():
        processes = processes_of(str(folder), driver)
        names = {process.name for process in processes if process.role == "actor-1"}
        return processes if {"sleep", python} <= names else None

    python = os.path.basename(sys.executable)
    roles = {(process.role, process.name) for process in wait_for(all_up) if process.pid != os.getpid()}
    assert {("driver", python), ("actor-1", python), ("actor-1", "sleep")} <= roles
    assert {role for role, _ in roles} <= {"driver", "actor-1", "ray"}, "the tests' own children are the supervisor's"
    assert output_of(driver) is None, "it prints into a pipe"


def test_whoever_only_reads_a_log_is_none_of_the_run(run):
    folder, driver = run
    with subprocess.Popen(["tail", "-f", folder / "logs/actor-1.log"], stdout=subprocess.DEVNULL) as reader:
        try:
            wait_for(lambda: any("actor-1.log" in path for path in open_files(reader.pid)))
            assert reader.pid not in {process.pid for process in processes_of(str(folder), None)}
            assert any(process.role == "actor-1" for process in processes_of(str(folder), None))
        finally:
            reader.kill()


def open_files(pid: int) -> list[str]:
    return [os.readlink(entry.path) for entry in os.scandir(f"/proc/{pid}/fd")]


def test_one_that_is_stopped_is_seen_and_its_stack_too(run):
    folder, driver = run
    trainer = wait_for(
        lambda: [p for p in processes_of(str(folder), None) if p.role == "actor-1" and p.name != "sleep"]
    )[0]
    wait_for(lambda: any("reduce_gradients" in frame for frame in with_stacks([trainer])[0][0].stack))
    os.kill(trainer.pid, signal.SIGSTOP)
    wait_for(lambda: next(p.stopped for p in processes_of(str(folder), driver) if p.pid == trainer.pid))
    looked, note = with_stacks(p for p in processes_of(str(folder), driver) if p.pid in (driver, trainer.pid))
    stacks = {process.pid: process.stack for process in looked}
    assert stacks[trainer.pid][0].startswith("reduce_gradients (<string>:")
    assert stacks[driver][0].startswith("wait_for_the_trainer (<string>:") and note == ""


def test_the_phase_is_the_innermost_that_the_driver_is_in():
    stack = [
        "wait (ray/worker.py:3)",
        "Phases.train (slime_like/job/phases.py:165)",
        "_step (slime_like/loops/sync_loop.py:68)",
    ]
    assert phase_of(stack) == "train"
    assert phase_of(["_start (slime_like/job/build.py:70)", "build (slime_like/job/build.py:41)"]) == "start"
    assert phase_of(["main (train.py:46)"]) is None


def test_of_a_deep_stack_the_innermost_frames_and_ours():
    stack = tuple(
        [f"f{n} (site-packages/httpx.py:{n})" for n in range(9)] + ["Phases.sync (slime_like/job/phases.py:1)"]
    )
    assert shown(stack) == (*stack[:3], stack[-1])
