"""A guarded command never outlives its parent, its supervisor, or a call of close."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from slime_like.utils import guard
from slime_like.utils.guard import start_guarded

# A command with a child in its group and a grandchild in a session of its own, none of which listens to TERM.
STUBBORN = textwrap.dedent("""
    import os, signal, subprocess, sys, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleeper = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(120)"
    a = subprocess.Popen([sys.executable, "-c", sleeper])
    b = subprocess.Popen([sys.executable, "-c", sleeper], start_new_session=True)
    print("pids", os.getpid(), a.pid, b.pid, flush=True)
    time.sleep(120)
""")


def alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def pids_in(log_path, deadline_s: float = 10.0) -> list[int]:
    end = time.monotonic() + deadline_s
    while time.monotonic() < end:
        if os.path.exists(log_path):
            with open(log_path) as file:
                for line in file:
                    if line.startswith("pids ") and line.endswith("\n"):
                        return [int(word) for word in line.split()[1:]]
        time.sleep(0.02)
    raise AssertionError("the command printed no pids")


def assert_gone(pids: list[int], deadline_s: float = 10.0) -> None:
    end = time.monotonic() + deadline_s
    while any(map(alive, pids)) and time.monotonic() < end:
        time.sleep(0.02)
    assert [pid for pid in pids if alive(pid)] == []


def test_exit_status_and_log(tmp_path):
    process = start_guarded(
        [sys.executable, "-c", "print('one'); print('two'); raise SystemExit(3)"],
        env=dict(os.environ),
        log_path=f"{tmp_path}/a/log",
    )
    end = time.monotonic() + 10
    while process.poll() is None and time.monotonic() < end:
        time.sleep(0.01)
    assert process.poll() == 3
    assert process.log_tail(1) == "two"
    process.close()
    process.close()


def test_close_kills_the_whole_tree(tmp_path):
    log = f"{tmp_path}/log"
    process = start_guarded([sys.executable, "-c", STUBBORN], env=dict(os.environ), log_path=log)
    pids = pids_in(log)
    assert all(map(alive, pids)) and process.pid == pids[0] and process.poll() is None
    process.close(grace_s=0.2)
    assert_gone([*pids, process.supervisor_pid])
    assert process.poll() == 128 + signal.SIGKILL


@pytest.mark.slow
def test_nothing_survives_the_parent_being_killed(tmp_path):
    log = f"{tmp_path}/log"
    start = f"start_guarded([{sys.executable!r}, '-c', {STUBBORN!r}], env=dict(os.environ), log_path={log!r})"
    code = f"import os, time; from slime_like.utils.guard import start_guarded\n{start}\ntime.sleep(120)"
    parent = subprocess.Popen([sys.executable, "-c", code])
    try:
        pids = pids_in(log)
        assert all(map(alive, pids))
        with open(f"/proc/{pids[0]}/stat") as file:
            supervisor = int(file.read().rpartition(")")[2].split()[1])
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        assert_gone([*pids, supervisor])
    finally:
        parent.kill()


def test_command_dies_with_its_supervisor_and_close_sweeps_the_group(tmp_path):
    log = f"{tmp_path}/log"
    process = start_guarded([sys.executable, "-c", STUBBORN], env=dict(os.environ), log_path=log)
    pids = pids_in(log)
    os.kill(process.supervisor_pid, signal.SIGKILL)
    assert_gone(pids[:1])
    process.close()
    assert_gone(pids[:2])
    os.kill(pids[2], signal.SIGKILL)  # left the group on its own, and its reaper was shot: nobody could know it


def test_secrets_stay_out_of_the_log_and_the_command_line(tmp_path):
    log = f"{tmp_path}/log"
    env = {**os.environ, "KEY": "hunter2hunter2"}
    code = "import os, time; print('key', os.environ['KEY'], flush=True); time.sleep(60)"
    process = start_guarded([sys.executable, "-c", code], env=env, log_path=log, secrets=("hunter2hunter2",))
    end = time.monotonic() + 10
    while "key" not in process.log_tail() and time.monotonic() < end:
        time.sleep(0.02)
    assert process.log_tail() == "key ***"
    with open(f"/proc/{process.supervisor_pid}/cmdline") as file:
        assert "hunter2" not in file.read()
    process.close(grace_s=2.0)


def test_mapped_files_are_removed_at_the_end(tmp_path):
    code = f"""
import mmap, os, time
for name in ("mine-1", "other"):
    fd = os.open({str(tmp_path)!r} + "/" + name, os.O_CREAT | os.O_RDWR)
    os.ftruncate(fd, 4096)
    keep = mmap.mmap(fd, 4096)
    globals()[name] = keep
print("pids", os.getpid(), flush=True)
time.sleep(60)
"""
    (tmp_path / "mine-2").write_text("belongs to somebody else")
    log = f"{tmp_path}/log"
    process = start_guarded(
        [sys.executable, "-c", code], env=dict(os.environ), log_path=log, remove_mapped=(f"{tmp_path}/mine-",)
    )
    pids_in(log)
    process.close(grace_s=1.0)
    assert sorted(name for name in os.listdir(tmp_path) if name != "log") == ["mine-2", "other"]


def test_mapped_files_of_a_command_that_was_killed_are_removed_too(tmp_path):
    code = f"""
import mmap, os, time
fd = os.open({str(tmp_path)!r} + "/mine-1", os.O_CREAT | os.O_RDWR)
os.ftruncate(fd, 4096)
keep = mmap.mmap(fd, 4096)
print("pids", os.getpid(), flush=True)
time.sleep(60)
"""
    log = f"{tmp_path}/log"
    process = start_guarded(
        [sys.executable, "-c", code], env=dict(os.environ), log_path=log, remove_mapped=("/no/", f"{tmp_path}/mine-")
    )
    (pid,) = pids_in(log)
    time.sleep(3.5)  # the first look comes after two seconds
    os.kill(pid, 9)
    assert_gone([process.supervisor_pid])
    assert sorted(os.listdir(tmp_path)) == ["log"]
    process.close(grace_s=1.0)


def test_what_a_slow_start_maps_late_is_found_soon(monkeypatch):
    now, looks = [0.0], []
    monkeypatch.setattr(guard.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(guard._Mapped, "look", lambda mapped: looks.append(now[0]))
    mapped = guard._Mapped(0, ["/dev/shm/x"])
    while now[0] < 200.0:
        now[0] += 1.0
        mapped.look_again()
    assert max(late - early for early, late in zip(looks, looks[1:], strict=False)) <= 5.0 and looks[-1] >= 195.0


def test_missing_command_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no-such-command"):
        start_guarded(["/no-such-command"], env=dict(os.environ), log_path=f"{tmp_path}/log")
