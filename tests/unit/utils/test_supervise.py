"""A supervised driver: its end is always told, its status is never 0 by accident, and nothing that
it started is left.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from slime_like.utils.supervise import Board, running

#: A driver that starts a daemon in a session of its own, as Ray's are, makes a folder, and then does what {ending}
#: says.
DRIVER = """
import os, signal, subprocess, sys, tempfile, threading, time
from slime_like.utils.supervise import fork_driver, keep_run_dir, keep_state, remove_at_end, running

def tell_lost(states, run_dirs, pid, message, status):
    return " ".join(["kept:", *states, *run_dirs, str(status)])

def interrupted(number, frame):
    signal.signal(number, signal.SIG_IGN)
    raise SystemExit(128 + number)

signal.signal(signal.SIGTERM, interrupted)
if (status := fork_driver(tell_lost=tell_lost)) is not None:
    sys.exit(status)
keep_state("first")
keep_run_dir("/runs/x")
keep_state("second")
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(120)"
daemon = subprocess.Popen([sys.executable, "-c", {daemon}], start_new_session=True)
folder = tempfile.mkdtemp(dir=sys.argv[1])
remove_at_end(folder)
with open(sys.argv[1] + "/up", "w") as file:
    print(daemon.pid, os.getpid(), file=file)
os.rename(sys.argv[1] + "/up", sys.argv[1] + "/pids")
try:
    with running("reward function m.f of prompt 3, sample 1"):
        {ending}
except KeyboardInterrupt:
    sys.exit(130)
"""
PLAIN = '"import time; time.sleep(120)"'

pytestmark = pytest.mark.slow  # each starts processes, and waits for their end


def start(tmp_path: Path, ending: str, daemon: str = PLAIN, **options) -> tuple[subprocess.Popen, list[int]]:
    code = DRIVER.format(ending=ending, daemon=daemon)
    # Who runs the tests with nohup ignores it, which would be inherited.
    options.setdefault("preexec_fn", lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL))
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )
    deadline = time.monotonic() + 30
    while not (tmp_path / "pids").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    return process, [int(word) for word in (tmp_path / "pids").read_text().split()]


def finish(tmp_path: Path, process: subprocess.Popen, pids: list[int]) -> tuple[int, str]:
    """Status and what was said; nothing is left at that moment."""
    said = process.communicate(timeout=40)[1]
    assert [pid for pid in pids if os.path.exists(f"/proc/{pid}")] == []
    assert [path.name for path in tmp_path.iterdir()] == ["pids"]
    return process.returncode, said


@pytest.mark.parametrize(("left_with", "status"), [(0, 1), (7, 7)])
@pytest.mark.parametrize("thread", [True, False])
def test_os_exit_in_user_code_is_named_and_never_a_success(tmp_path, left_with, status, thread):
    ending = (
        f"threading.Thread(target=os._exit, args=({left_with},)).start(); time.sleep(60)"
        if thread
        else f"os._exit({left_with})"
    )
    got, said = finish(tmp_path, *start(tmp_path, ending))
    assert got == status
    assert (
        said.startswith(f"RunError: the driver ended itself with status {left_with}")
        and "m.f of prompt 3, sample 1" in said
    )


@pytest.mark.parametrize(
    ("number", "status", "word"), [(signal.SIGKILL, 137, "out of memory"), (signal.SIGSEGV, 139, "SIGSEGV")]
)
def test_a_driver_that_is_killed_is_named(tmp_path, number, status, word):
    process, pids = start(tmp_path, "time.sleep(60)")
    os.kill(pids[1], number)
    got, said = finish(tmp_path, process, pids)
    assert got == status and word in said and "m.f of prompt 3, sample 1" in said
    assert said.splitlines()[-1] == f"kept: second /runs/x {status}", "of its states the last"


def test_a_driver_that_says_goodbye_keeps_its_status_and_is_not_talked_about(tmp_path):
    assert finish(tmp_path, *start(tmp_path, "sys.exit(2)")) == (2, "")


def test_a_daemon_that_does_not_listen_is_killed(tmp_path):
    began = time.monotonic()
    assert finish(tmp_path, *start(tmp_path, "sys.exit(0)", "stubborn")) == (0, "")
    assert time.monotonic() - began < 30


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)])
@pytest.mark.parametrize("whom", ["supervisor", "both"])
def test_signals_reach_the_driver_once(tmp_path, number, status, whom):
    """Ctrl-C in a terminal reaches both of them, and is handed on besides."""
    process, pids = start(
        tmp_path, "time.sleep(60)", preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler)
    )
    os.killpg(process.pid, number) if whom == "both" else os.kill(process.pid, number)
    assert finish(tmp_path, process, pids) == (status, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_what_was_ignored_stays_ignored(tmp_path, number):
    """As in a shell's background, and under nohup."""
    process, pids = start(tmp_path, "time.sleep(2)", preexec_fn=lambda: signal.signal(number, signal.SIG_IGN))
    os.killpg(process.pid, number)
    assert finish(tmp_path, process, pids) == (0, "")


def test_the_driver_dies_with_its_supervisor(tmp_path):
    process, pids = start(tmp_path, "time.sleep(60)", daemon='"pass"')
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while os.path.exists(f"/proc/{pids[1]}") and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not os.path.exists(f"/proc/{pids[1]}")


def test_a_board_holds_what_fits_and_forgets_what_is_over():
    board = Board()
    numbers = [board.put(b"r", f"function {number}") for number in range(300)]
    assert numbers.count(None) == 300 - 256 and len(board.texts(b"r")) == 256 and not board.texts(b"g")
    for number in numbers[1:256]:
        board.clear(number)
    assert board.texts(b"r") == ["function 0"]
    board.put(b"r", "é" * 1000)
    assert max(map(len, board.texts(b"r"))) in (254, 255), "cut to what an entry holds, in bytes"


#: What an engine is to a run: guarded by a worker of the driver, with a file mapped, as in shared memory.
WORKER = """
import os, sys, time
from slime_like.utils.guard import start_guarded
engine = "import mmap, sys, time; f = open(sys.argv[1], 'w+b'); f.truncate(4096); m = mmap.mmap(f.fileno(), 4096)"
engine += "; open(sys.argv[1] + '.up', 'w'); time.sleep(120)"
log_path = sys.argv[1] + ".log"
start_guarded(
    [sys.executable, "-c", engine, sys.argv[1]], env=dict(os.environ), log_path=log_path, remove_mapped=(sys.argv[1],)
)
time.sleep(120)
"""


def test_a_guard_whose_worker_dies_with_the_driver_still_removes_its_files(tmp_path):
    file = tmp_path / "mapped-1"
    process, pids = start(tmp_path, "time.sleep(60)", daemon=f"{WORKER!r}, {str(file)!r}")
    deadline = time.monotonic() + 30
    while not (tmp_path / "mapped-1.up").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.02)
    assert file.exists()
    os.kill(pids[0], signal.SIGKILL)
    os.kill(pids[1], signal.SIGKILL)
    assert process.wait(timeout=40) == 137
    process.stderr.close()
    assert not file.exists()


def test_without_a_supervisor_nothing_is_noted():
    with running("a function"):
        pass
