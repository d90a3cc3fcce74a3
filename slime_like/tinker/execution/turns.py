"""Training and sampling in turn, where both run on the same devices."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import time
from collections.abc import AsyncIterator


class Side(enum.Enum):
    """Of the devices' two uses."""

    TRAINING = "training"
    SAMPLING = "sampling"

    @property
    def other(self) -> Side:
        """The one that waits meanwhile."""
        return Side.SAMPLING if self is Side.TRAINING else Side.TRAINING


class Turns:
    """Only one side at a time, and as many of it as come.

    Rule: a side keeps its turn while the other has nothing to do. Where the other waits, nobody new is let in once the
    turn is turn_s old; when the last has left, the side goes next that has had fewer seconds by its weight. So over
    time the seconds are as the weights are, but for one turn and what is under way when it ends.
    shared False: the sides have devices of their own, and nobody waits.
    """

    def __init__(self, *, shared: bool, sampling_weight: float = 1.0, turn_s: float = 2.0):
        self._shared, self._turn_s = shared, turn_s
        self._weights = {Side.TRAINING: 1.0, Side.SAMPLING: sampling_weight}
        self._changed = asyncio.Condition()
        self._side: Side | None = None
        self._inside, self._since = 0, 0.0
        self._waiting = dict.fromkeys(Side, 0)
        self.seconds = dict.fromkeys(Side, 0.0)

    @contextlib.asynccontextmanager
    async def of(self, side: Side) -> AsyncIterator[None]:
        """The devices, for that side."""
        if not self._shared:
            yield
            return
        await self._enter(side)
        try:
            yield
        finally:
            await asyncio.shield(asyncio.ensure_future(self._leave()))

    async def _enter(self, side: Side) -> None:
        async with self._changed:
            self._waiting[side] += 1
            try:
                await self._changed.wait_for(lambda: self._may_enter(side))
            finally:
                self._waiting[side] -= 1
                self._changed.notify_all()
            if self._side is None:
                self._side, self._since = side, time.monotonic()
            self._inside += 1

    def _may_enter(self, side: Side) -> bool:
        other_waits = self._waiting[side.other] > 0
        if self._side is None:
            return not other_waits or self._share(side) <= self._share(side.other)
        is_over = other_waits and time.monotonic() - self._since >= self._turn_s
        return self._side is side and not is_over

    def _share(self, side: Side) -> float:
        return self.seconds[side] / self._weights[side]

    async def _leave(self) -> None:
        async with self._changed:
            self._inside -= 1
            if not self._inside and self._side is not None:
                self._account(self._side, time.monotonic() - self._since)
                self._side = None
            self._changed.notify_all()

    def _account(self, side: Side, seconds: float) -> None:
        self.seconds[side] += seconds
        if not self._waiting[side.other]:  # a side that had nothing to do saves up no claim
            floor = self._share(side) * self._weights[side.other]
            self.seconds[side.other] = max(self.seconds[side.other], floor)
