"""Rows that every call asks for, read once a second at most."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

Row = TypeVar("Row")


class RecentRows(Generic[Row]):
    """A row by its key, as it was at most max_age_s ago; older ones take no memory. That there is none is not
    remembered.
    """

    def __init__(self, read: Callable[[str], Awaitable[Row | None]], max_age_s: float = 1.0):
        self._read, self._max_age_s = read, max_age_s
        self._rows: OrderedDict[str, tuple[float, Row]] = OrderedDict()  # the one read longest ago first

    def __len__(self) -> int:
        return len(self._rows)

    def forget(self, key: str) -> None:
        """Read it anew the next time."""
        self._rows.pop(key, None)

    async def get(self, key: str) -> Row | None:
        """The row; None: there is none."""
        known = self._rows.get(key)
        now = time.monotonic()
        if known is not None and now - known[0] <= self._max_age_s:
            return known[1]
        row = await self._read(key)
        self._rows.pop(key, None)
        while self._rows and now - next(iter(self._rows.values()))[0] > self._max_age_s:
            self._rows.popitem(last=False)
        if row is not None:
            self._rows[key] = (now, row)
        return row
