"""Answers, waited for a while in each request."""

from __future__ import annotations

import asyncio

import orjson
from fastapi import APIRouter, Request, Response

from slime_like.tinker.api import external
from slime_like.tinker.api.bodies import CancelFuture, RetrieveFuture
from slime_like.tinker.api.context import Api, Who
from slime_like.tinker.api.wire.answers import TO_PROTOBUF, to_json_answer
from slime_like.tinker.records import CallFailure, CallResult, StillWaiting
from slime_like.tinker.store.rows import missing

router = APIRouter(prefix="/api/v1")

_PROTOBUF = "application/x-protobuf"


@router.post("/retrieve_future")
async def retrieve_future(body: RetrieveFuture, request: Request, api: Api, tenant: Who) -> Response:
    """What became of a request: its result, why it failed, or that it is still waiting and for what."""
    request_id, is_external = external.unmark(body.request_id)
    done = await api.result(request_id, tenant=tenant, timeout_s=api.settings.poll_s)
    if done is None:
        raise missing(body.request_id)
    if isinstance(done, StillWaiting):
        return _json(
            {
                "type": "try_again",
                "request_id": body.request_id,
                "queue_state": done.queue_state,
                "queue_state_reason": done.reason or None,
            }
        )
    if isinstance(done, CallFailure):
        return _json({"error": done.message, "category": done.category})
    if is_external:
        return _json(external.answer(done.result))
    wants_protobuf = _PROTOBUF in request.headers.get("accept", "") and done.kind in TO_PROTOBUF
    payload = await asyncio.to_thread(_encode, done, wants_protobuf)
    if body.allow_metadata_only and len(payload) > api.settings.announce_bytes:
        return _json({"status": "complete_metadata", "response_payload_size": len(payload)})
    return Response(payload, media_type=_PROTOBUF if wants_protobuf else "application/json")


def _encode(done: CallResult, wants_protobuf: bool) -> bytes:
    return TO_PROTOBUF[done.kind](done.result) if wants_protobuf else orjson.dumps(to_json_answer(done))


def _json(body: dict[str, object]) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")


@router.post("/cancel_future", status_code=204)
async def cancel_future(body: CancelFuture, api: Api, tenant: Who) -> Response:
    """A sample that nobody wants any more. Another tenant's, or one that is done, stays as it is, without a word."""
    await api.service.cancel(external.unmark(body.request_id)[0], tenant=tenant)
    return Response(status_code=204)
