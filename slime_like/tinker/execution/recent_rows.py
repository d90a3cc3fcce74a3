"""Rows that every call asks for, read once a second at most."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

Row = TypeVar("Row")

MOST = 10_000


class RecentRows(Generic[Row]):
    """A row by its key, as it was at most max_age_s ago. That there is none is not remembered."""

    def __init__(self, read: Callable[[str], Awaitable[Row | None]], max_age_s: float = 1.0):
        self._read, self._max_age_s = read, max_age_s
        self._rows: dict[str, tuple[float, Row]] = {}

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
        if len(self._rows) >= MOST:
            self._rows.clear()
        if row is None:
            self._rows.pop(key, None)
        else:
            self._rows[key] = (now, row)
        return row
