"""Which processes of this host belong to a run, and where each of them just is (by py-spy, without stopping them)."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import psutil

#: Roles of those that only look after the others.
SUPERVISOR, RAY = "supervisor", "ray"
_DRIVER = "driver"
#: For one process; py-spy takes a hundredth of it.
_STACK_S = 10.0
#: Frames that are shown of a stack, the innermost.
_FRAMES, _INNERMOST = 8, 3
#: Function -> phase, of the driver's own files, the innermost frame first.
_PHASE_FILES = {"slime_like/job/phases.py": None, "slime_like/job/build.py": "start"}
_PHASES = {
    "Phases.generate": "generate", "Phases.train": "train", "Phases.sync": "sync", "Phases.save": "save",
    "Phases.finish_save": "save", "Phases.evaluate": "eval", "Phases.restore": "start",
    "Phases.settle_generation": "generate", "Phases.release": "release",
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunProcess:
    """One process. role: by the log that it, or who started it, writes: "actor-0", "engine-0"; or "driver",
    "supervisor", "reward", "ray".
    """

    pid: int
    role: str
    name: str
    stopped: bool  # by SIGSTOP or a debugger
    stack: tuple[str, ...] = ()  # the innermost frame first


def drives(pid: int | None, path: str) -> bool:
    """Whether a process drives the run: it has the run directory's lock file open as long as it lives."""
    return pid is not None and os.path.join(path, ".lock") in _open_files(pid)


def output_of(pid: int) -> str | None:
    """The file that a process prints to, where it is one."""
    with contextlib.suppress(OSError):
        path = os.readlink(f"/proc/{pid}/fd/1")
        return path if os.path.isfile(path) else None
    return None


def processes_of(path: str, driver: int | None) -> list[RunProcess]:
    """Whoever writes a log of the run directory, and the driver, with all that they have started."""
    logs = os.path.join(path, "logs") + os.sep
    heads: dict[int, str] = {}
    for pid in psutil.pids():
        names = [Path(file).stem for file in _open_files(pid, written=True) if file.startswith(logs)]
        if names:
            heads[pid] = names[0]
    if driver is not None:
        heads[driver] = _DRIVER
        with contextlib.suppress(psutil.Error):
            heads[psutil.Process(driver).ppid()] = SUPERVISOR
    parents = {process.pid: process.info["ppid"] for process in psutil.process_iter(["ppid"])}
    roles = {pid: role for pid in parents if (role := _role(pid, parents, heads)) is not None}
    return [process for pid, role in sorted(roles.items()) if (process := _described(pid, role)) is not None]


def _role(pid: int, parents: dict[int, int], heads: dict[int, str]) -> str | None:
    """Of the nearest head above a process, or its own; what only the driver has started is Ray's, or scores."""
    if pid in heads:
        return heads[pid]
    above = parents.get(pid)
    while above is not None and above not in heads:
        above = parents.get(above)
    if above is None:
        return None
    if heads[above] not in (_DRIVER, SUPERVISOR):
        return heads[above]
    with contextlib.suppress(psutil.Error):
        return "reward" if "rewards.worker" in " ".join(psutil.Process(pid).cmdline()) else RAY
    return None


def _described(pid: int, role: str) -> RunProcess | None:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        status = process.status()
        if status != psutil.STATUS_ZOMBIE:
            stopped = status in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
            return RunProcess(pid=pid, role=role, name=_title(process), stopped=stopped)
    return None


def _title(process: psutil.Process) -> str:
    """Short, and without arguments: those may hold what is nobody's business."""
    words = process.cmdline() or [process.name()]
    if words[0].startswith(("ray::", "sglang::")):
        return words[0][:40]
    modules = [after for word, after in zip(words, words[1:], strict=False) if word == "-m"]
    scripts = [os.path.basename(word) for word in words[1:] if word.endswith(".py")]
    return (modules or scripts or [os.path.basename(words[0])])[0][:60]


def with_stacks(processes: Iterable[RunProcess]) -> tuple[list[RunProcess], str]:
    """The processes with the main thread of each that runs Python, and why there is none of the others."""
    command = shutil.which(
        "py-spy", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    )
    if command is None:
        return list(processes), "no stacks: py-spy is not installed (pip install py-spy)"
    looked, refused = [], ""
    for process in processes:
        stack, problem = _stack(command, process.pid)
        if "ermission" in problem:
            refused = "no stacks of some: py-spy needs root here, or kernel.yama.ptrace_scope=0"
        looked.append(dataclasses.replace(process, stack=stack))
    return looked, refused


def phase_of(stack: Iterable[str]) -> str | None:
    """The phase that a driver is in, by its stack; None: in none that is known."""
    for frame in stack:
        function, _, place = frame.partition(" (")
        for file, phase in _PHASE_FILES.items():
            if place.startswith(file) and (phase or function in _PHASES):
                return phase or _PHASES[function]
    return None


def _stack(command: str, pid: int) -> tuple[tuple[str, ...], str]:
    """(frames of the main thread, why there is none)."""
    try:
        answer = subprocess.run(
            [command, "dump", "--nonblocking", "--json", "--pid", str(pid)],
            capture_output=True, text=True, timeout=_STACK_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return (), f"py-spy took more than {_STACK_S:.0f} s"
    if answer.returncode:
        return (), answer.stderr
    try:
        threads = json.loads(answer.stdout)
        main = next((one for one in threads if one["os_thread_id"] == pid or one["thread_name"] == "MainThread"), None)
        if main is None:
            return (), "it has no main thread"
        return tuple(f"{one['name']} ({one['short_filename']}:{one['line']})" for one in main["frames"]), ""
    except (ValueError, KeyError, TypeError) as error:
        return (), f"py-spy's answer could not be read: {error!r}"


def shown(stack: tuple[str, ...]) -> tuple[str, ...]:
    """The innermost frames, and those of ours around them."""
    return (stack[:_INNERMOST] + tuple(frame for frame in stack[_INNERMOST:] if "(slime_like/" in frame))[:_FRAMES]


def _open_files(pid: int, *, written: bool = False) -> list[str]:
    """Paths behind a process's descriptors; none if it is gone, or another user's. written: only those it may write."""
    paths = []
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                path = os.readlink(entry.path)
                if path.startswith("/") and (not written or _writes(pid, entry.name)):
                    paths.append(path)
    return paths


def _writes(pid: int, descriptor: str) -> bool:
    """Whether a file was opened to be written: whoever only reads a log (`tail -f`) is none of the run's."""
    with open(f"/proc/{pid}/fdinfo/{descriptor}", encoding="ascii") as file:
        flags = next(int(line.split()[1], 8) for line in file if line.startswith("flags:"))
    return flags & os.O_ACCMODE != os.O_RDONLY
