"""The trainer's work, one thing at a time: a call, or passes of several models together."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from slime_like.errors import SlimeLikeError
from slime_like.records import PassResult
from slime_like.tinker.errors import BackendLost
from slime_like.tinker.execution.call_book import CallBook
from slime_like.tinker.execution.entries import CREATIONS, PASSES, Entry
from slime_like.tinker.execution.fair_clock import FairClock
from slime_like.tinker.execution.ordering import ModelQueue
from slime_like.tinker.execution.registry import ModelRegistry
from slime_like.tinker.execution.residency import Residency, tenant_pass
from slime_like.tinker.execution.settings import ServiceSettings
from slime_like.tinker.execution.turns import Side, Turns
from slime_like.tinker.execution.verbs import Done, TrainingVerbs
from slime_like.tinker.records import CallFailure, CallResult, Kind, StillWaiting
from slime_like.tinker.store.requests import advance_model, forget_model

logger = logging.getLogger(__name__)

Outcome = CallResult | CallFailure
#: Beside passes: what the trainer need not wait for. After a load or a creation its snapshot's row must be there first.
_WRITTEN_LATER = frozenset({Kind.OPTIM_STEP, Kind.SAVE_WEIGHTS, Kind.SAVE_FOR_SAMPLER})


class TrainingLane:
    """Serves the models' next calls, fairly between tenants (FairClock, by tokens).

    Passes that are ready when one is served go with it, up to batch_tokens and one a model. A model that the trainer
    holds may be up to resident_slack_tokens ahead of its turn: fetching another costs more.
    """

    def __init__(
        self,
        registry: ModelRegistry,
        book: CallBook,
        residency: Residency,
        verbs: TrainingVerbs,
        turns: Turns,
        settings: ServiceSettings,
    ):
        self._turns = turns
        self._registry, self._book, self._residency, self._verbs = registry, book, residency, verbs
        self._settings = settings
        self._clock = FairClock(book.terms.weight)
        self._work = asyncio.Event()
        self.trainer_lock = asyncio.Lock()
        self.seconds: dict[str, float] = collections.defaultdict(float)
        self.writing: set[asyncio.Task] = set()  # of answers
        self._due: list[ModelQueue] = []  # for a snapshot
        self._stopping = False
        self.num_batches = self.num_batched = 0

    def wake(self) -> None:
        """There may be something to do."""
        self._work.set()

    @contextlib.asynccontextmanager
    async def trainer(self) -> AsyncIterator[None]:
        """Held while the trainer is used; the sweeper takes it for what it saves."""
        async with self.trainer_lock, self._turns.of(Side.TRAINING):
            yield

    async def run(self) -> None:
        """Serve until `stop`, or cancelled."""
        while not self._stopping:
            await self._snapshots()
            batch = self._choose()
            if not batch:
                self._work.clear()
                await self._work.wait()
                # What comes at the same time is served together.
                await asyncio.sleep(self._settings.batch_window_s)
                continue
            async with self.trainer():
                try:
                    await self._serve(batch)
                except Exception:  # the database does not take what became of them: they are served once more
                    logger.exception("%s could not be ended", _names(batch))
                    await asyncio.sleep(self._settings.retry_after_s)

    async def stop(self, task: asyncio.Task) -> None:
        """End `run`, which is `task`, when what it does now is done; what it has done is written then."""
        self._stopping = True
        self.wake()
        await asyncio.wait({task}, timeout=self._settings.close_timeout_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        if self.writing:
            await asyncio.wait(self.writing, timeout=self._settings.close_timeout_s)
        for late in self.writing:
            late.cancel()

    async def _snapshots(self) -> None:
        while self._due:
            model = self._due.pop()
            if model.model_id not in self._residency or not self._residency.is_due(model):
                continue
            async with self.trainer():
                try:
                    async with asyncio.timeout(self._settings.backend_timeout_s):
                        await self._residency.snapshot(model)
                except (BackendLost, TimeoutError) as error:
                    logger.warning("the trainer was lost while %s was saved: %s", model.model_id, error)
                    self._residency.lost()
                except Exception:  # the snapshot before it, and the calls since, are as good
                    logger.exception("%s could not be saved", model.model_id)

    def _choose(self) -> list[Entry]:
        heads = [entry for model in self._registry.models.values() if (entry := model.next()) is not None]
        self._clock.advance(entry.tenant for entry in heads)
        ahead: dict[str, float] = collections.defaultdict(float)  # what this batch gives each tenant
        batch: list[Entry] = []
        tokens, places, whole_places = 0, self._settings.max_adapters_resident, self._settings.max_whole_models_resident
        while heads and len(batch) < places:
            first = min(heads, key=lambda entry: (self._turn(entry) + ahead[entry.tenant], entry.arrived))
            heads.remove(first)
            is_whole = self._registry.models[first.model_id].is_whole
            if batch and (not _joins(first) or tokens + first.tokens > self._settings.batch_tokens):
                continue
            if is_whole and not whole_places:
                continue
            batch.append(first)
            tokens += first.tokens
            whole_places -= is_whole
            ahead[first.tenant] += first.tokens / self._book.terms.weight(first.tenant)
            if not _joins(first):
                break
        for entry in batch:
            self._clock.charge(entry.tenant, entry.tokens)
        return batch

    def _turn(self, entry: Entry) -> float:
        slack = self._settings.resident_slack_tokens if entry.model_id in self._residency else 0
        return self._clock.position(entry.tenant) - slack

    async def _serve(self, batch: list[Entry]) -> None:
        begun = time.monotonic()
        for entry in batch:
            entry.running = True
        try:
            async with asyncio.timeout(self._settings.backend_timeout_s):
                if batch[0].kind in PASSES:
                    await self._passes(batch)
                elif batch[0].kind is Kind.REFUSED:
                    await self._fail(batch[0], batch[0].failure("user", str(batch[0].call.fields["message"])))
                else:
                    await self._verb(batch[0])
        except (BackendLost, TimeoutError) as error:
            logger.warning("the trainer was lost over %s: %s", _names(batch), error or "it did not answer in time")
            self._residency.lost()
            await self._count_attempt(batch, str(error) or f"no answer in {self._settings.backend_timeout_s:g} s")
        except asyncio.CancelledError:
            # Perhaps the trainer has done it, and nobody will know: nothing of these models is to be saved.
            self._residency.abandon([entry.model_id for entry in batch])
            raise
        except Exception as error:
            # What the trainer holds of these models is not known: they come back from their snapshots.
            logger.log(
                logging.INFO if isinstance(error, SlimeLikeError) else logging.ERROR,
                "%s failed: %s",
                _names(batch),
                error,
                exc_info=not isinstance(error, SlimeLikeError),
            )
            await self._failed(batch, error)
        finally:
            for entry in batch:
                model = self._registry.models.get(entry.model_id)
                entry.running = model is not None and entry.seq_id <= model.executed_seq
            self.seconds[str(batch[0].kind)] += time.monotonic() - begun

    async def _passes(self, batch: list[Entry]) -> None:
        models = [await self._model(entry) for entry in batch]
        keep = frozenset(model.model_id for model in models)
        for model in models:
            await self._residency.ensure(model, keep)
        answers = await self._residency.trainer.run_passes([tenant_pass(entry.call) for entry in batch])
        self.num_batches, self.num_batched = self.num_batches + 1, self.num_batched + len(batch)
        self._finish_later(
            [
                (model, entry, _pass_outcome(entry, answer))
                for model, entry, answer in zip(models, batch, answers, strict=True)
            ]
        )

    async def _verb(self, entry: Entry) -> None:
        model = await self._model(entry)
        done = await self._verbs.run(model, entry)
        outcomes = [(model, entry, CallResult(kind=entry.kind, result=done.result))]
        if entry.kind in _WRITTEN_LATER:
            self._finish_later(outcomes, done)
            return
        await self._residency.written(model)
        await self._finish(outcomes, done)
        if entry.kind is Kind.UNLOAD_MODEL:
            await self._end_model(model, f"{model.model_id} was unloaded")

    async def _model(self, entry: Entry) -> ModelQueue:
        model = await self._registry.get(entry.model_id)
        assert model is not None, f"{entry.model_id} has a call and is not there"
        return model

    async def _finish(self, outcomes: Sequence[tuple[ModelQueue, Entry, Outcome]], done: Done | None = None) -> None:
        async def also(session: Any) -> None:
            for model, entry, _ in outcomes:
                await advance_model(session, model.model_id, entry.seq_id, num_steps=done.num_steps if done else 0)
            if done is not None and done.also is not None:
                await done.also(session)

        await self._book.finish([(entry, outcome) for _, entry, outcome in outcomes], also)
        for model, entry, _ in outcomes:
            model.done(entry.seq_id)
        if done is not None and done.afterwards is not None:
            await done.afterwards()

    def _finish_later(self, outcomes: Sequence[tuple[ModelQueue, Entry, Outcome]], done: Done | None = None) -> None:
        """Write answers while the trainer goes on; a model's are written in order."""
        writing = self._residency.writing
        before = {writing[model.model_id] for model, _, _ in outcomes if model.model_id in writing}
        task = asyncio.create_task(self._finish_surely(outcomes, done, before))
        self.writing.add(task)
        task.add_done_callback(self.writing.discard)
        for model, entry, _ in outcomes:
            writing[model.model_id] = task
            model.executed_seq = entry.seq_id

    async def _finish_surely(
        self, outcomes: Sequence[tuple[ModelQueue, Entry, Outcome]], done: Done | None, before: set[asyncio.Task]
    ) -> None:
        if before:
            await asyncio.wait(before)
        while True:
            try:
                await self._finish(outcomes, done)
            except Exception:  # the trainer has done it: there is nothing to do but to write it
                logger.exception("%s could not be written", _names([entry for _, entry, _ in outcomes]))
                await asyncio.sleep(self._settings.retry_after_s)
            else:
                break
        for model, _, _ in outcomes:
            if self._residency.writing.get(model.model_id) is asyncio.current_task():
                del self._residency.writing[model.model_id]
            if self._residency.is_due(model) and model not in self._due:
                self._due.append(model)
        self.wake()

    async def _failed(self, batch: list[Entry], error: Exception) -> None:
        for entry in batch:
            await self._residency.forget(await self._model(entry))
        if len(batch) > 1:  # whose fault it is shows when each is alone
            for entry in batch:
                entry.alone = True
            return
        (entry,) = batch
        if isinstance(error, SlimeLikeError):
            await self._fail(entry, entry.failure("user", str(error)))
        else:
            await self._count_attempt(batch, f"{type(error).__name__}: {error}")

    async def _fail(self, entry: Entry, failure: CallFailure) -> None:
        model = await self._model(entry)
        await self._residency.written(model)
        if entry.kind not in CREATIONS:
            await self._finish([(model, entry, failure)])
            return
        await self._book.finish([(entry, failure)], lambda session: forget_model(session, model.model_id))
        model.done(entry.seq_id)
        await self._end_model(model, f"{model.model_id} was not created: {failure.message}")

    async def _end_model(self, model: ModelQueue, reason: str) -> None:
        model.has_ended = True
        left = [(entry, entry.failure("user", reason)) for entry in model.waiting.values()]
        await self._book.finish(left)
        model.waiting.clear()
        self._registry.forget(model.model_id)

    async def _count_attempt(self, batch: list[Entry], reason: str) -> None:
        for entry in batch:
            entry.attempts += 1
            entry.alone = entry.alone or len(batch) > 1
            if entry.attempts >= self._settings.max_attempts and not entry.finished.is_set():
                message = f"the trainer failed {entry.attempts} times over this call; the last time: {reason}"
                await self._fail(entry, entry.failure("server", message))

    async def give_up(self, model: ModelQueue, missing: int) -> None:
        """Fail the calls that wait for one that does not come; those after them go on."""
        await self._residency.written(model)
        if model.missing() != missing:  # it came meanwhile
            return
        entries = model.beyond_gap()
        last = entries[-1].seq_id
        reason = (
            f"call {missing} of {model.model_id} did not come within {self._settings.gap_timeout_s:g} s,"
            f" so those that wait for it were not executed. Calls after seq_id {last} are."
        )
        for entry in entries:  # first, so that the missing call, should it come now, is too late for certain
            model.done(entry.seq_id)
        failures = [(entry, entry.failure("user", reason)) for entry in entries]
        await self._book.finish(failures, lambda session: advance_model(session, model.model_id, last))
        self.wake()

    def state_of(self, entry: Entry, model: ModelQueue | None) -> StillWaiting:
        """What a client that waits is told."""
        if entry.running or model is None:
            return StillWaiting()
        missing = model.missing()
        if missing is not None and missing < entry.seq_id:
            return StillWaiting(
                queue_state="paused_capacity",
                reason=f"waits for the call with seq_id {missing} of {model.model_id}, which has not come yet",
            )
        own = sum(seq < entry.seq_id for seq in model.waiting)
        others = sum(len(other.waiting) for other in self._registry.models.values()) - len(model.waiting)
        if not others:
            return StillWaiting(reason=f"{own} calls of {model.model_id} are before it")
        reason = f"{own} calls of {model.model_id} are before it, and {others} calls of other models wait too"
        return StillWaiting(queue_state="paused_capacity", reason=reason)


def _joins(entry: Entry) -> bool:
    return entry.kind in PASSES and not entry.alone


def _pass_outcome(entry: Entry, answer: PassResult | str) -> Outcome:
    return entry.failure("user", answer) if isinstance(answer, str) else CallResult(kind=entry.kind, result=answer)


def _names(batch: Sequence[Entry]) -> str:
    return ", ".join(f"{entry.kind} {entry.seq_id} of {entry.model_id}" for entry in batch)
