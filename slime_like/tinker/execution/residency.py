"""Which models the trainer holds, and how one comes back: its last snapshot, then the calls after it once more."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
import time
from collections.abc import Sequence

from slime_like.errors import RunError
from slime_like.records import PassResult, TenantPass
from slime_like.tinker.errors import BackendLost
from slime_like.tinker.execution.folders import Folders
from slime_like.tinker.execution.ordering import ModelQueue
from slime_like.tinker.execution.settings import ServiceSettings
from slime_like.tinker.protocols import TrainingBackend
from slime_like.tinker.records import AdamSettings, Call, Kind
from slime_like.tinker.store.bodies import unpack_call
from slime_like.tinker.store.database import Database
from slime_like.tinker.store.requests import move_snapshot, next_to_repeat

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class ResidencyCounts:
    """Since the start."""

    evictions: int = 0
    reloads: int = 0
    replays: int = 0  # calls that were done once more
    snapshots: int = 0
    losses: int = 0  # of the trainer


class Residency:
    """The models in the trainer, the one used longest ago first. Only the training lane calls this.

    A snapshot has weights and optimizer, which passes do not change, so one can be taken at any moment: it is of the
    last call that changed weights, and the passes after that are what is repeated.
    """

    def __init__(self, trainer: TrainingBackend, database: Database, folders: Folders, settings: ServiceSettings):
        self.trainer, self._database, self.folders, self._settings = trainer, database, folders, settings
        self._resident: collections.OrderedDict[str, ModelQueue] = collections.OrderedDict()
        #: Of models whose answers are being written, the last one's task. Until it is done, a snapshot would be of
        #: another call than it says.
        self.writing: dict[str, asyncio.Task] = {}
        self.counts = ResidencyCounts()

    def __contains__(self, model_id: str) -> bool:
        return model_id in self._resident

    def __len__(self) -> int:
        return len(self._resident)

    @property
    def models(self) -> list[ModelQueue]:
        """Those that the trainer holds."""
        return list(self._resident.values())

    async def ensure(self, model: ModelQueue, keep: frozenset[str] = frozenset()) -> None:
        """The trainer holds the model, with every call of it that has its answer. keep: what is not sent away for it.

        Raises RunError where its state cannot be had, BackendLost as the trainer does.
        """
        model.last_used = time.monotonic()
        if model.model_id in self._resident:
            self._resident.move_to_end(model.model_id)
            return
        await self.written(model)  # what brings it back is read from there
        await self.make_room(model, keep)
        await self.trainer.create(model.spec)
        try:
            await self._bring_back(model)
        except BackendLost:
            raise
        except Exception:
            await self.trainer.release(model.model_id)
            raise
        self._resident[model.model_id] = model
        self.counts.reloads += 1

    async def make_room(self, model: ModelQueue, keep: frozenset[str] = frozenset()) -> None:
        """The model has a place: of those for all, and of the fewer ones for whole models where it is one."""
        limits = [(self.models, self._settings.max_adapters_resident)]
        if model.is_whole:
            whole = [other for other in self.models if other.is_whole]
            limits.insert(0, (whole, self._settings.max_whole_models_resident))
        for among, most in limits:
            # The lane asks for no more at once than there are places.
            there = [other for other in among if other.model_id in self._resident]
            free = [other for other in there if other.model_id not in keep]
            for oldest in free[: max(0, len(there) + 1 - most)]:
                await self.send_away(oldest)
                self.counts.evictions += 1

    def put(self, model: ModelQueue) -> None:
        """The trainer has created it."""
        model.last_used = time.monotonic()
        self._resident[model.model_id] = model

    async def send_away(self, model: ModelQueue) -> None:
        """Save it and free its place."""
        await self.snapshot(model)
        await self.forget(model)

    def abandon(self, model_ids: Sequence[str]) -> None:
        """What the trainer has of them is not known, and never saved."""
        for model_id in model_ids:
            self._resident.pop(model_id, None)

    async def written(self, model: ModelQueue) -> None:
        """Every answer of it is on disk, once this returns."""
        task = self.writing.get(model.model_id)
        if task is not None:
            await asyncio.shield(task)

    async def forget(self, model: ModelQueue) -> None:
        """Free its place, without its state: it comes back from its last snapshot."""
        await self.written(model)
        if self._resident.pop(model.model_id, None) is not None:
            await self.trainer.release(model.model_id)

    def lost(self) -> None:
        """The trainer holds nothing any more."""
        self._resident.clear()
        self.counts.losses += 1

    async def snapshot(self, model: ModelQueue) -> None:
        """Save what has changed since the last one; the calls that it has need no bodies any more."""
        await self.written(model)
        seq = model.stepped_seq
        if seq == model.snapshot_seq:
            return
        begun = time.monotonic()
        where = await self.write_state(model, seq)
        model.snapshot_took_s = time.monotonic() - begun
        async with self._database.write() as session:
            await move_snapshot(session, model.model_id, where, seq)
        await self.moved(model, where, seq)

    async def write_state(self, model: ModelQueue, seq: int) -> str:
        """A new snapshot's folder, which no row knows yet."""
        folder = self.folders.new()
        await self.trainer.save_state(model.model_id, folder, optimizer=True)
        where, _ = await self.folders.publish(folder, model.model_id, f"snapshot-{seq}")
        return where

    async def moved(self, model: ModelQueue, where: str, seq: int) -> None:
        """The database has the new snapshot: the one before is not needed."""
        model.snapshot, model.snapshot_seq = where, seq
        model.steps_since_snapshot, model.snapshot_time = 0, time.monotonic()
        self.counts.snapshots += 1
        await self.folders.remove_others(where)

    async def remove_state(self, folder: str | None) -> None:
        """Delete all that a model has left, whose last snapshot was `folder`."""
        if folder is not None:
            await self.folders.remove(folder.rpartition("/")[0])

    def is_due(self, model: ModelQueue) -> bool:
        """Enough steps, or time, since the last snapshot; and not so soon that saving is most of what is done."""
        if model.stepped_seq == model.snapshot_seq:
            return False
        age_s = time.monotonic() - model.snapshot_time
        if age_s * self._settings.snapshot_share < model.snapshot_took_s:
            return False
        return (
            model.steps_since_snapshot >= self._settings.snapshot_every_steps
            or age_s >= self._settings.snapshot_every_s
        )

    async def _bring_back(self, model: ModelQueue) -> None:
        if model.snapshot is not None:
            local = await self.folders.local(model.snapshot)
            await self.trainer.load_state(model.model_id, local, optimizer=True)
        model.stepped_seq, model.steps_since_snapshot = model.snapshot_seq, 0
        seq = model.snapshot_seq
        while (next_call := await next_to_repeat(self._database, model.model_id, seq)) is not None:
            seq, body = next_call
            await self._repeat(model, unpack_call(body))
            self.counts.replays += 1

    async def _repeat(self, model: ModelQueue, call: Call) -> None:
        if call.kind is Kind.OPTIM_STEP:
            await self.trainer.optim_step(model.model_id, AdamSettings(**call.fields["adam"]))
            model.stepped_seq = call.seq_id or 0
            model.steps_since_snapshot += 1
            return
        (answer,) = await self.trainer.run_passes([tenant_pass(call)])
        if not isinstance(answer, PassResult):
            raise RunError(
                f"{model.model_id} could not be brought back: its call {call.seq_id}, which was answered before, fails "
                f"now: {answer}"
            )


def tenant_pass(call: Call) -> TenantPass:
    """What the trainer is asked for a forward or forward_backward."""
    assert call.model_id is not None, "a pass names its model"
    return TenantPass(
        weights=call.model_id,
        rows=tuple(call.rows),
        loss=call.fields["loss"],
        config=dict(call.fields.get("config") or {}),
        forward_only=call.kind is Kind.FORWARD,
    )
