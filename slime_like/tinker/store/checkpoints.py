"""Saved weights and samplers, as execution reads and writes them."""

from __future__ import annotations

import time

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from slime_like.tinker.store.database import Database
from slime_like.tinker.store.tables import CheckpointRow, SamplerRow


async def find_checkpoint(database: Database, path: str) -> CheckpointRow | None:
    """The row of `tinker://…`, unless its time is over."""
    async with database.read() as session:
        row = await session.get(CheckpointRow, path)
    return None if row is None or (row.expires is not None and row.expires <= time.time()) else row


async def put_checkpoint(session: AsyncSession, row: CheckpointRow) -> str | None:
    """Write it, in the place of one of that path if there is one: the folder that is not needed any more."""
    old = await session.get(CheckpointRow, row.path)
    folder = None if old is None else old.folder
    if old is not None:
        await session.delete(old)
        await session.flush()
    session.add(row)
    return folder


async def put_sampler(session: AsyncSession, row: SamplerRow) -> None:
    """Write it, in the place of one of that id."""
    await session.merge(row)


async def expired_checkpoints(database: Database, now: float) -> list[str]:
    """Paths of those whose time is over."""
    query = select(CheckpointRow.path).where(CheckpointRow.expires <= now)
    async with database.read() as session:
        return list(await session.scalars(query))


async def remove_expired(session: AsyncSession, path: str, now: float) -> str | None:
    """Delete the row; the folder that is not needed any more. None: what is there now is another, still good."""
    row = await session.get(CheckpointRow, path)
    if row is None or row.expires is None or row.expires > now:
        return None
    await session.delete(row)
    return row.folder
