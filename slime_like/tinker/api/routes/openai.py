"""/v1: OpenAI's routes over the same samplers. `model` is a base model's name, or tinker://… of sampler weights.

A stream is that of an answer that is finished: all of its text in one chunk. Tools are shown to the model through its
chat template; its calls come back as text.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
import uuid
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from slime_like.rollout.serve.wire import ApiError, read_json, sse
from slime_like.tinker.api.chat_bodies import Answers, Wanted, read_chat, read_completion
from slime_like.tinker.api.context import Api, Context, Who
from slime_like.tinker.api.routes.sampling import sampleable
from slime_like.tinker.errors import Refused
from slime_like.tinker.records import Call, CallFailure, CallResult, Kind, SampleResult
from slime_like.tinker.store import clients, listings
from slime_like.tinker.store.tables import SamplerRow

router = APIRouter(prefix="/v1")

#: What the session of a tenant's requests of this kind is tagged with: such clients have none of their own.
_TAG = "openai"
#: How soon it is noticed that a client has gone.
_GLANCE_S = 1.0
#: How often a client that waits keeps its session alive; clients with sessions of their own do so every 10 s.
_BEAT_S = 10.0


@router.get("/models")
async def models(api: Api, tenant: Who) -> dict[str, Any]:
    """The base models, and the tenant's own sampler weights."""
    saved = await listings.list_checkpoints(api.rows, tenant, limit=1000)
    entries = [_model(model.name, 0, "slime_like") for model in api.settings.models if model.sampleable]
    entries += [_model(row.path, int(row.created), tenant) for row in saved.rows if row.kind == "sampler"]
    return {"object": "list", "data": entries}


def _model(name: str, created: int, owner: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": created, "owned_by": owner}


@router.post("/chat/completions")
async def chat(request: Request, api: Api, tenant: Who) -> Response:
    """An answer to messages."""
    return await _answer(request, api, tenant, is_chat=True)


@router.post("/completions")
async def completions(request: Request, api: Api, tenant: Who) -> Response:
    """What a text, or tokens, go on with."""
    return await _answer(request, api, tenant, is_chat=False)


async def _answer(request: Request, api: Context, tenant: str, *, is_chat: bool) -> Response:
    try:
        body = read_json(await request.body())
        name = body.get("model")
        if not isinstance(name, str) or not name:
            raise ApiError("model: a base model's name, or tinker://… of sampler weights", param="model")
        sampler = await _sampler(api, tenant, name)
        base = api.settings.model(sampler.base_model)
        if base is None:
            raise ApiError(f"{sampler.base_model} is not served any more", status=404, param="model")
        tokenizer = await api.tokenizers.get(base.tokenizer)
        read = read_chat if is_chat else read_completion
        wanted = await asyncio.to_thread(read, body, tokenizer, api.settings.limits)
        results = await _sample(request, api, sampler, wanted)
    except ApiError as error:
        return JSONResponse(error.body, error.status, error.headers)
    answers = Answers(wanted=wanted, results=results, tokenizer=tokenizer, is_chat=is_chat)
    if wanted.stream:
        return StreamingResponse(sse(answers.chunks(), done=True), media_type="text/event-stream")
    return JSONResponse(await asyncio.to_thread(answers.whole))


async def _sampler(api: Context, tenant: str, name: str) -> SamplerRow:
    """The sampler of a model, in the session that a tenant's requests of this kind share. Raises Refused."""
    is_saved = name.startswith(clients.PREFIX)
    if is_saved:
        clients.read_path(name)
    base_model = "" if is_saved else sampleable(api, name)
    session_id = await clients.latest_session(api.rows, tenant, _TAG)
    if session_id is None:
        session_id = str(uuid.uuid4())
        await clients.begin_session(api.rows, session_id, tenant, {"tags": [_TAG], "user_metadata": {}})
    await clients.beat(api.rows, session_id, tenant)
    sampler_id = f"{session_id}:sample:{hashlib.sha256(name.encode()).hexdigest()[:24]}"
    path = name if is_saved else None
    if is_saved:
        await clients.readable(api.rows, name, tenant)  # one that was deleted since is not served from its sampler
    await clients.begin_sampler(api.rows, sampler_id, tenant, base_model=base_model, model_path=path)
    return await clients.get_sampler(api.rows, sampler_id, tenant)


async def _sample(request: Request, api: Context, sampler: SamplerRow, wanted: Wanted) -> list[SampleResult]:
    ids: list[str] = []
    is_answered = False
    try:
        for prompt in wanted.prompts:
            call = Call(
                kind=Kind.SAMPLE,
                tenant=sampler.tenant,
                session_id=sampler.session_id,
                sampler_id=sampler.id,
                sample=wanted.job(sampler.id, prompt),
            )
            ids.append(await api.submit(call))
        deadline = time.monotonic() + api.settings.answer_s
        results = [await _wait(request, api, sampler, request_id, deadline) for request_id in ids]
        is_answered = True
        return results
    finally:
        if not is_answered:
            for request_id in ids:
                await api.service.cancel(request_id, tenant=sampler.tenant)


async def _wait(request: Request, api: Context, sampler: SamplerRow, request_id: str, deadline: float) -> SampleResult:
    reason, beaten = "", time.monotonic()
    while time.monotonic() < deadline:
        if time.monotonic() - beaten > _BEAT_S:
            await clients.beat(api.rows, sampler.session_id, sampler.tenant)
            beaten = time.monotonic()
        if await request.is_disconnected():
            raise Refused("the client went away", status=400)
        done = await api.result(request_id, tenant=sampler.tenant, timeout_s=_GLANCE_S)
        if isinstance(done, CallResult):
            return done.result
        if isinstance(done, CallFailure):
            is_users = done.category == "user"
            kind = "invalid_request_error" if is_users else "server_error"
            raise ApiError(done.message, status=400 if is_users else 500, kind=kind)
        if done is None:
            raise ApiError("the request was lost", status=503, kind="server_error")
        reason = done.reason or done.queue_state
    message = f"no answer within {api.settings.answer_s:.0f} s: {reason}"
    raise ApiError(message, status=503, kind="server_error", retry_after_s=5)
