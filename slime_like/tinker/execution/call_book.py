"""All calls under way: in the database first, then in memory; and what each tenant has of them."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from slime_like.tinker.errors import Refused
from slime_like.tinker.execution.entries import REPEATED, Entry
from slime_like.tinker.execution.settings import ServiceSettings
from slime_like.tinker.execution.tenant_terms import TenantTerms
from slime_like.tinker.records import CallFailure, CallResult, Kind, StillWaiting
from slime_like.tinker.store.bodies import pack_result, unpack_result
from slime_like.tinker.store.database import Database
from slime_like.tinker.store.requests import (
    DONE,
    FAILED,
    QUEUED,
    Ending,
    end_requests,
    find_request,
)

#: How many arrays a call has before its bytes are read and written beside the event loop.
MANY_ROWS = 32


@dataclasses.dataclass
class TenantLoad:
    """What a tenant has under way."""

    requests: int = 0
    tokens: int = 0


class CallBook:
    """The calls that have no answer yet. An answer is given only when the database has it."""

    def __init__(self, database: Database, settings: ServiceSettings):
        self.database, self._settings = database, settings
        self.terms = TenantTerms(database, settings)
        self.entries: dict[str, Entry] = {}
        self.loads: dict[str, TenantLoad] = collections.defaultdict(TenantLoad)
        self.num_finished: dict[tuple[Kind, str], int] = collections.defaultdict(int)

    def check_limits(self, tenant: str, tokens: int) -> None:
        """Raise Refused (429) where the tenant has as much waiting as it may."""
        load = self.loads.get(tenant, TenantLoad())
        most_requests, most_tokens = self.terms.max_requests(tenant), self.terms.max_tokens(tenant)
        if load.requests < most_requests and (load.tokens + tokens <= most_tokens or not load.requests):
            return
        raise Refused(
            f"{load.requests} requests with {load.tokens} tokens are under way; at most {most_requests} with"
            f" {most_tokens} may be, and this one has {tokens}. Come again when some are done.",
            status=429,
            retry_after_s=self._settings.retry_after_s,
        )

    def add(self, entry: Entry) -> None:
        """A call that the database has."""
        self.entries[entry.request_id] = entry
        load = self.loads[entry.tenant]
        load.requests, load.tokens = load.requests + 1, load.tokens + entry.tokens

    async def finish(
        self,
        outcomes: Sequence[tuple[Entry, CallResult | CallFailure]],
        also: Callable[[Any], Awaitable[None]] | None = None,
        *,
        state: str | None = None,
    ) -> None:
        """Write what became of calls, and whatever `also` writes, in one transaction; then tell who waits."""
        endings = [await _ending(entry, outcome, state) for entry, outcome in outcomes]
        async with self.database.write() as session:
            await end_requests(session, endings)
            if also is not None:
                await also(session)
        for entry, outcome in outcomes:
            if self.entries.pop(entry.request_id, None) is None:
                continue
            self.num_finished[entry.kind, "done" if isinstance(outcome, CallResult) else "failed"] += 1
            load = self.loads[entry.tenant]
            load.requests, load.tokens = load.requests - 1, load.tokens - entry.tokens
            if not load.requests:
                del self.loads[entry.tenant]
            entry.outcome = outcome
            entry.finished.set()

    async def outcome(
        self, request_id: str, *, tenant: str, timeout_s: float, state_of: Callable[[Entry], StillWaiting]
    ) -> CallResult | CallFailure | StillWaiting | None:
        """What became of a call, waited for up to timeout_s; None: the tenant has no such."""
        entry = self.entries.get(request_id)
        if entry is None:
            return await self._from_database(request_id, tenant)
        if entry.tenant != tenant:
            return None
        try:
            async with asyncio.timeout(timeout_s):
                await entry.finished.wait()
        except TimeoutError:
            return state_of(entry)
        return entry.outcome

    async def _from_database(self, request_id: str, tenant: str) -> CallResult | CallFailure | StillWaiting | None:
        row = await find_request(self.database, request_id)
        if row is None or row.tenant != tenant:
            return None
        if row.state == QUEUED:  # written a moment ago, and not here yet
            return StillWaiting()
        if row.state == DONE:
            assert row.result is not None, "an answer is written with its state"
            return await asyncio.to_thread(unpack_result, row.result)
        return CallFailure(kind=Kind(row.kind), category=row.category or "unknown", message=row.error or row.state)


async def _ending(entry: Entry, outcome: CallResult | CallFailure, state: str | None) -> Ending:
    if isinstance(outcome, CallFailure):
        return Ending(
            request_id=entry.request_id, state=state or FAILED, category=outcome.category, error=outcome.message
        )
    many = len(entry.call.rows) > MANY_ROWS
    body = await asyncio.to_thread(pack_result, outcome) if many else pack_result(outcome)
    return Ending(request_id=entry.request_id, state=state or DONE, result=body, keep_body=entry.kind in REPEATED)
