"""Requests and models, as execution reads and writes them. `session` is a transaction of Database.write or .read."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import sqlalchemy
from sqlalchemy import delete, func, select, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession

from slime_like.tinker.errors import Refused
from slime_like.tinker.records import Kind, ModelSpec
from slime_like.tinker.store.database import Database
from slime_like.tinker.store.tables import ModelRow, RequestRow, SamplerRow, SessionRow

QUEUED, DONE, FAILED, CANCELLED = "queued", "done", "failed", "cancelled"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ending:
    """What is written of a request that has ended. keep_body: until a snapshot has what it did to its model."""

    request_id: str
    state: str
    result: bytes | None = None
    category: str | None = None
    error: str | None = None
    keep_body: bool = False


async def add_request(database: Database, row: RequestRow, model: ModelRow | None = None) -> tuple[str, str, bool]:
    """Write a request (and the model that it creates): its id, kind and whether it is new.

    The same (model_id, seq_id) or (sampler_id, seq_id) again: those of the first.
    """
    try:
        async with database.write() as session:
            if model is not None:
                known = await _same_request(session, row)
                if known is not None:
                    return known.id, known.kind, False
                session.add(model)
                session.add(row)
            elif not await _insert_new(session, row):
                known = await _same_request(session, row)
                return known.id, known.kind, False
        return row.id, row.kind, True
    except IntegrityError:  # PostgreSQL, the same creation in two transactions at once; or there is no such session
        async with database.read() as session:
            known = await _same_request(session, row)
        if known is None:
            what = row.model_id or row.sampler_id
            raise Refused(f"{what} is there already, or its session is not there.", status=400) from None
        return known.id, known.kind, False


async def _insert_new(session: AsyncSession, row: RequestRow) -> bool:
    """Write it unless its (model_id, seq_id) or (sampler_id, seq_id) is there: one statement, as calls are many."""
    insert = postgresql.insert if session.get_bind().dialect.name == "postgresql" else sqlite.insert
    values = {column.key: getattr(row, column.key) for column in sqlalchemy.inspect(RequestRow).column_attrs}
    statement = insert(RequestRow).values(**values).on_conflict_do_nothing().returning(RequestRow.id)
    return await session.scalar(statement) is not None


async def _same_request(session: AsyncSession, row: RequestRow) -> Any:
    if row.seq_id is None:
        return None
    columns = select(RequestRow.id, RequestRow.kind).where(RequestRow.seq_id == row.seq_id)
    if row.model_id is not None:
        return (await session.execute(columns.where(RequestRow.model_id == row.model_id))).first()
    return (await session.execute(columns.where(RequestRow.sampler_id == row.sampler_id))).first()


async def find_request(database: Database, request_id: str) -> RequestRow | None:
    """The whole row, but for its body."""
    async with database.read() as session:
        columns = (RequestRow.kind, RequestRow.tenant, RequestRow.state, RequestRow.result)
        query = select(*columns, RequestRow.category, RequestRow.error).where(RequestRow.id == request_id)
        row = (await session.execute(query)).first()
    return None if row is None else RequestRow(id=request_id, **row._mapping)


async def end_requests(session: AsyncSession, endings: Sequence[Ending]) -> None:
    """Write what became of them; of one that has ended already, nothing."""
    now = time.time()
    for ending in endings:
        values: dict[str, Any] = {"state": ending.state, "finished": now, "result": ending.result}
        values |= {"category": ending.category, "error": None if ending.error is None else ending.error[:4096]}
        if not ending.keep_body:
            values["body"] = None
        query = update(RequestRow).where(RequestRow.id == ending.request_id, RequestRow.state == QUEUED)
        await session.execute(query.values(**values))


async def advance_model(session: AsyncSession, model_id: str, done_seq: int, *, num_steps: int = 0) -> None:
    """Every call of the model up to done_seq has its answer, num_steps optim steps among the new ones."""
    values = {"done_seq": done_seq, "last_request": time.time(), "num_steps": ModelRow.num_steps + num_steps}
    await session.execute(update(ModelRow).where(ModelRow.id == model_id).values(**values))


async def move_snapshot(session: AsyncSession, model_id: str, folder: str | None, seq: int) -> None:
    """The model's state is in `folder` now, with every call up to seq: their bodies are not needed any more."""
    query = update(ModelRow).where(ModelRow.id == model_id)
    await session.execute(query.values(snapshot=folder, snapshot_seq=seq))
    bodies = update(RequestRow).where(
        RequestRow.model_id == model_id,
        RequestRow.state != QUEUED,
        RequestRow.seq_id <= seq,
        RequestRow.body.is_not(None),
    )
    await session.execute(bodies.values(body=None))


