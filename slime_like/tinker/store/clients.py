"""A client's sessions and samplers: how they begin, live and end. All is of one tenant; another's ids do not exist."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from typing import Any

from sqlalchemy import select
from sqlalchemy.exc import IntegrityError

from slime_like.tinker.errors import Refused
from slime_like.tinker.store.rows import Rows, is_text, missing, now, own
from slime_like.tinker.store.tables import CheckpointRow, ModelRow, SamplerRow, SessionRow

PREFIX = "tinker://"
#: What an id has between its session and its number.
_TRAIN, _SAMPLE = ":train:", ":sample:"
_FOLDERS = {"weights": "training", "sampler_weights": "sampler"}


def session_of(row_id: str) -> str:
    """The session that a model's or sampler's id begins with. Raises Refused (404) for what is no such id."""
    for middle in (_TRAIN, _SAMPLE):
        session_id, separator, _ = row_id.rpartition(middle)
        if separator:
            return session_id
    raise missing(row_id)


@dataclasses.dataclass(frozen=True)
class SavedPath:
    """`tinker://MODEL/weights/NAME` or `tinker://MODEL/sampler_weights/NAME`. kind: as CheckpointRow's."""

    model_id: str
    kind: str
    name: str


def read_path(path: str) -> SavedPath:
    """The parts of a path. Raises Refused (400) with its form."""
    model_id, _, rest = path.removeprefix(PREFIX).partition("/")
    folder, _, name = rest.partition("/")
    if not path.startswith(PREFIX) or not model_id or folder not in _FOLDERS or not name:
        raise Refused(
            f"{path[:200]!r} is no path of saved weights: tinker://MODEL/weights/NAME (save_state) or"
            " tinker://MODEL/sampler_weights/NAME (save_weights_for_sampler) is",
            status=400,
        )
    return SavedPath(model_id, _FOLDERS[folder], name)


async def begin_session(rows: Rows, session_id: str, tenant: str, fields: Mapping[str, Any]) -> None:
    """Write a client's session; a request that is repeated finds it there."""
    with contextlib.suppress(IntegrityError):  # the same request, at the same moment
        async with rows.write() as session:
            if await session.get(SessionRow, session_id) is None:
                row = SessionRow(id=session_id, tenant=tenant, created=now(), last_heartbeat=now(), **fields)
                session.add(row)
    async with rows.read() as session:
        await own(session, SessionRow, session_id, tenant)


async def beat(rows: Rows, session_id: str, tenant: str) -> None:
    """The client lives. Raises Refused: 404 without such a session, 410 once it is finished."""
    async with rows.write() as session:
        row = await own(session, SessionRow, session_id, tenant)
        _refuse_finished(row)
        row.last_heartbeat = now()


async def finish_session(rows: Rows, session_id: str, tenant: str, reason: str) -> None:
    """The client has ended; doing so again changes nothing."""
    async with rows.write() as session:
        row = await own(session, SessionRow, session_id, tenant)
        if row.finished is None:
            row.finished, row.finish_reason = now(), reason


async def check_session(rows: Rows, session_id: str, tenant: str) -> None:
    """Raises Refused: 404 without such a session, 410 once it is finished."""
    async with rows.read() as session:
        _refuse_finished(await own(session, SessionRow, session_id, tenant))


def _refuse_finished(row: SessionRow) -> None:
    if row.finished is not None:
        raise Refused(
            f"session {row.id!r} has ended ({row.finish_reason}); what was saved is there. Fix: a new ServiceClient",
            status=410,
        )


async def begin_sampler(rows: Rows, sampler_id: str, tenant: str, *, base_model: str, model_path: str | None) -> None:
    """Write what samples can be asked of: saved weights, or the base model; repeated, it finds it there.

    Raises Refused (404, 400) if there are no such weights, or they are for training only.
    """
    with contextlib.suppress(IntegrityError):  # the same request, at the same moment
        await _begin_sampler(rows, sampler_id, tenant, base_model, model_path)


async def _begin_sampler(rows: Rows, sampler_id: str, tenant: str, base_model: str, model_path: str | None) -> None:
    async with rows.write() as session:
        owner = await own(session, SessionRow, session_of(sampler_id), tenant)
        _refuse_finished(owner)
        if await session.get(SamplerRow, sampler_id) is not None:
            return
        folder = None
        if model_path is not None:
            checkpoint = await _readable(session, model_path, tenant)
            if checkpoint.kind != "sampler":
                raise Refused(f"{model_path[:300]!r} is for training; samplers take sampler_weights", status=400)
            model = await session.get(ModelRow, checkpoint.model_id)
            base_model, folder = model.base_model if model else base_model, checkpoint.folder
        session.add(
            SamplerRow(
                id=sampler_id,
                session_id=owner.id,
                tenant=tenant,
                base_model=base_model,
                model_path=model_path,
                folder=folder,
                created=now(),
            )
        )


async def get_sampler(rows: Rows, sampler_id: str, tenant: str) -> SamplerRow:
    """Raises Refused (404, or 410 with its session, or where newer ones have taken its place)."""
    async with rows.read() as session:
        row = await own(session, SamplerRow, sampler_id, tenant)
        _refuse_finished(await own(session, SessionRow, row.session_id, tenant))
        refuse_superseded(row)
        return row


def refuse_superseded(row: SamplerRow) -> None:
    """Raises Refused (410) where a sampler's weights are not kept any longer, and no newer ones may stand for them."""
    if row.superseded is not None and not row.is_inflight:
        raise Refused(
            f"sampler {row.id!r} was the weights of {row.model_id} at a moment that lies too many saves back: of a"
            " model's unnamed samplers the server keeps the last few (--max-ephemeral-samplers). Fix: the latest"
            " sampling client, save_weights_for_sampler with a name, or kind='inflight'",
            status=410,
        )


async def get_model(rows: Rows, model_id: str, tenant: str) -> ModelRow:
    """Raises Refused (404)."""
    async with rows.read() as session:
        return await own(session, ModelRow, model_id, tenant)


async def readable(rows: Rows, path: str, tenant: str) -> tuple[CheckpointRow, ModelRow]:
    """Saved weights that a tenant may use: its own, or public ones, and the model that they are of.

    Raises Refused (404) where there are none, or they have expired.
    """
    async with rows.read() as session:
        checkpoint = await _readable(session, path, tenant)
        model = await session.get(ModelRow, checkpoint.model_id)
        if model is None:
            raise missing(path)
        return checkpoint, model


async def is_own(rows: Rows, path: str, tenant: str) -> bool:
    """Whether a path is below a model of the tenant's, saved already or not."""
    async with rows.read() as session:
        row = await session.get(SessionRow, session_of(read_path(path).model_id))
        return row is not None and row.tenant == tenant


async def _readable(session: Any, path: str, tenant: str) -> CheckpointRow:
    row: CheckpointRow | None = await session.get(CheckpointRow, path) if is_text(path) else None
    if row is None or (row.expires is not None and row.expires <= now()) or (row.tenant != tenant and not row.public):
        raise missing(path)
    return row


async def latest_session(rows: Rows, tenant: str, tag: str) -> str | None:
    """A tenant's latest unfinished session of a tag that the server itself gives."""
    async with rows.read() as session:
        query = select(SessionRow).where(SessionRow.tenant == tenant, SessionRow.finished.is_(None))
        for row in await session.scalars(query.order_by(SessionRow.created.desc())):
            if tag in row.tags:
                return row.id
    return None
