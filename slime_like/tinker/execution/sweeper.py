"""What time does: calls that never come, clients that went away, weights whose time is over."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator

from slime_like.tinker.errors import BackendLost
from slime_like.tinker.execution.call_book import CallBook
from slime_like.tinker.execution.folders import Folders
from slime_like.tinker.execution.registry import ModelRegistry
from slime_like.tinker.execution.residency import Residency
from slime_like.tinker.execution.sampling_lane import SamplingLane
from slime_like.tinker.execution.settings import ServiceSettings
from slime_like.tinker.execution.training_lane import TrainingLane
from slime_like.tinker.store import checkpoints, sweeping
from slime_like.tinker.store.database import Database
from slime_like.tinker.store.requests import release_model

logger = logging.getLogger(__name__)


class Sweeper:
    """Looks every sweep_every_s. Uses the trainer only while the training lane does not."""

    def __init__(
        self,
        database: Database,
        book: CallBook,
        registry: ModelRegistry,
        residency: Residency,
        training: TrainingLane,
        settings: ServiceSettings,
    ):
        self._database, self._book, self._registry = database, book, registry
        self._residency, self._training, self._settings = residency, training, settings
        self._gaps: dict[str, tuple[int, float]] = {}  # model -> (the seq_id that is missing, since when)
        self.sampling: SamplingLane | None = None
        self.weights: Folders | None = None

    async def run(self) -> None:
        """Sweep until cancelled."""
        while True:
            await asyncio.sleep(self._settings.sweep_every_s)
            for part in (
                self.terms, self.gaps, self.silent_sessions, self.finished_sessions, self.superseded_samplers,
                self.expired, self.idle_models,
            ):  # fmt: skip
                try:
                    await part()
                except Exception:  # the next sweep tries again
                    logger.exception("sweep: %s failed", part.__name__)

    async def terms(self) -> None:
        """Take up what the keys' command has written of tenants."""
        await self._book.terms.refresh()

    async def gaps(self) -> None:
        """Fail calls that have waited too long for the call before them."""
        now = time.monotonic()
        seen: dict[str, tuple[int, float]] = {}
        for model in list(self._registry.models.values()):
            missing = model.missing()
            if missing is None:
                continue
            known, since = self._gaps.get(model.model_id, (missing, now))
            seen[model.model_id] = (missing, since if known == missing else now)
            if known == missing and now - since >= self._settings.gap_timeout_s:
                await self._training.give_up(model, missing)
                del seen[model.model_id]
        self._gaps = seen

    async def silent_sessions(self) -> None:
        """Save and send away the models and samplers of clients that went silent; a late call brings them back."""
        owners = await self._owners()
        before = time.time() - self._settings.session_timeout_s
        asked = {model.session_id for model in self._residency.models} | set(owners.values())
        silent = await sweeping.silent_sessions(self._database, asked, before)
        for model in self._residency.models:
            if model.session_id in silent and not model.waiting:
                async with self._trainer():
                    if model.model_id in self._residency and not model.waiting:
                        await self._residency.send_away(model)
        await self._release_samplers(owners, silent)

    @contextlib.asynccontextmanager
    async def _trainer(self) -> AsyncIterator[None]:
        """The trainer, while the training lane does not use it."""
        async with self._training.trainer():
            try:
                yield
            except BackendLost as error:
                logger.warning("the trainer was lost while models were saved: %s", error)
                self._residency.lost()

    async def _owners(self) -> dict[str, str]:
        """The session of each sampler that the engines serve."""
        if self.sampling is None or not self.sampling.opened:
            return {}
        return await sweeping.sessions_of_samplers(self._database, self.sampling.opened)

    async def _release_samplers(self, owners: dict[str, str], session_ids: set[str]) -> None:
        if self.sampling is None:
            return
        busy = self._busy_samplers()
        for sampler_id, session_id in owners.items():
            if session_id in session_ids and sampler_id not in busy:
                await self.sampling.release(sampler_id)

    def _busy_samplers(self) -> set[str | None]:
        """Those that a sample was asked of, or is waiting for."""
        return {name for entry in self._book.entries.values() for name in (entry.call.sampler_id, entry.sampler_id)}

    async def superseded_samplers(self) -> None:
        """Delete the files of unnamed samplers that newer ones of their model have superseded and nobody uses."""
        folders, keep = self._residency.folders, self._settings.max_ephemeral_samplers
        for sampler_id in await sweeping.samplers_beyond(self._database, folders.root, keep):
            if sampler_id not in self._busy_samplers():
                async with self._database.write() as session:
                    await sweeping.supersede_sampler(session, sampler_id, time.time())
        for sampler_id, folder in await sweeping.superseded_folders(self._database, folders.root):
            # A sample that had come before the row said so still uses them; none that comes later does.
            if self.sampling is not None:
                await self.sampling.release(sampler_id)
            if sampler_id not in self._busy_samplers():
                await folders.remove(folder)
                async with self._database.write() as session:
                    await sweeping.forget_folder(session, sampler_id)

    async def finished_sessions(self) -> None:
        """End the models of sessions that were finished, once their last calls are done; delete their state."""
        busy = {entry.call.session_id for entry in self._book.entries.values()}
        for model_id, session_id, snapshot in await sweeping.finished_models(self._database):
            if session_id in busy:
                continue
            async with self._trainer():
                model = self._registry.models.get(model_id)
                if model is not None:
                    model.has_ended = True
                    await self._residency.forget(model)
                async with self._database.write() as session:
                    await release_model(session, model_id)
                self._registry.forget(model_id)
                await self._residency.remove_state(snapshot if model is None else model.snapshot)
        owners = await self._owners()
        await self._release_samplers(owners, await sweeping.ended_sessions(self._database, set(owners.values())))
        root = self._residency.folders.root
        for sampler_id, session_id, folder in await sweeping.finished_samplers(self._database, root):
            if session_id not in busy:
                async with self._database.write() as session:
                    await sweeping.remove_sampler(session, sampler_id)
                await self._residency.folders.remove(folder)

    async def expired(self) -> None:
        """Delete checkpoints whose time is over, and answers that nobody asks for any more."""
        now = time.time()
        for path in await checkpoints.expired_checkpoints(self._database, now):
            async with self._database.write() as session:
                folder = await checkpoints.remove_expired(session, path, now)
            if folder is not None and self.weights is not None:
                await self.weights.remove(folder)
        async with self._database.write() as session:
            await sweeping.forget_answers(session, now - self._settings.result_retention_s)

    async def idle_models(self) -> None:
        """Snapshot what is due where nothing waits, and drop from memory what is neither used nor held."""
        for model in self._residency.models:
            if self._residency.is_due(model) and not model.waiting:
                async with self._trainer():
                    if model.model_id in self._residency:
                        await self._residency.snapshot(model)
        for model_id in list(self._registry.models):
            if model_id not in self._residency:
                self._registry.forget(model_id)
