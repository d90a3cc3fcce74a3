"""The simulated trainer: work that passes as fast as what runs beside it lets it."""

from __future__ import annotations

from collections.abc import Callable

from slime_like.planning.simulate.generation import EventQueue


class SimulatedTrainer:
    """One train step at a time. ended: called when it ends. busy_s: of all steps that have ended."""

    def __init__(self, events: EventQueue, ended: Callable[[], None]):
        self._events, self._on_end = events, ended
        self._left = self._at = self._began = 0.0
        self._slowness, self._stamp = 1.0, 0
        self.is_busy, self.busy_s = False, 0.0

    def begin(self, seconds: float) -> None:
        """A step that takes so long by itself."""
        assert not self.is_busy, "one step at a time"
        self.is_busy, self._left, self._at, self._began = True, seconds, self._events.now, self._events.now
        self._slowness = 1.0
        self._plan()

    def slow(self, slowness: float) -> None:
        """The step's work takes that many times as long from now on."""
        if not self.is_busy or slowness == self._slowness:
            return
        now = self._events.now
        self._left = max(0.0, self._left - (now - self._at) / self._slowness)
        self._at, self._slowness = now, slowness
        self._plan()

    def _plan(self) -> None:
        self._stamp += 1
        self._events.at(self._events.now + self._left * self._slowness, self._end, self._stamp)

    def _end(self, stamp: int) -> None:
        if stamp != self._stamp or not self.is_busy:
            return
        self.is_busy = False
        self.busy_s += self._events.now - self._began
        self._on_end()
