"""The endpoint itself: routes, keys, sessions, limits, and OpenAI's envelope around every error."""

from __future__ import annotations

import asyncio
import dataclasses
import hmac
import logging
import socket
from collections.abc import Awaitable, Callable

from aiohttp import web

from slime_like.errors import RunError
from slime_like.rollout.serve import chat, tokenize
from slime_like.rollout.serve.answering import Answerer
from slime_like.rollout.serve.responses import events, parse_responses, response
from slime_like.rollout.serve.sessions import EpisodeResult, Session, Sessions
from slime_like.rollout.serve.wire import ApiError, TurnRequest, parse_chat, parse_generate, read_json, sse

logger = logging.getLogger(__name__)

_BODY_BYTES, _BODY_S = 16 << 20, 30.0
_LEASE_S = 20.0  # how long POST /sessions waits for an episode
_SHUTDOWN_S = 2.0
_KINDS = {401: "authentication_error", 404: "not_found_error", 413: "invalid_request_error"}
#: A bearer token that names a session: with a key configured it says which, and the key goes in X-Api-Key.
_BEARER_SESSION = "session-"


@dataclasses.dataclass(frozen=True, kw_only=True)
class EndpointOptions:
    """key: what clients must send, None: nobody is asked. most_requests: answered at a time; one more is a 429."""

    model: str
    max_context_tokens: int
    key: str | None = dataclasses.field(default=None, repr=False)
    most_requests: int = 1024


