"""What every route has at hand."""

from __future__ import annotations

import dataclasses
from typing import Annotated

from fastapi import Depends, Request

from slime_like.tinker.api.settings import ApiSettings
from slime_like.tinker.protocols import Service
from slime_like.tinker.store.rows import Rows


@dataclasses.dataclass(frozen=True, kw_only=True)
class Context:
    """Of one app."""

    service: Service
    rows: Rows
    settings: ApiSettings


def _context(request: Request) -> Context:
    return request.app.state.context


def _tenant(request: Request) -> str:
    # The gate wrote it; a request that did not go through the gate has none, and fails.
    return request.state.tenant


Api = Annotated[Context, Depends(_context)]
Who = Annotated[str, Depends(_tenant)]
