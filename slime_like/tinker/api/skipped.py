"""A step that was refused has its place in the order of its model all the same: those after it must not wait for it."""

from __future__ import annotations

import contextlib
from typing import Any

import orjson
from fastapi import Request

from slime_like.tinker.api.context import Context
from slime_like.tinker.api.wire.requests import RefusedPass
from slime_like.tinker.errors import Refused
from slime_like.tinker.records import Call, Kind
from slime_like.tinker.store import clients

#: Refusals that no repetition changes; after any other the same request comes again.
_FINAL = (400, 404, 413, 422)
_PREFIX = "/api/v1/"
_SAVES = ("save_weights", "save_weights_for_sampler", "save_weights_external")
_STEPS = ("forward_backward", "forward", "optim_step", "load_weights", *_SAVES)


async def skip_refused(request: Request, error: Exception, message: str, status: int) -> None:
    """Give a refused step's place to a call that fails with the same message, where it had one."""
    api: Context = request.app.state.context
    if status not in _FINAL or request.url.path.removeprefix(_PREFIX) not in _STEPS:
        return
    model_id: Any
    seq_id: Any
    if isinstance(error, RefusedPass):
        model_id, seq_id = error.model_id, error.seq_id
    else:
        body = _object(request.state.body)
        model_id, seq_id = body.get("model_id"), body.get("seq_id")
    if not isinstance(model_id, str) or type(seq_id) is not int or not 1 <= seq_id < 2**31:
        return
    # What is not the tenant's, or not there, has no order to keep: refused once more.
    with contextlib.suppress(Refused):
        session_id = clients.session_of(model_id)
        await clients.check_session(api.rows, session_id, request.state.tenant)
        call = Call(
            kind=Kind.REFUSED,
            tenant=request.state.tenant,
            session_id=session_id,
            model_id=model_id,
            seq_id=seq_id,
            fields={"message": message},
        )
        await api.submit(call)


def _object(body: bytes) -> dict[str, Any]:
    try:
        value = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    return value if isinstance(value, dict) else {}