class Endpoint:
    """Make and start it in the event loop that answers.

    lease: an episode that waits to be played and its description, or None; without it episodes are not given out.
    one_off: a session for a request that names none, which is not kept; None: it is refused.
    finished: what to answer to a finish, beside the session's name.
    """

    def __init__(
        self,
        answerer: Answerer,
        sessions: Sessions,
        options: EndpointOptions,
        *,
        lease: Callable[[float], Awaitable[dict | None]] | None = None,
        one_off: Callable[[], Session] | None = None,
        finished: Callable[[Session, EpisodeResult], dict] | None = None,
    ):
        self._answerer, self._sessions, self._options = answerer, sessions, options
        self._lease, self._one_off, self._finished = lease, one_off, finished
        self._num_requests = 0
        self._runner: web.AppRunner | None = None

    async def start(self, listener: socket.socket) -> None:
        """Answer at the socket."""
        app = web.Application(middlewares=[self._guarded], client_max_size=_BODY_BYTES)
        for prefix in ("", "/sessions/{session}"):
            for path, handler in {
                "/v1/chat/completions": self._chat,
                "/v1/chat/completions/tokens": self._chat_tokens,
                "/v1/responses": self._responses,
                "/inference/v1/generate": self._generate,
                "/v1/inference/v1/generate": self._generate,
                "/tokenize": self._tokenize,
                "/v1/tokenize": self._tokenize,
                "/detokenize": self._detokenize,
                "/v1/detokenize": self._detokenize,
            }.items():
                app.router.add_post(prefix + path, handler)
            app.router.add_get(f"{prefix}/v1/models", self._models)
            app.router.add_get(f"{prefix}/v1/models/{{model:.+}}", self._model)
        app.router.add_get("/health", self._health)
        app.router.add_post("/sessions", self._open_session)
        app.router.add_get("/sessions/{session}", self._show_session)
        app.router.add_post("/sessions/{session}/finish", self._finish_session)
        # A client that hangs up has no use for its answer: the request to the engine ends too, and is not recorded.
        self._runner = web.AppRunner(
            app, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_S, access_log=None, handle_signals=False
        )
        await self._runner.setup()
        await web.SockSite(self._runner, listener).start()

    async def close(self) -> None:
        """Stop listening and end what is being answered."""
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _guarded(self, request: web.Request, handler) -> web.StreamResponse:
        try:
            if request.path != "/health":
                self._authorize(request)
            return await handler(request)
        except ApiError as error:
            return web.json_response(error.body, status=error.status, headers=error.headers)
        except web.HTTPException as error:
            kind = _KINDS.get(error.status, "invalid_request_error")
            refusal = ApiError(f"{error.reason}: {request.method} {request.path[:200]}", status=error.status, kind=kind)
            return web.json_response(refusal.body, status=error.status)
        except RunError as error:
            logger.warning("%s %s: %s", request.method, request.path, error)
            failure = ApiError(str(error), status=503, kind="server_error", code="engine_error", retry_after_s=1)
            return web.json_response(failure.body, status=failure.status, headers=failure.headers)
        except Exception:
            logger.exception("%s %s: a fault of ours", request.method, request.path)
            fault = ApiError("a fault of the endpoint; its log says which", status=500, kind="server_error")
            return web.json_response(fault.body, status=fault.status)

    def _authorize(self, request: web.Request) -> None:
        """Raise ApiError without the key; the name of a session that we chose is as good."""
        key, bearer = self._options.key, _bearer(request)
        if key is None:
            return
        given = request.headers.get("X-Api-Key") or bearer
        if hmac.compare_digest(given.encode(), key.encode()):
            return
        if self._one_off is None and bearer in self._sessions:
            return
        raise ApiError(
            "the key is missing or wrong; send it as Authorization: Bearer KEY or X-Api-Key",
            status=401,
            kind="authentication_error",
            code="invalid_api_key",
        )

    def _session(self, request: web.Request) -> Session:
        """The one that the path, X-Session-ID or the bearer token names, in this order. Raises ApiError."""
        name = request.match_info.get("session") or request.headers.get("X-Session-ID")
        bearer = _bearer(request)
        if name:
            return self._sessions.get(name)
        if bearer in self._sessions or bearer.startswith(_BEARER_SESSION):
            return self._sessions.get(bearer)
        if self._one_off is None:
            raise ApiError(
                "the request names no session. Fix: /sessions/NAME/v1/... as the base URL, the header X-Session-ID, or"
                " the session's name as the key.",
                status=404,
                code="session_not_found",
            )
        return self._one_off()

    async def _answer(self, request: web.Request, read: Callable[[dict, Session], TurnRequest]):
        """(the body, the turn that it asks for, the session, the answer); at most most_requests at a time."""
        if self._num_requests >= self._options.most_requests:
            raise ApiError(
                f"{self._num_requests} requests are being answered; try again",
                status=429,
                kind="rate_limit_error",
                code="rate_limit_exceeded",
                retry_after_s=1,
            )
        self._num_requests += 1
        try:
            body = await _body(request)
            session = self._session(request)
            turn = read(body, session)
            return body, turn, session, await self._answerer.answer(session, turn)
        finally:
            self._num_requests -= 1

    async def _chat(self, request: web.Request, *, with_ids: bool = False) -> web.StreamResponse:
        _, turn, _, answer = await self._answer(request, lambda body, _: parse_chat(body, with_ids=with_ids))
        model = turn.model or self._options.model
        if turn.stream:
            return await _stream(request, sse(chat.chunks(answer, model, turn), done=True))
        return web.json_response(chat.completion(answer, model))

    async def _chat_tokens(self, request: web.Request) -> web.StreamResponse:
        return await self._chat(request, with_ids=True)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        _, turn, _, answer = await self._answer(request, lambda body, _: parse_generate(body))
        return web.json_response(chat.generated(answer, turn.model or self._options.model))

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        def read(body: dict, session: Session) -> TurnRequest:
            previous = body.get("previous_response_id")
            if previous is not None and (not isinstance(previous, str) or previous not in session.responses):
                raise ApiError(
                    f"previous_response_id {previous!r:.80} is not of this session",
                    status=404,
                    param="previous_response_id",
                )
            return parse_responses(body, session.responses[previous] if previous else ())

        body, turn, session, answer = await self._answer(request, read)
        whole = response(answer, turn.model or self._options.model, body)
        session.responses[whole["id"]] = answer.conversation
        if turn.stream:
            return await _stream(request, sse(events(whole), done=False))
        return web.json_response(whole)

    async def _tokenize(self, request: web.Request) -> web.Response:
        return web.json_response(
            tokenize.tokenize(await _body(request), self._answerer, self._options.max_context_tokens)
        )

    async def _detokenize(self, request: web.Request) -> web.Response:
        return web.json_response(tokenize.detokenize(await _body(request), self._answerer))

    async def _models(self, _: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self._card(self._options.model)]})

    async def _model(self, request: web.Request) -> web.Response:
        return web.json_response(self._card(request.match_info["model"]))

    def _card(self, name: str) -> dict:
        """Any name is the policy's: clients insist on ones that they know."""
        return {
            "id": name,
            "object": "model",
            "created": 0,
            "owned_by": "slime_like",
            "root": self._options.model,
            "max_model_len": self._options.max_context_tokens,
        }

    async def _health(self, _: web.Request) -> web.Response:
        return web.json_response({"status": "ok", "sessions": len(self._sessions), "requests": self._num_requests})

    async def _open_session(self, request: web.Request) -> web.Response:
        """An episode to play. 204 if none waits: ask again."""
        if self._lease is None:
            raise ApiError("this endpoint gives out no episodes: name your own sessions", status=404)
        description = await self._lease(_LEASE_S)
        return web.json_response(description) if description else web.Response(status=204)

    async def _show_session(self, request: web.Request) -> web.Response:
        session = self._sessions.get(request.match_info["session"])
        return web.json_response({"session_id": session.name, "num_turns": session.num_turns})

    async def _finish_session(self, request: web.Request) -> web.Response:
        body = await _body(request) if request.can_read_body else {}
        session = self._sessions.get(request.match_info["session"])
        try:
            result = EpisodeResult.read(body)
        except ValueError as error:
            raise ApiError(str(error)) from None
        session.finish(result)
        answer = {"session_id": session.name, "num_turns": session.num_turns}
        return web.json_response(answer | (self._finished(session, result) if self._finished else {}))


async def _body(request: web.Request) -> dict:
    try:
        async with asyncio.timeout(_BODY_S):
            return read_json(await request.read())
    except TimeoutError:
        raise ApiError(f"the body did not come within {_BODY_S:g} s", status=408) from None


async def _stream(request: web.Request, parts) -> web.StreamResponse:
    stream = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await stream.prepare(request)
    for part in parts:
        await stream.write(part)
    await stream.write_eof()
    return stream


def _bearer(request: web.Request) -> str:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    return token.strip() if scheme.lower() == "bearer" else ""
