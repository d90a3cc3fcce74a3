"""Saved weights and samplers, as execution reads and writes them."""

from __future__ import annotations

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from slime_like.tinker.store.database import Database
from slime_like.tinker.store.tables import CheckpointRow, SamplerRow


async def find_checkpoint(database: Database, path: str) -> CheckpointRow | None:
    """The row of `tinker://…`."""
    async with database.read() as session:
        return await session.get(CheckpointRow, path)


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
    """Write it."""
    session.add(row)


async def remove_checkpoint(session: AsyncSession, path: str, tenant: str) -> str | None:
    """Delete a tenant's row; the folder that is not needed any more. None: the tenant has no such."""
    row = await session.get(CheckpointRow, path)
    if row is None or row.tenant != tenant:
        return None
    await session.delete(row)
    return row.folder


async def expired_checkpoints(database: Database, now: float) -> list[tuple[str, str]]:
    """(path, tenant) of those whose time is over."""
    query = select(CheckpointRow.path, CheckpointRow.tenant).where(CheckpointRow.expires <= now)
    async with database.read() as session:
        return [(path, tenant) for path, tenant in await session.execute(query)]
