"""trace.json: the phases of a run in Chrome's trace format, for chrome://tracing or ui.perfetto.dev."""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

from slime_like.utils.files import append_text
from slime_like.utils.full_disk import LOST_WRITES


class PhaseTrace:
    """Appends one complete event a phase; its args hold the step, and when it began in unix seconds.

    Each phase has a line of its own, so that phases which overlap are seen side by side.

    The file is a JSON array without its closing bracket, which the format allows: it can be read while the run goes on,
    and after a crash.
    """

    def __init__(self, path: str | os.PathLike):
        self._path = Path(path)
        self._zero, self._unix_zero = time.monotonic(), time.time()
        self._lines: dict[str, int] = {}
        if (began := _began(self._path)) is not None:  # a run that goes on in its own directory
            self._zero -= self._unix_zero - began
            self._unix_zero = began
        else:
            with LOST_WRITES.going_on(str(self._path)):
                self._path.write_text("[\n", encoding="utf-8")

    def add(self, name: str, start: float, end: float, step: int) -> None:
        """One event; start and end are of time.monotonic()."""
        event = {
            "name": name,
            "ph": "X",
            "ts": round((start - self._zero) * 1e6),
            "dur": round((end - start) * 1e6),
            "pid": 0,
            "tid": self._lines.setdefault(name, len(self._lines)),
            "args": {"step": step, "time": round(self._unix_zero + start - self._zero, 3)},
        }
        with LOST_WRITES.going_on(str(self._path)):
            append_text(self._path, json.dumps(event) + ",\n")


def _began(path: Path) -> float | None:
    """Unix seconds of the time 0 of a trace that is there; None if none is, or it has no event."""
    with contextlib.suppress(FileNotFoundError, ValueError, KeyError), open(path, encoding="utf-8") as file:
        file.readline()
        event = json.loads(file.readline().rstrip().rstrip(","))
        return event["args"]["time"] - event["ts"] / 1e6
    return None
