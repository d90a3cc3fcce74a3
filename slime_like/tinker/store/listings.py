"""What a tenant has: its runs, saved weights and sessions, and what it may change of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from sqlalchemy import func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from slime_like.tinker.store.rows import Rows, missing, now, own
from slime_like.tinker.store.tables import CheckpointRow, ModelRow, RequestRow, SamplerRow, SessionRow


@dataclasses.dataclass(frozen=True)
class Run:
    """A model, with the latest that was saved of it."""

    model: ModelRow
    last: CheckpointRow | None
    last_sampler: CheckpointRow | None


@dataclasses.dataclass(frozen=True)
class Listing:
    """Some of `total` rows."""

    rows: Sequence[Any]
    total: int


async def list_runs(rows: Rows, tenant: str, *, limit: int, offset: int) -> Listing:
    """Run of each model, newest first."""
    async with rows.read() as session:
        query = select(ModelRow).where(ModelRow.tenant == tenant)
        total = await session.scalar(select(func.count()).select_from(query.subquery()))
        page = query.order_by(ModelRow.created.desc(), ModelRow.id).limit(limit).offset(offset)
        models = list(await session.scalars(page))
        return Listing(await _runs(session, models), total or 0)


async def get_run(rows: Rows, model_id: str, tenant: str) -> Run:
    """Raises Refused (404)."""
    async with rows.read() as session:
        model = await own(session, ModelRow, model_id, tenant)
        return (await _runs(session, [model]))[0]


async def _runs(session: AsyncSession, models: Sequence[ModelRow]) -> list[Run]:
    latest: dict[tuple[str, str], CheckpointRow] = {}
    query = _saved().where(CheckpointRow.model_id.in_([model.id for model in models])).order_by(CheckpointRow.created)
    for row in await session.scalars(query):
        latest[row.model_id, row.kind] = row
    return [Run(m, latest.get((m.id, "training")), latest.get((m.id, "sampler"))) for m in models]


def _saved() -> Any:
    """Saved weights that have not expired."""
    return select(CheckpointRow).where(or_(CheckpointRow.expires.is_(None), CheckpointRow.expires > now()))


async def list_checkpoints(
    rows: Rows, tenant: str, *, model_id: str | None = None, limit: int | None = None, offset: int = 0
) -> Listing:
    """CheckpointRow of a run (Refused, 404, without it), or of all that a tenant has; newest first."""
    async with rows.read() as session:
        query = _saved().where(CheckpointRow.tenant == tenant)
        if model_id is not None:
            await own(session, ModelRow, model_id, tenant)
            query = query.where(CheckpointRow.model_id == model_id)
        total = await session.scalar(select(func.count()).select_from(query.subquery()))
        page = query.order_by(CheckpointRow.created.desc(), CheckpointRow.path).limit(limit).offset(offset)
        return Listing(list(await session.scalars(page)), total or 0)


async def set_public(rows: Rows, path: str, tenant: str, *, public: bool) -> None:
    """Whether other tenants may use it. Raises Refused (404)."""
    async with rows.write() as session:
        (await _own_saved(session, path, tenant)).public = public


async def set_time_to_live(rows: Rows, path: str, tenant: str, seconds: int | None) -> None:
    """From now on; None: for ever. Raises Refused (404)."""
    async with rows.write() as session:
        row = await _own_saved(session, path, tenant)
        row.expires = None if seconds is None else now() + seconds


async def delete_checkpoint(rows: Rows, path: str, tenant: str) -> None:
    """It is gone for everybody at once; its files go with the next sweep of what has expired. Raises Refused (404)."""
    async with rows.write() as session:
        (await _own_saved(session, path, tenant)).expires = now()


async def _own_saved(session: AsyncSession, path: str, tenant: str) -> CheckpointRow:
    row = await own(session, CheckpointRow, path, tenant)
    if row.expires is not None and row.expires <= now():
        raise missing(path)
    return row


async def list_sessions(rows: Rows, tenant: str, *, limit: int, offset: int) -> Listing:
    """SessionRow, newest first."""
    async with rows.read() as session:
        query = select(SessionRow).where(SessionRow.tenant == tenant)
        total = await session.scalar(select(func.count()).select_from(query.subquery()))
        page = query.order_by(SessionRow.created.desc(), SessionRow.id).limit(limit).offset(offset)
        return Listing(list(await session.scalars(page)), total or 0)


async def session_parts(rows: Rows, session_id: str, tenant: str) -> tuple[SessionRow, list[str], list[str]]:
    """A session, its models' ids and its samplers'. Raises Refused (404)."""
    async with rows.read() as session:
        row = await own(session, SessionRow, session_id, tenant)
        models = await session.scalars(select(ModelRow.id).where(ModelRow.session_id == row.id))
        samplers = await session.scalars(select(SamplerRow.id).where(SamplerRow.session_id == row.id))
        return row, sorted(models), sorted(samplers)


async def queue_lengths(rows: Rows, tenant: str | None = None) -> dict[tuple[str, str], int]:
    """(kind, state) -> how many requests, of a tenant or of all."""
    query = select(RequestRow.kind, RequestRow.state, func.count()).group_by(RequestRow.kind, RequestRow.state)
    async with rows.read() as session:
        counted = await session.execute(query if tenant is None else query.where(RequestRow.tenant == tenant))
        return {(kind, state): number for kind, state, number in counted}


async def live_counts(rows: Rows) -> dict[str, int]:
    """How many sessions and models have not ended, and how much is saved."""
    async with rows.read() as session:
        return {
            "sessions": await session.scalar(select(func.count()).where(SessionRow.finished.is_(None))) or 0,
            "models": await session.scalar(select(func.count()).where(ModelRow.released.is_(None))) or 0,
            "checkpoints": await session.scalar(select(func.count()).select_from(CheckpointRow)) or 0,
            "checkpoint_bytes": await session.scalar(select(func.sum(CheckpointRow.size_bytes))) or 0,
        }
