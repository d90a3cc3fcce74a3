"""A deadline for Python code that nobody can ask to stop: a chat template is a program of its model's author."""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import itertools
import os
import queue
import threading
import time
from collections.abc import Iterator


class TimeIsUp(Exception):
    """Raised inside the code that ran too long, between two steps of Python's interpreter."""


class _Limit:
    """One block's. Whoever takes the ticket first says how it ends: its thread, or the watch, which then raises.

    No lock is ever held in a thread that has a limit: the error may arrive between any two of its steps, also between
    taking a lock and being ready to give it back.
    """

    def __init__(self, seconds: float):
        self.thread, self.ends_at = threading.get_ident(), time.monotonic() + seconds
        self.is_raised = False
        self._ticket = [None]

    def takes_ticket(self) -> bool:
        """Whether nobody has taken it before; one step of the interpreter."""
        try:
            self._ticket.pop()
        except IndexError:
            return False
        return True

    def end(self) -> None:
        """After this returns nothing arrives any more."""
        if self.takes_ticket():
            return
        while not self.is_raised:
            time.sleep(0.0001)
        _raise_in(self.thread, None)  # it may not have arrived yet


class _Watch:
    """One thread for all limits of a process; it sleeps until the next one ends."""

    def __init__(self) -> None:
        self._new: queue.SimpleQueue[_Limit] = queue.SimpleQueue()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Before the first limit; again does nothing."""
        with self._starting:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="time limits", daemon=True)
                self._thread.start()

    def add(self, limit: _Limit) -> None:
        """From any thread; one step of the interpreter."""
        self._new.put(limit)

    def _run(self) -> None:
        waiting: list[tuple[float, int, _Limit]] = []
        count = itertools.count()
        while True:
            rest = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
            try:
                limit = self._new.get(timeout=rest)
                heapq.heappush(waiting, (limit.ends_at, next(count), limit))
            except queue.Empty:
                limit = heapq.heappop(waiting)[2]
                if limit.takes_ticket():
                    _raise_in(limit.thread, TimeIsUp)
                    limit.is_raised = True


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
    _watch.start()
    limit = _Limit(seconds)
    try:
        _watch.add(limit)
        yield
    finally:
        try:
            limit.end()
        except TimeIsUp:  # its own, or that of a limit around this one: this one is ended all the same
            limit.end()
            raise
