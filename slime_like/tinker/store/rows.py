"""Where rows are read and written: what the API asks of a database."""

from __future__ import annotations

import time
from contextlib import AbstractAsyncContextManager
from typing import Any, Protocol, TypeVar

from sqlalchemy.ext.asyncio import AsyncSession

from slime_like.tinker.errors import Refused

Row = TypeVar("Row")


class Rows(Protocol):
    """Transactions on the tables (store/tables.py)."""

    def read(self) -> AbstractAsyncContextManager[AsyncSession]:
        """One moment's state."""

    def write(self) -> AbstractAsyncContextManager[AsyncSession]:
        """One transaction: on disk when its block has ended, or undone where it raised."""


async def own(session: AsyncSession, table: type[Row], row_id: str, tenant: str) -> Row:
    """A tenant's row. Raises Refused (404) where there is none, or it is another's: nobody can tell which."""
    row: Any = await session.get(table, row_id) if is_text(row_id) else None
    if row is None or row.tenant != tenant:
        raise missing(row_id)
    return row


def is_text(row_id: str) -> bool:
    """Whether a database can be asked for it: PostgreSQL's texts have no NUL."""
    return "\0" not in row_id


def missing(row_id: str) -> Refused:
    """What is answered for an id that a tenant has nothing under."""
    return Refused(f"there is no {row_id[:300]!r}", status=404)


def now() -> float:
    """Seconds since the epoch, as the tables have them."""
    return time.time()
