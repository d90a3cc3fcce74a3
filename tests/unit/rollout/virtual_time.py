"""An event loop whose sleeps take no time: its clock jumps to the next thing that is due."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any


class _JumpingSelector(selectors.SelectSelector):
    """Instead of waiting, moves the clock on."""

    now = 0.0

    def select(self, timeout: float | None = None):
        assert timeout is not None or super().select(0), "everything waits, and nothing is due: a deadlock"
        self.now += max(0.0, timeout or 0.0)
        return super().select(0)


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_virtual(work: Coroutine[Any, Any, Any]) -> Any:
    """What `work` gives; `asyncio.get_running_loop().time()` is its clock, in seconds from 0."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(work)