async def next_to_repeat(database: Database, model_id: str, after_seq: int) -> tuple[int, bytes] | None:
    """(seq_id, body) of the first call after after_seq that changed the model; None: there is none."""
    kinds = (Kind.FORWARD_BACKWARD, Kind.OPTIM_STEP)
    query = select(RequestRow.seq_id, RequestRow.body).where(
        RequestRow.model_id == model_id,
        RequestRow.seq_id > after_seq,
        RequestRow.state == DONE,
        RequestRow.kind.in_(kinds),
    )
    async with database.read() as session:
        row = (await session.execute(query.order_by(RequestRow.seq_id).limit(1))).first()
    return None if row is None else (row.seq_id, row.body)


async def queued_requests(database: Database) -> list[tuple[str, bytes]]:
    """(id, body) of all that have no answer, oldest first."""
    query = select(RequestRow.id, RequestRow.body).where(RequestRow.state == QUEUED).order_by(RequestRow.created)
    async with database.read() as session:
        return [(request_id, body) for request_id, body in await session.execute(query) if body is not None]


async def last_seq(database: Database, model_id: str) -> int:
    """The highest seq_id that a model's requests have; -1: it has none."""
    async with database.read() as session:
        query = select(func.max(RequestRow.seq_id)).where(RequestRow.model_id == model_id)
        highest = (await session.execute(query)).scalar()
    return -1 if highest is None else highest


async def find_model(database: Database, model_id: str) -> ModelRow | None:
    """The model's row."""
    async with database.read() as session:
        return await session.get(ModelRow, model_id)


async def find_sampler(database: Database, sampler_id: str) -> SamplerRow | None:
    """The sampler's row."""
    async with database.read() as session:
        return await session.get(SamplerRow, sampler_id)


async def newest_inflight(database: Database, model_id: str) -> SamplerRow | None:
    """The latest of a model's samplers that follow its weights."""
    query = select(SamplerRow).where(SamplerRow.model_id == model_id, SamplerRow.is_inflight)
    async with database.read() as session:
        return await session.scalar(query.order_by(SamplerRow.created.desc(), SamplerRow.id.desc()).limit(1))


async def find_session(database: Database, session_id: str) -> SessionRow | None:
    """The session's row."""
    async with database.read() as session:
        return await session.get(SessionRow, session_id)


async def forget_model(session: AsyncSession, model_id: str) -> None:
    """A model that could not be created is none; its requests stay."""
    await session.execute(delete(ModelRow).where(ModelRow.id == model_id))


async def release_model(session: AsyncSession, model_id: str) -> None:
    """The model takes no more calls."""
    query = update(ModelRow).where(ModelRow.id == model_id)
    await session.execute(query.values(released=time.time(), snapshot=None))


def new_model(spec: ModelSpec, session_id: str, user_metadata: dict[str, Any]) -> ModelRow:
    """The row of a model that is to be created."""
    now = time.time()
    return ModelRow(
        id=spec.model_id,
        session_id=session_id,
        tenant=spec.tenant,
        base_model=spec.base_model,
        lora_rank=spec.lora_rank,
        spec=dataclasses.asdict(spec),
        created=now,
        last_request=now,
        snapshot_seq=0,
        done_seq=-1,
        num_steps=0,
        user_metadata=user_metadata,
    )
