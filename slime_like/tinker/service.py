"""Calls in, durable and in order; answers out."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slime_like.tinker.errors import BackendLost, Refused
from slime_like.tinker.execution.call_book import MANY_ROWS, CallBook
from slime_like.tinker.execution.entries import CREATIONS, Entry, cost_tokens
from slime_like.tinker.execution.folders import Folders
from slime_like.tinker.execution.ordering import ModelQueue
from slime_like.tinker.execution.recent_rows import RecentRows
from slime_like.tinker.execution.registry import ModelRegistry
from slime_like.tinker.execution.residency import Residency
from slime_like.tinker.execution.sampling_lane import SamplingLane
from slime_like.tinker.execution.settings import ServiceSettings
from slime_like.tinker.execution.sweeper import Sweeper
from slime_like.tinker.execution.training_lane import TrainingLane
from slime_like.tinker.execution.turns import Turns
from slime_like.tinker.execution.verbs import TrainingVerbs
from slime_like.tinker.protocols import SamplingBackend, TrainingBackend
from slime_like.tinker.records import Call, CallFailure, CallResult, Kind, ModelSpec, StillWaiting
from slime_like.tinker.store.bodies import pack_call, unpack_call
from slime_like.tinker.store.clients import refuse_superseded
from slime_like.tinker.store.database import Database
from slime_like.tinker.store.requests import (
    QUEUED,
    add_request,
    find_sampler,
    find_session,
    last_seq,
    new_model,
    queued_requests,
)
from slime_like.tinker.store.tables import RequestRow

logger = logging.getLogger(__name__)


class CallService:
    """The server's middle (protocols.Service): between `start` and `close` it executes what `submit` wrote.

    engines None: nothing can be sampled.
    """

    def __init__(
        self,
        database: Database,
        trainer: TrainingBackend,
        engines: SamplingBackend | None,
        settings: ServiceSettings,
        staging: str | Path,
    ):
        self.database, self.settings = database, settings
        self._state = Folders(settings.state_folder, Path(staging, "state"))
        self._weights = Folders(settings.weights_folder, Path(staging, "weights"))
        self.book = CallBook(database, settings)
        self.registry = ModelRegistry(database)
        self.residency = Residency(trainer, database, self._state, settings)
        turns = Turns(shared=settings.shared_devices, sampling_weight=settings.sampling_weight, turn_s=settings.turn_s)
        verbs = TrainingVerbs(trainer, self.residency, self._weights, database)
        self.training = TrainingLane(self.registry, self.book, self.residency, verbs, turns, settings)
        self.sampling = None
        if engines is not None:
            homes = {self._state.root: self._state, self._weights.root: self._weights}
            self.sampling = SamplingLane(engines, database, self.book, homes, turns, settings)
        self.sweeper = Sweeper(database, self.book, self.registry, self.residency, self.training, settings)
        self.sweeper.sampling, self.sweeper.weights = self.sampling, self._weights
        self._sessions = RecentRows(functools.partial(find_session, database))
        self._samplers = RecentRows(functools.partial(find_sampler, database))
        self._tasks: list[asyncio.Task] = []

    async def start(self) -> None:
        """Take up what had no answer when the process before ended, and begin."""
        await self.database.claim()
        await self.book.terms.refresh()
        for request_id, body in await queued_requests(self.database):
            call = await asyncio.to_thread(unpack_call, body)
            await self._take(Entry(request_id=request_id, call=call, tokens=cost_tokens(call, self.settings)))
        self._tasks = [asyncio.create_task(self.training.run(), name="training lane")]
        self._tasks.append(asyncio.create_task(self.sweeper.run(), name="sweeper"))
        if self.sampling is not None:
            self._tasks.append(asyncio.create_task(self.sampling.run(), name="sampling lane"))

    async def close(self) -> None:
        """Stop executing, and save what the trainer holds; what has no answer then goes on with the next start."""
        if not self._tasks:
            return
        (training, *others), self._tasks = self._tasks, []
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self.training.stop(training)
        try:
            for model in self.residency.models:
                await self.residency.send_away(model)
        except BackendLost as error:  # what was saved before, and the calls since, are as good
            logger.warning("the trainer was lost while models were saved: %s", error)

    async def submit(self, call: Call) -> str:
        """The request's id, once it is on disk (protocols.Service)."""
        await self._check_session(call)
        if call.kind is Kind.SAMPLE:
            return await self._submit_sample(call)
        if call.model_id is None:
            raise Refused("a training call names its model.", status=400)
        with self.registry.pinned(call.model_id):
            return await self._submit_training(call, call.model_id)

    async def _check_session(self, call: Call) -> None:
        session = await self._sessions.get(call.session_id)
        if session is None or session.tenant != call.tenant:
            raise Refused(f"there is no session {call.session_id}.", status=404)
        if session.finished is not None:
            raise Refused(f"session {call.session_id} was finished. Fix: a new ServiceClient.", status=410)

    async def _submit_sample(self, call: Call) -> str:
        if self.sampling is None:
            raise Refused("this server has no engines to sample with.", status=400)
        if call.sampler_id is None or call.sample is None:
            raise Refused("a sample names its sampler, and what is wanted.", status=400)
        sampler = await self._samplers.get(call.sampler_id)
        if sampler is None or sampler.tenant != call.tenant:
            raise Refused(f"there is no sampler {call.sampler_id}.", status=404)
        refuse_superseded(sampler)
        tokens = cost_tokens(call, self.settings)
        self.book.check_limits(call.tenant, tokens)
        return await self._write(call, tokens)

    async def _submit_training(self, call: Call, model_id: str) -> str:
        if call.kind in CREATIONS:
            spec = ModelSpec(**call.fields["spec"])
            if spec.model_id != call.model_id or spec.tenant != call.tenant:
                raise Refused(f"the spec is {spec.model_id}'s of {spec.tenant}, not {call.model_id}'s.", status=400)
            call = dataclasses.replace(call, seq_id=0)
            return await self._write(call, cost_tokens(call, self.settings), spec)
        model = await self.registry.get(model_id)
        if model is None or model.spec.tenant != call.tenant:
            self._sessions.forget(call.session_id)
            await self._check_session(call)  # the reason, where its session was finished a moment ago
            raise Refused(f"there is no model {call.model_id}, or it was unloaded.", status=404)
        if call.seq_id is None:  # a client that does not count: after all that it has sent
            model.highest_seq = max(model.highest_seq, await last_seq(self.database, model_id)) + 1
            call = dataclasses.replace(call, seq_id=model.highest_seq)
        assert call.seq_id is not None
        if call.seq_id < 1:
            raise Refused(f"seq_id {call.seq_id} is none: a model's calls are counted from 1.", status=400)
        if call.seq_id in model.waiting:
            return self._same(model.waiting[call.seq_id].call.kind, call, model.waiting[call.seq_id].request_id)
        tokens = cost_tokens(call, self.settings)
        # The one that others wait for is always taken: they could never end without it.
        if call.seq_id > model.executed_seq + 1:
            self.book.check_limits(call.tenant, tokens)
        return await self._write(call, tokens)

    async def _write(self, call: Call, tokens: int, spec: ModelSpec | None = None) -> str:
        body = await asyncio.to_thread(pack_call, call) if len(call.rows) > MANY_ROWS else pack_call(call)
        row = RequestRow(
            id=f"req-{secrets.token_hex(16)}",
            tenant=call.tenant,
            session_id=call.session_id,
            kind=call.kind,
            model_id=call.model_id if call.kind is not Kind.SAMPLE else None,
            sampler_id=call.sampler_id,
            seq_id=call.seq_id,
            state=QUEUED,
            created=time.time(),
            body=body,
        )
        metadata: Mapping[str, Any] = call.fields.get("user_metadata") or {}
        model = None if spec is None else new_model(spec, call.session_id, dict(metadata))
        request_id, kind, is_new = await add_request(self.database, row, model)
        if not is_new:
            return self._same(kind, call, request_id)
        await self._take(Entry(request_id=request_id, call=call, tokens=tokens))
        return request_id

    def _same(self, kind: str, call: Call, request_id: str) -> str:
        if kind != call.kind:
            where = call.model_id or call.sampler_id
            raise Refused(f"call {call.seq_id} of {where} was {kind}, and is {call.kind} now.", status=400)
        return request_id

    async def _take(self, entry: Entry) -> None:
        self.book.add(entry)
        if entry.kind is Kind.SAMPLE:
            if self.sampling is None:
                await self.book.finish([(entry, entry.failure("server", "the server has no engines any more"))])
            else:
                self.sampling.add(entry)
            return
        model = await self.registry.get(entry.model_id)
        if model is None:
            await self.book.finish([(entry, entry.failure("user", f"{entry.model_id} takes no more calls"))])
        elif entry.seq_id <= model.executed_seq:
            reason = f"call {entry.seq_id} came after its place was given up: call {model.executed_seq} was answered"
            await self.book.finish([(entry, entry.failure("user", reason))])
        else:
            model.add(entry)
            self.training.wake()

    async def result(
        self, request_id: str, *, tenant: str, timeout_s: float
    ) -> CallResult | CallFailure | StillWaiting | None:
        """What became of a call (protocols.Service)."""
        return await self.book.outcome(request_id, tenant=tenant, timeout_s=timeout_s, state_of=self._state_of)

    def _state_of(self, entry: Entry) -> StillWaiting:
        if entry.kind is Kind.SAMPLE:
            return StillWaiting() if self.sampling is None else self.sampling.state_of(entry)
        model: ModelQueue | None = self.registry.models.get(entry.model_id)
        return self.training.state_of(entry, model)

    async def cancel(self, request_id: str, *, tenant: str) -> None:
        """End a sample that nobody wants (protocols.Service)."""
        entry = self.book.entries.get(request_id)
        if entry is not None and entry.tenant == tenant and entry.kind is Kind.SAMPLE and self.sampling is not None:
            await self.sampling.cancel(entry)

    def stats(self) -> dict[str, Any]:
        """Numbers for metrics.

        queued_requests, queued_tokens {tenant: n}; ended {"kind/done": n}; resident_models; samples_running {tenant: n
        sequences}; samples_waiting; seconds {kind: s}; batches, batched_passes; evictions, reloads, replays, snapshots,
        trainer_losses, engine_losses.
        """
        counts = self.residency.counts
        sampling = self.sampling
        seconds = dict(self.training.seconds)
        if sampling is not None:
            seconds["sample"] = sampling.seconds
        return {
            "queued_requests": {tenant: load.requests for tenant, load in self.book.loads.items()},
            "queued_tokens": {tenant: load.tokens for tenant, load in self.book.loads.items()},
            "ended": {f"{kind}/{state}": number for (kind, state), number in self.book.num_finished.items()},
            "resident_models": len(self.residency),
            "samples_running": {} if sampling is None else dict(sampling.running),
            "samples_waiting": 0 if sampling is None else sampling.num_waiting,
            "seconds": seconds,
            "batches": self.training.num_batches,
            "batched_passes": self.training.num_batched,
            "evictions": counts.evictions,
            "reloads": counts.reloads,
            "replays": counts.replays,
            "snapshots": counts.snapshots,
            "trainer_losses": counts.losses,
            "engine_losses": 0 if sampling is None else sampling.losses,
        }
