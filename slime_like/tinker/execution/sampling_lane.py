"""The engines' work: many samples at once, tenants in turn."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
import time

from slime_like.errors import SlimeLikeError
from slime_like.tinker.errors import BackendLost
from slime_like.tinker.execution.call_book import CallBook
from slime_like.tinker.execution.entries import Entry
from slime_like.tinker.execution.fair_clock import FairClock
from slime_like.tinker.execution.folders import Folders
from slime_like.tinker.execution.settings import ServiceSettings
from slime_like.tinker.execution.turns import Side, Turns
from slime_like.tinker.protocols import SamplingBackend
from slime_like.tinker.records import CallFailure, CallResult, SampleResult, StillWaiting
from slime_like.tinker.store.clients import refuse_superseded
from slime_like.tinker.store.database import Database
from slime_like.tinker.store.requests import CANCELLED, find_sampler, newest_inflight

logger = logging.getLogger(__name__)


class SamplingLane:
    """Samples that wait and run. At most max_samples_running sequences at once, a part of them of one tenant.

    A sample is charged with all tokens that it may have, and given back what it did not use.
    """

    def __init__(
        self,
        engines: SamplingBackend,
        database: Database,
        book: CallBook,
        folders: dict[str, Folders],
        turns: Turns,
        settings: ServiceSettings,
    ):
        self.engines, self._database, self._book, self._settings = engines, database, book, settings
        self._folders, self._turns = folders, turns
        self._clock = FairClock(book.terms.weight)
        self._waiting: dict[str, collections.deque[Entry]] = {}
        self._tasks: dict[str, asyncio.Task] = {}
        self._cancelled: set[str] = set()
        self._opened: dict[str, asyncio.Future] = {}
        self.running: dict[str, int] = collections.defaultdict(int)  # sequences of each tenant
        self._work = asyncio.Event()
        self.seconds = 0.0
        self.losses = 0

    @property
    def num_running(self) -> int:
        """Sequences that the engines have."""
        return sum(self.running.values())

    @property
    def num_waiting(self) -> int:
        """Samples that the engines do not have yet."""
        return sum(map(len, self._waiting.values()))

    @property
    def opened(self) -> list[str]:
        """The samplers that the engines were asked to serve."""
        return list(self._opened)

    def add(self, entry: Entry) -> None:
        """A sample that waits from now on."""
        self._waiting.setdefault(entry.tenant, collections.deque()).append(entry)
        self._work.set()

    async def run(self) -> None:
        """Serve until cancelled; what runs then is cancelled too, and has no answer."""
        try:
            while True:
                entry = self._choose()
                if entry is None:
                    self._work.clear()
                    await self._work.wait()
                    continue
                self._start(entry)
        finally:
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _choose(self) -> Entry | None:
        self._clock.advance(self._waiting)
        ready = [tenant for tenant, entries in self._waiting.items() if self._has_place(entries[0])]
        if not ready:
            return None
        tenant = min(ready, key=lambda name: (self._clock.position(name), self._waiting[name][0].arrived))
        entry = self._waiting[tenant].popleft()
        if not self._waiting[tenant]:
            del self._waiting[tenant]
        self._clock.charge(tenant, entry.tokens)
        return entry

    def _has_place(self, entry: Entry) -> bool:
        wanted = _sequences(entry)
        own = self.running.get(entry.tenant, 0)
        fits_own = own + wanted <= self._settings.max_samples_running_a_tenant or own == 0
        return fits_own and (self.num_running + wanted <= self._settings.max_samples_running or self.num_running == 0)

    def _start(self, entry: Entry) -> None:
        entry.running = True
        self.running[entry.tenant] += _sequences(entry)
        task = asyncio.create_task(self._serve(entry), name=entry.request_id)
        self._tasks[entry.request_id] = task
        task.add_done_callback(lambda _: self._ended(entry))

    def _ended(self, entry: Entry) -> None:
        del self._tasks[entry.request_id]
        entry.running = False
        self.running[entry.tenant] -= _sequences(entry)
        if not self.running[entry.tenant]:
            del self.running[entry.tenant]
        self._work.set()

    async def _serve(self, entry: Entry) -> None:
        begun = time.monotonic()
        outcome: CallResult | CallFailure
        try:
            result = await self._sample(entry)
            self._clock.charge(entry.tenant, _used_tokens(entry, result) - entry.tokens)
            outcome = CallResult(kind=entry.kind, result=result)
        except asyncio.CancelledError:
            if entry.request_id not in self._cancelled:
                raise  # the server ends: the sample is asked for again when it is back
            self._cancelled.discard(entry.request_id)
            await self._finish(entry, entry.failure("user", CANCELLED), state=CANCELLED)
            return
        except SlimeLikeError as error:
            category = "server" if isinstance(error, BackendLost) else "user"
            outcome = entry.failure(category, str(error))
        except Exception as error:
            logger.exception("sample %s failed", entry.request_id)
            outcome = entry.failure("server", f"{type(error).__name__}: {error}")
        self.seconds += time.monotonic() - begun
        await self._finish(entry, outcome)

    async def _finish(self, entry: Entry, outcome: CallResult | CallFailure, state: str | None = None) -> None:
        """Write it, however long the database does not take it: there is nobody else to do so."""
        while True:
            try:
                await self._book.finish([(entry, outcome)], state=state)
            except Exception:
                logger.exception("sample %s could not be ended", entry.request_id)
                await asyncio.sleep(self._settings.retry_after_s)
            else:
                return

    async def _sample(self, entry: Entry) -> SampleResult:
        job = entry.call.sample
        assert job is not None, "a sample call has a sample"
        while True:
            try:
                async with (
                    self._turns.of(Side.SAMPLING),
                    asyncio.timeout(self._settings.backend_timeout_s),
                ):
                    await self._stand_in(entry)
                    await self._open(str(entry.sampler_id))
                    return await self.engines.sample(dataclasses.replace(job, sampler_id=str(entry.sampler_id)))
            except BackendLost as error:
                self._opened.clear()
                self.losses += 1
                entry.attempts += 1
                if entry.attempts >= self._settings.max_attempts:
                    raise BackendLost(f"engines died {entry.attempts} times under this sample: {error}") from error
                await asyncio.sleep(self._settings.retry_after_s * 2 ** (entry.attempts - 1))
            except TimeoutError:
                raise BackendLost(f"no answer of the engines in {self._settings.backend_timeout_s:g} s") from None

    async def _stand_in(self, entry: Entry) -> None:
        """Where a sampler follows its model's weights and its own are not kept, the latest one stands for it."""
        sampler_id = str(entry.call.sampler_id)
        if sampler_id in self._opened:
            return
        row = await find_sampler(self._database, sampler_id)
        if row is not None and row.superseded is not None and row.is_inflight and row.model_id is not None:
            latest = await newest_inflight(self._database, row.model_id)
            entry.serving = None if latest is None else latest.id

    async def _open(self, sampler_id: str) -> None:
        """Once for all samples that come at the same time."""
        opening = self._opened.get(sampler_id)
        if opening is None:
            opening = asyncio.ensure_future(self._open_once(sampler_id))
            self._opened[sampler_id] = opening
        try:
            await asyncio.shield(opening)
        except BaseException:
            if opening.done() and self._opened.get(sampler_id) is opening:
                del self._opened[sampler_id]  # the next sample tries again
            raise

    async def _open_once(self, sampler_id: str) -> None:
        row = await find_sampler(self._database, sampler_id)
        if row is None:
            raise SlimeLikeError(f"there is no sampler {sampler_id}: its session is over.")
        refuse_superseded(row)
        folder = row.folder
        if folder is not None:
            home = next((home for root, home in self._folders.items() if folder.startswith(f"{root}/")), None)
            folder = folder if home is None else await home.local(folder)
        await self.engines.open(sampler_id, folder)

    async def release(self, sampler_id: str) -> None:
        """The engines need not hold it; the next sample opens it again."""
        if self._opened.pop(sampler_id, None) is not None:
            await self.engines.release(sampler_id)

    async def cancel(self, entry: Entry) -> None:
        """End a sample without an answer."""
        waiting = self._waiting.get(entry.tenant)
        if waiting is not None and entry in waiting:
            waiting.remove(entry)
            if not waiting:
                del self._waiting[entry.tenant]
            await self._book.finish([(entry, entry.failure("user", CANCELLED))], state=CANCELLED)
        elif entry.request_id in self._tasks:
            self._cancelled.add(entry.request_id)
            self._tasks[entry.request_id].cancel()

    def state_of(self, entry: Entry) -> StillWaiting:
        """What a client that waits is told."""
        if entry.running:
            return StillWaiting()
        own, most = self.running.get(entry.tenant, 0), self._settings.max_samples_running_a_tenant
        if own + _sequences(entry) > most:
            return StillWaiting(
                queue_state="paused_rate_limit", reason=f"{own} of at most {most} sequences of yours are being sampled"
            )
        return StillWaiting(
            queue_state="paused_capacity",
            reason=f"the engines sample {self.num_running} sequences; {self.num_waiting} samples wait",
        )


def _sequences(entry: Entry) -> int:
    assert entry.call.sample is not None, "a sample call has a sample"
    return entry.call.sample.num_samples


def _used_tokens(entry: Entry, result: SampleResult) -> int:
    assert entry.call.sample is not None, "a sample call has a sample"
    return len(entry.call.sample.prompt) + sum(len(sequence.tokens) for sequence in result.sequences)
