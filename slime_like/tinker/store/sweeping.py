"""What time has done: sessions that went silent or were finished, answers that nobody asks for any more."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import ColumnElement, delete, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from slime_like.tinker.store.database import Database
from slime_like.tinker.store.requests import QUEUED
from slime_like.tinker.store.tables import ModelRow, RequestRow, SamplerRow, SessionRow


async def silent_sessions(database: Database, session_ids: Collection[str], before: float) -> set[str]:
    """Which of them were not finished, and had their last heartbeat before that time."""
    query = select(SessionRow.id).where(SessionRow.finished.is_(None), SessionRow.last_heartbeat < before)
    query = query.where(SessionRow.id.in_(session_ids))
    async with database.read() as session:
        return set(await session.scalars(query))


async def finished_models(database: Database) -> list[tuple[str, str, str | None]]:
    """(id, session_id, snapshot) of models that still take calls, whose session was finished."""
    query = select(ModelRow.id, ModelRow.session_id, ModelRow.snapshot).join(SessionRow)
    query = query.where(SessionRow.finished.is_not(None), ModelRow.released.is_(None))
    async with database.read() as session:
        return [(model_id, session_id, folder) for model_id, session_id, folder in await session.execute(query)]


async def finished_samplers(database: Database, root: str) -> list[tuple[str, str, str]]:
    """(id, session_id, folder) of ephemeral samplers, whose files are below root, of sessions that were finished."""
    query = select(SamplerRow.id, SamplerRow.session_id, SamplerRow.folder).join(SessionRow)
    query = query.where(SessionRow.finished.is_not(None), _is_below(root))
    async with database.read() as session:
        return [(sampler, owner, folder) for sampler, owner, folder in await session.execute(query) if folder]


def _is_below(root: str) -> ColumnElement[bool]:
    return SamplerRow.folder.startswith(f"{root}/", autoescape=True)


async def samplers_beyond(database: Database, root: str, keep: int) -> list[str]:
    """Ephemeral samplers whose model has `keep` newer ones, oldest first."""
    newest_first = (SamplerRow.created.desc(), SamplerRow.id.desc())
    place = func.row_number().over(partition_by=SamplerRow.model_id, order_by=newest_first).label("place")
    ranked = select(SamplerRow.id, SamplerRow.created, place).where(
        SamplerRow.model_id.is_not(None), SamplerRow.superseded.is_(None), _is_below(root)
    )
    inner = ranked.subquery()
    query = select(inner.c.id).where(inner.c.place > keep).order_by(inner.c.created)
    async with database.read() as session:
        return list(await session.scalars(query))


async def supersede_sampler(session: AsyncSession, sampler_id: str, now: float) -> None:
    """Newer ones have taken its place."""
    await session.execute(update(SamplerRow).where(SamplerRow.id == sampler_id).values(superseded=now))


async def superseded_folders(database: Database, root: str) -> list[tuple[str, str]]:
    """(id, folder) of superseded samplers whose files are still there."""
    query = select(SamplerRow.id, SamplerRow.folder).where(SamplerRow.superseded.is_not(None), _is_below(root))
    async with database.read() as session:
        return [(sampler, folder) for sampler, folder in await session.execute(query) if folder]


async def forget_folder(session: AsyncSession, sampler_id: str) -> None:
    """Its files are not there any more."""
    await session.execute(update(SamplerRow).where(SamplerRow.id == sampler_id).values(folder=""))


async def sessions_of_samplers(database: Database, sampler_ids: Collection[str]) -> dict[str, str]:
    """The session of each."""
    query = select(SamplerRow.id, SamplerRow.session_id).where(SamplerRow.id.in_(sampler_ids))
    async with database.read() as session:
        rows = await session.execute(query)
        return dict(rows.tuples().all())


async def ended_sessions(database: Database, session_ids: Collection[str]) -> set[str]:
    """Which of them were finished."""
    query = select(SessionRow.id).where(SessionRow.id.in_(session_ids), SessionRow.finished.is_not(None))
    async with database.read() as session:
        return set(await session.scalars(query))


async def remove_sampler(session: AsyncSession, sampler_id: str) -> None:
    """Delete its row."""
    await session.execute(delete(SamplerRow).where(SamplerRow.id == sampler_id))


async def forget_answers(session: AsyncSession, before: float) -> None:
    """Delete requests that ended before that time, but for what a model's state is still brought back with."""
    ended = (RequestRow.state != QUEUED, RequestRow.finished < before)
    await session.execute(delete(RequestRow).where(*ended, RequestRow.body.is_(None)))
    kept = update(RequestRow).where(*ended, RequestRow.result.is_not(None))
    await session.execute(kept.values(result=None, category="server", error="the answer is not kept any longer"))
