"""A deadline for Python code that nobody can ask to stop: a chat template is a program of its model's author."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import heapq
import itertools
import os
import threading
import time
from collections.abc import Iterator


class TimeIsUp(Exception):
    """Raised inside the code that ran too long, between two steps of Python's interpreter."""


@dataclasses.dataclass
class _Limit:
    thread: int
    is_over: bool = False
    is_raised: bool = False


class _Watch:
    """One thread for all limits of a process; it sleeps until the next one ends."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self._limits: list[tuple[float, int, _Limit]] = []
        self._count = itertools.count()
        self._thread: threading.Thread | None = None

    def add(self, seconds: float) -> _Limit:
        limit = _Limit(threading.get_ident())
        with self.changed:
            entry = (time.monotonic() + seconds, next(self._count), limit)
            heapq.heappush(self._limits, entry)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="time limits", daemon=True)
                self._thread.start()
            elif self._limits[0] is entry:
                self.changed.notify()
        return limit

    def end(self, limit: _Limit) -> None:
        with self.changed:
            limit.is_over = True
            if limit.is_raised:  # it may not have arrived yet, and must not arrive later
                _raise_in(limit.thread, None)
            while self._limits and self._limits[0][2].is_over:
                heapq.heappop(self._limits)

    def _run(self) -> None:
        with self.changed:
            while True:
                rest = self._limits[0][0] - time.monotonic() if self._limits else None
                if rest is None or rest > 0:
                    self.changed.wait(rest)
                    continue
                limit = heapq.heappop(self._limits)[2]
                if not limit.is_over:
                    limit.is_raised = True
                    _raise_in(limit.thread, TimeIsUp)


_watch = _Watch()


def _new_watch() -> None:
    global _watch
    _watch = _Watch()  # a fork has no other threads, and maybe a held lock


os.register_at_fork(after_in_child=_new_watch)


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), ctypes.py_object(error) if error is not None else None
    )


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeIsUp inside the block once it has taken so long.

    Ends loops of Python code, in any thread; one long call into C (10**10**10) is ended when it returns.
    """
    watch = _watch
    limit = watch.add(seconds)
    try:
        yield
    finally:
        watch.end(limit)
