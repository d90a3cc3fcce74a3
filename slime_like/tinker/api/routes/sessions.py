"""A client's process: what it may ask for, its session, and how long that lives."""

from __future__ import annotations

import uuid

from fastapi import APIRouter, Request, Response

from slime_like.tinker.api.bodies import CreateSession, FinishSession, Heartbeat
from slime_like.tinker.api.context import Api, Who
from slime_like.tinker.records import NO_UNEMBED
from slime_like.tinker.store import clients

router = APIRouter(prefix="/api/v1")

#: Ids of sessions that clients begin, from their own key of the request.
_NAMESPACE = uuid.UUID("5d3f6a52-6c0b-4c0e-9a3e-0d2a3b1c7f10")


@router.post("/client/config")
async def client_config(api: Api) -> dict[str, object]:
    """Switches of clients. Those before 0.25 send protobuf, and load a state without creating a model first, only if
    asked.
    """
    return {
        "parallel_fwdbwd_chunks": True,
        "proto_write_fwdbwd": api.settings.protobuf_passes,
        "fwd_via_fwdbwd": api.settings.protobuf_passes,
        "proto_compress_fwdbwd": api.settings.compress_passes,
        "create_model_via_load_weights": True,
        "sample_max_concurrent_requests": api.settings.client_samples,
    }


@router.post("/client/dynamic_config")
async def dynamic_config() -> dict[str, object]:
    """Switches that clients ask for again from time to time."""
    return {"refresh_interval_sec": 300, "sample_cancel_enabled": True, "sample_cancel_max_batch_size": 64}


@router.get("/healthz")
async def health() -> dict[str, str]:
    """That the server answers."""
    return {"status": "ok"}


@router.get("/get_server_capabilities")
async def capabilities(api: Api) -> dict[str, object]:
    """The base models."""
    models = [
        {
            "model_name": model.name,
            "max_context_length": model.context_length,
            "trainable": model.trainable,
            "sampleable": model.sampleable,
        }
        for model in api.settings.models
    ]
    return {"supported_models": models}


@router.post("/create_session")
async def create_session(body: CreateSession, request: Request, api: Api, tenant: Who) -> dict[str, str]:
    """A client's session; the same one for a request that is sent again."""
    again = request.headers.get("x-idempotency-key")
    session_id = str(uuid.uuid5(_NAMESPACE, f"{tenant} {again}") if again else uuid.uuid4())
    await clients.begin_session(api.rows, session_id, tenant, body.model_dump())
    # The library logs it; what a model's creation answers it does not show.
    return {"session_id": session_id, "type": "create_session", "warning_message": NO_UNEMBED}


@router.post("/session_heartbeat")
async def heartbeat(body: Heartbeat, api: Api, tenant: Who) -> dict[str, str]:
    """That the client lives."""
    await clients.beat(api.rows, body.session_id, tenant)
    return {"type": "session_heartbeat"}


@router.post("/sessions/{session_id}/finish", status_code=204)
async def finish(session_id: str, body: FinishSession, api: Api, tenant: Who) -> Response:
    """The client's end: its models are released."""
    await clients.finish_session(api.rows, session_id, tenant, body.reason.type)
    api.known.forget(session_id, tenant)
    return Response(status_code=204)


@router.post("/telemetry")
async def telemetry() -> dict[str, str]:
    """What clients tell of themselves is not kept."""
    return {"status": "accepted"}
