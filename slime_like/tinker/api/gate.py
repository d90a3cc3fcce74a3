"""What every request goes through first: who asks, how much at once, and its body, up to a size and within a time."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from fastapi import Request
from fastapi.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from slime_like.tinker.api.identity import Identity, Load
from slime_like.tinker.api.observed import Observed
from slime_like.tinker.api.settings import ApiSettings
from slime_like.tinker.errors import Refused

log = logging.getLogger(__name__)

#: Served to anybody: they tell nothing of anyone. A link has its own proof in it.
OPEN_PATHS = ("/", "/api/v1/healthz")
OPEN_PREFIX = "/api/v1/links/"
OPENAI_PREFIX = "/v1/"
#: Whose bodies are data of passes; all others are small.
PASS_PATHS = ("/api/v1/forward_backward", "/api/v1/forward")


def refusal(error: Refused, path: str) -> Response:
    """The answer that says why, as clients of this path read errors."""
    headers = {"Retry-After": f"{error.retry_after_s:.0f}"} if error.retry_after_s is not None else None
    return failure(str(error), error.status, path, headers)


def failure(message: str, status: int, path: str, headers: dict[str, str] | None = None) -> Response:
    """{"error", "category"}; below /v1/ {"error": {"message", "type", …}}."""
    if path.startswith(OPENAI_PREFIX):
        kind = "invalid_request_error" if status < 500 else "server_error"
        body: dict = {"error": {"message": message, "type": kind, "param": None, "code": None}}
    else:
        body = {"error": message, "category": "user" if status < 500 else "server", "detail": message}
    return JSONResponse(body, status, headers)


class Gate:
    """ASGI middleware: a request goes on with its tenant in `request.state.tenant` and its body, whole, in `.body`."""

    def __init__(self, app: ASGIApp, *, identity: Identity, settings: ApiSettings, observed: Observed):
        self._app, self._identity, self._settings, self._observed = app, identity, settings, observed
        self._load = Load(settings.quota)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), 0

        async def noting_send(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        self._observed.begin_http()
        try:
            await self._let_in(scope, receive, noting_send)
        except Refused as error:
            await refusal(error, scope["path"])(scope, receive, noting_send)
        except Exception:
            # A defect of ours. The client is told nothing of it, and asks again.
            log.exception("%s %s failed", scope["method"], scope["path"])
            if status:
                raise
            await failure("the server failed; its log says why", 500, scope["path"])(scope, receive, noting_send)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            self._observed.end_http(route, status, time.monotonic() - began)

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if path in OPEN_PATHS or path.startswith(OPEN_PREFIX):
            await self._app(scope, _nothing_more(receive), send)
            return
        tenant = await self._identity.tenant_of(Request(scope))
        with self._load.request(tenant) as take:
            limits = self._settings.limits
            body = await self._body(receive, take, limits.body_bytes if path in PASS_PATHS else limits.json_bytes)
            scope.setdefault("state", {}).update(tenant=tenant.name, body=body)
            await self._app(scope, _whole(body, receive), send)

    async def _body(self, receive: Receive, take: Callable[[int], None], limit: int) -> bytes:
        parts: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._settings.body_s):
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        raise Refused("the client went away", status=400)
                    part = message.get("body", b"")
                    take(len(part))
                    parts.append(part)
                    size += len(part)
                    if size > limit:
                        raise Refused(f"a body of more than {limit} bytes", status=413)
                    if not message.get("more_body"):
                        return b"".join(parts)
        except TimeoutError:
            raise Refused(f"the body did not come within {self._settings.body_s:.0f} s", status=408) from None


def _whole(body: bytes, receive: Receive) -> Receive:
    """A receive that gives the body at once, and then what else happens (the client leaves)."""
    is_given = False

    async def replay() -> Message:
        nonlocal is_given
        if not is_given:
            is_given = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return replay


def _nothing_more(receive: Receive) -> Receive:
    """A receive without a body: what anybody may ask for has none."""
    return _whole(b"", receive)
