"""A run that is asked to end (SIGTERM, or SIGUSR1 as SLURM sends it before a time limit) saves first.

The request counts at once where only engines are waited for, which a resumed run asks again; a train step, a save and a
sync go to their end. From the signal until everything is saved it takes --preemption-timeout-s at most: then the run
ends as it is, and what was saved before stays the newest checkpoint. Ctrl-C does not wait for that.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator

#: Of a run that was preempted, whichever signal asked.
STATUS = 128 + signal.SIGTERM
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preempted(KeyboardInterrupt):  # whoever waits gives up what it waits for, as at Ctrl-C
    """The run is to save and to end."""


class Preemption:
    """Hears the signals while `listening`, in the main thread."""

    def __init__(self, seconds: float):
        """seconds: from the signal until everything must be saved."""
        self._seconds = seconds
        self._asked_by: signal.Signals | None = None
        self._may_interrupt = False

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Inside, a signal asks; the handlers from before are back afterwards."""
        before = {number: signal.signal(number, self._hear) for number in _SIGNALS}
        alarm = signal.signal(signal.SIGALRM, self._give_up)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            for number, handler in (before | {signal.SIGALRM: alarm}).items():
                signal.signal(number, handler)

    @property
    def is_asked(self) -> bool:
        """Whether the run is to end."""
        return self._asked_by is not None

    def check(self) -> None:
        """Raises Preempted if the run was asked to end. Call it where everything that was begun is done."""
        if self._asked_by is not None:
            raise Preempted(self._asked_by.name)

    @contextlib.contextmanager
    def interruptible(self) -> Iterator[None]:
        """Inside, Preempted is raised wherever the run just is."""
        self.check()
        self._may_interrupt = True
        try:
            yield
        finally:
            self._may_interrupt = False
        self.check()

    def _hear(self, number: int, frame) -> None:
        if self._asked_by is not None:
            return  # a scheduler signals all processes of a job, and train.py's supervisor hands its own on
        self._asked_by = signal.Signals(number)
        signal.setitimer(signal.ITIMER_REAL, self._seconds)
        if self._may_interrupt:
            self._may_interrupt = False
            raise Preempted(self._asked_by.name)

    def _give_up(self, number: int, frame) -> None:
        why = f"{self._seconds:g} s (--preemption-timeout-s) are over"
        print(f"preempted, and not saved: {why}. The last checkpoint stays the newest.", file=sys.stderr, flush=True)
        raise SystemExit(STATUS)
