"""What each kind of training call does, but for passes."""

from __future__ import annotations

import dataclasses
import logging
import re
import time
from collections.abc import Awaitable, Callable
from typing import Any

from slime_like.errors import RunError
from slime_like.tinker.execution.entries import Entry
from slime_like.tinker.execution.folders import Folders
from slime_like.tinker.execution.ordering import ModelQueue
from slime_like.tinker.execution.residency import Residency
from slime_like.tinker.protocols import TrainingBackend
from slime_like.tinker.records import AdamSettings, Kind
from slime_like.tinker.store.checkpoints import find_checkpoint, put_checkpoint, put_sampler
from slime_like.tinker.store.database import Database
from slime_like.tinker.store.requests import find_sampler, move_snapshot, release_model
from slime_like.tinker.store.tables import CheckpointRow, SamplerRow

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[\w.+=@,-]{1,200}")


@dataclasses.dataclass(kw_only=True)
class Done:
    """What a verb did. also: written in the answer's transaction; afterwards: once that is on disk."""

    result: dict[str, Any]
    also: Callable[[Any], Awaitable[None]] | None = None
    afterwards: Callable[[], Awaitable[None]] | None = None
    num_steps: int = 0


class TrainingVerbs:
    """Each verb, of a model that the trainer holds. Raises RunError for what the client did wrong."""

    def __init__(self, trainer: TrainingBackend, residency: Residency, weights: Folders, database: Database):
        self._trainer, self._residency, self._weights, self._database = trainer, residency, weights, database
        self._verbs: dict[Kind, Callable[[ModelQueue, Entry], Awaitable[Done]]] = {
            Kind.CREATE_MODEL: self._create,
            Kind.CREATE_FROM_STATE: self._create_from_state,
            Kind.OPTIM_STEP: self._optim_step,
            Kind.SAVE_WEIGHTS: self._save_weights,
            Kind.SAVE_FOR_SAMPLER: self._save_for_sampler,
            Kind.LOAD_WEIGHTS: self._load_weights,
            Kind.UNLOAD_MODEL: self._unload,
        }

    async def run(self, model: ModelQueue, entry: Entry) -> Done:
        """Do what the call asks for."""
        if entry.kind not in (Kind.CREATE_MODEL, Kind.CREATE_FROM_STATE, Kind.UNLOAD_MODEL):
            await self._residency.ensure(model)
        return await self._verbs[entry.kind](model, entry)

    async def _create(self, model: ModelQueue, entry: Entry) -> Done:
        await self._residency.make_room(model)
        await self._trainer.create(model.spec)
        self._residency.put(model)
        notice = model.spec.notice
        if notice:
            logger.info("%s: %s", model.model_id, notice)
        return Done(result={"model_id": model.model_id} | ({"notice": notice} if notice else {}))

    async def _create_from_state(self, model: ModelQueue, entry: Entry) -> Done:
        await self._create(model, entry)
        return await self._load_weights(model, entry)

    async def _load_weights(self, model: ModelQueue, entry: Entry) -> Done:
        path, optimizer = str(entry.call.fields["path"]), bool(entry.call.fields.get("optimizer"))
        row = await find_checkpoint(self._database, path)
        if row is None or not (row.tenant == entry.tenant or row.public):
            raise RunError(f"{path} is not there. It may have been deleted, or its time is over.")
        if row.kind != "training":
            raise RunError(f"{path} is for samplers. Fix: load what save_state gave, .../weights/NAME.")
        if optimizer and not row.has_optimizer:
            raise RunError(f"{path} has no optimizer's state. Fix: load it without.")
        local = await self._weights.local(row.folder)
        await self._trainer.load_state(model.model_id, local, optimizer=optimizer)
        # A snapshot at once: the checkpoint may be deleted before the next one.
        where = await self._residency.write_state(model, entry.seq_id)

        async def also(session: Any) -> None:
            await move_snapshot(session, model.model_id, where, entry.seq_id)

        async def afterwards() -> None:
            model.stepped_seq = entry.seq_id
            await self._residency.moved(model, where, entry.seq_id)

        return Done(result={"path": path, "model_id": model.model_id}, also=also, afterwards=afterwards)

    async def _optim_step(self, model: ModelQueue, entry: Entry) -> Done:
        adam = AdamSettings(**entry.call.fields["adam"])
        metrics = await self._trainer.optim_step(model.model_id, adam)

        async def afterwards() -> None:
            model.stepped_seq = entry.seq_id
            model.steps_since_snapshot += 1

        return Done(result={"metrics": dict(metrics)}, afterwards=afterwards, num_steps=1)

    async def _save_weights(self, model: ModelQueue, entry: Entry) -> Done:
        name = await self._free_name(model, entry, "weights")
        folder = self._weights.new()
        await self._trainer.save_state(model.model_id, folder, optimizer=True)
        return await self._checkpoint(model, entry, folder, name=name, kind="training")

    async def _save_for_sampler(self, model: ModelQueue, entry: Entry) -> Done:
        sampler_id = entry.call.fields.get("sampler_id")
        if sampler_id is None:
            name = await self._free_name(model, entry, "sampler_weights")
            folder = self._weights.new()
            await self._trainer.save_sampler(model.model_id, folder)
            return await self._checkpoint(model, entry, folder, name=name, kind="sampler")
        if await find_sampler(self._database, sampler_id) is not None:
            raise RunError(f"there is a sampler {sampler_id} already.")
        folder = self._residency.folders.new()
        await self._trainer.save_sampler(model.model_id, folder)
        where, _ = await self._residency.folders.publish(folder, "samplers", sampler_id)
        row = SamplerRow(
            id=sampler_id,
            session_id=entry.call.session_id,
            tenant=entry.tenant,
            base_model=model.spec.base_model,
            folder=where,
            created=time.time(),
            model_id=model.model_id,
            is_inflight=entry.call.fields.get("sampler_kind") == "inflight",
        )

        async def also(session: Any) -> None:
            await put_sampler(session, row)

        return Done(result={"sampler_id": sampler_id}, also=also)

    async def _free_name(self, model: ModelQueue, entry: Entry, side: str) -> str:
        name = entry.call.fields.get("name") or f"{entry.seq_id:06d}"
        if not _NAME.fullmatch(name) or not name.strip("."):
            raise RunError(
                f"{name!r} is no name for weights. Fix: letters, digits and any of . _ - + = @ , (up to 200)."
            )
        await self._residency.written(model)  # one of that name may be on its way
        path = f"tinker://{model.model_id}/{side}/{name}"
        if not entry.call.fields.get("overwrite") and await find_checkpoint(self._database, path) is not None:
            raise RunError(f"{path} is there already. Fix: another name, or overwrite=True.")
        return name

    async def _checkpoint(self, model: ModelQueue, entry: Entry, folder: str, *, name: str, kind: str) -> Done:
        side = {"training": "weights", "sampler": "sampler_weights"}[kind]
        # Of its own for each call, so that what is overwritten is whole until the row says otherwise.
        where, size = await self._weights.publish(folder, model.model_id, side, f"{name}-{entry.request_id[-12:]}")
        fields, now = entry.call.fields, time.time()
        ttl_s = fields.get("ttl_seconds")
        row = CheckpointRow(
            path=f"tinker://{model.model_id}/{side}/{name}",
            model_id=model.model_id,
            tenant=entry.tenant,
            kind=kind,
            name=name,
            folder=where,
            size_bytes=size,
            created=now,
            expires=None if ttl_s is None else now + ttl_s,
            public=False,
            has_optimizer=kind == "training",
            user_metadata=dict(fields.get("user_metadata") or {}),
        )
        before: list[str] = []

        async def also(session: Any) -> None:
            replaced = await put_checkpoint(session, row)
            before.extend([replaced] if replaced not in (None, where) else [])

        async def afterwards() -> None:
            for old in before:
                await self._weights.remove(old)

        return Done(result={"path": row.path, "size_bytes": size}, also=also, afterwards=afterwards)

    async def _unload(self, model: ModelQueue, entry: Entry) -> Done:
        await self._residency.forget(model)

        async def also(session: Any) -> None:
            await release_model(session, model.model_id)

        async def afterwards() -> None:
            await self._residency.remove_state(model.snapshot)

        return Done(result={"model_id": model.model_id}, also=also, afterwards=afterwards)
