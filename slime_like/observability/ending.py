"""Why a run stopped: one screen for who sits before it, and end.json in the run directory for who comes later.

    {"role": "actor", "rank": 1, "pid": 4711, "phase": "train", "step": 3, "version": 3,
     "last_progress": {"what": "generate, step 3", "time": 1764000000.0}, "log_file": ".../logs/actor-1.log",
     "error": {"type": "ProcessLost", "message": "..."}, "exit_status": 1, "time": 1764000012.0}

role: "driver" where no other process is to blame; pid and log_file are null where they are not known, "error" is null
after a run that ended well. Times are unix seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import time
from pathlib import Path

from slime_like.errors import SlimeLikeError, UserError
from slime_like.observability.progress import Progress
from slime_like.utils.files import RunDirectory, keep_files_like, write_atomic

FILE = "end.json"
#: Of the log's end, on the screen.
_TAIL_LINES, _LINE_CHARACTERS, _TAIL_BYTES = 12, 160, 1 << 16
#: In messages -> in the names of log files.
_ROLES = {"trainer": "actor", "critic": "critic", "reference": "ref", "reward model": "reward"}
_RANK = re.compile(rf"\b({'|'.join(_ROLES)}) rank (\d+)")
_SERVER = re.compile(r"\b(engine) (\d+)|\bthe (router)\b")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunEnd:
    """How a run ended; the fields of end.json."""

    role: str
    rank: int
    pid: int | None
    phase: str
    step: int
    version: int
    last_progress: dict
    log_file: str | None
    error: dict | None
    exit_status: int
    time: float

    def write(self, run: RunDirectory) -> None:
        """Leave it in the run directory."""
        write_atomic(Path(run.path) / FILE, json.dumps(dataclasses.asdict(self), indent=1) + "\n")

    def screen(self, num_rollout: int | None, advice: str) -> str:
        """What to print below the error's own message. advice: what to do now."""
        known = f", process {self.pid}" if self.pid is not None else ""
        of_all = f" (from 0) of {num_rollout}" if num_rollout else " (from 0)"
        ago = max(0.0, self.time - self.last_progress["time"])
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.last_progress["time"]))
        rows = [
            ("who", f"{self.role}, rank {self.rank}{known}"),
            ("phase", f"{self.phase}, step {self.step}{of_all}"),
            ("weights", f"version {self.version}"),
            ("last progress", f"{self.last_progress['what']}, {ago:.0f} s before the end ({clock})"),
            ("log", self.log_file or "none of its own: it prints to this terminal"),
        ]
        tail = [] if self.log_file is None else log_tail(self.log_file)
        if tail and self.error is not None and tail[-1].strip() in self.error["message"]:
            tail = []  # it is above
        rows += [("", f"| {line[:_LINE_CHARACTERS]}") for line in tail]
        rows += [("what to do", advice)] if advice else []
        return "\n".join(f"  {name:<14} {value}" for name, value in rows)


def ending_of(error: BaseException | None, exit_status: int, progress: Progress, run: RunDirectory) -> RunEnd:
    """What is known of an end that the driver itself sees. error: None where the run is done."""
    role, rank, pid = _culprit(error)
    return RunEnd(
        role=role,
        rank=rank,
        pid=pid,
        phase=progress.phase if error is not None else "done",
        step=progress.step,
        version=progress.version,
        last_progress={"what": progress.last, "time": progress.last_time},
        log_file=None if role == "driver" else str(run.log(role, rank)),
        error=None if error is None else {"type": type(error).__name__, "message": _message(error)},
        exit_status=exit_status,
        time=time.time(),
    )


def tell_lost_driver(states: list[str], run_dirs: list[str], pid: int, message: str, status: int) -> str:
    """The screen of a run whose driver said no goodbye, from what it has kept outside of itself; end.json is written.

    "" where it had no run directory yet.
    """
    if not states or not run_dirs or not os.path.isdir(run_dirs[-1]):
        return ""
    run, progress = RunDirectory(run_dirs[-1]), Progress.from_json(states[-1])
    keep_files_like(run.path)
    ending = dataclasses.replace(
        ending_of(None, status, progress, run), pid=pid, error={"type": "RunError", "message": message}
    )
    ending = dataclasses.replace(ending, phase=progress.phase)
    with contextlib.suppress(OSError):  # a full disk may be what ended it: the screen is there all the same
        ending.write(run)
    return ending.screen(None, f"the same command with --run-dir {run.path} --resume auto goes on from its checkpoint")


def log_tail(path: str) -> list[str]:
    """The last lines of a log that are not empty; [] if there is none here: it may lie on another machine."""
    try:
        with open(path, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-_TAIL_LINES:]


def _culprit(error: BaseException | None) -> tuple[str, int, int | None]:
    """(role, rank, process id) of whom an error is about; the driver where it is about no other."""
    if error is not None and not isinstance(error, UserError):
        who = error.who if isinstance(error, SlimeLikeError) else ""
        text = "\n".join([who, _message(error), *getattr(error, "__notes__", [])])
        pid = error.pid if isinstance(error, SlimeLikeError) else None
        if (match := _RANK.search(text)) is not None:
            return _ROLES[match[1]], int(match[2]), pid
        if (match := _SERVER.search(text)) is not None:
            return match[1] or match[3], int(match[2] or 0), pid
    return "driver", 0, os.getpid()


def _message(error: BaseException) -> str:
    return str(error) or type(error).__name__
