"""Whether anybody is being served just now: tells one who waits for something from one who hangs."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator


class Activity:
    """Calls that are running, and since when none has. Use it inside one event loop.

    Example: with activity.call(): await work()
    """

    def __init__(self) -> None:
        self.num_running = 0
        self._last_end = time.monotonic()

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """While it is open, somebody is being served."""
        self.num_running += 1
        try:
            yield
        finally:
            self.num_running -= 1
            self._last_end = time.monotonic()

    def idle_s(self, since: float) -> float:
        """Seconds for which nothing has run, of those since a moment of time.monotonic(); 0 while something does."""
        return 0.0 if self.num_running else time.monotonic() - max(since, self._last_end)
