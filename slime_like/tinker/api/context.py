"""What every route has at hand."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from fastapi import Depends, Request

from slime_like.tinker.api.chat_bodies import Tokenizers
from slime_like.tinker.api.known import Known
from slime_like.tinker.api.links import Links
from slime_like.tinker.api.observed import Observed
from slime_like.tinker.api.settings import ApiSettings
from slime_like.tinker.protocols import Service
from slime_like.tinker.records import Call, CallFailure, CallResult, StillWaiting
from slime_like.tinker.store.rows import Rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """Of one app."""

    service: Service
    rows: Rows
    settings: ApiSettings
    known: Known
    links: Links = dataclasses.field(default_factory=Links)
    tokenizers: Tokenizers = dataclasses.field(default_factory=Tokenizers)
    observed: Observed = dataclasses.field(default_factory=Observed)

    async def submit(self, call: Call) -> str:
        """The request's id. Raises Refused."""
        request_id = await self.service.submit(call)
        self.observed.taken(request_id, call)
        return request_id

    async def result(
        self, request_id: str, *, tenant: str, timeout_s: float
    ) -> CallResult | CallFailure | StillWaiting | None:
        """As Service's, counted."""
        done = await self.service.result(request_id, tenant=tenant, timeout_s=timeout_s)
        if isinstance(done, CallResult | CallFailure):
            self.observed.answered(request_id, done)
        return done


def _context(request: Request) -> Context:
    return request.app.state.context


def _tenant(request: Request) -> str:
    # The gate wrote it; a request that did not go through the gate has none, and fails.
    return request.state.tenant


Api = Annotated[Context, Depends(_context)]
Who = Annotated[str, Depends(_tenant)]
