"""What a tenant has, and may change of it: runs, saved weights, sessions."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from slime_like.tinker.api import external
from slime_like.tinker.api.bodies import SetTimeToLive, TinkerPath
from slime_like.tinker.api.context import Api, Who
from slime_like.tinker.store import clients, listings
from slime_like.tinker.store.tables import CheckpointRow

router = APIRouter(prefix="/api/v1")

Limit = Annotated[int, Query(ge=1, le=1000)]
Offset = Annotated[int, Query(ge=0, lt=2**31)]
#: CheckpointRow.kind -> the folder of its path.
FOLDERS = {"training": "weights", "sampler": "sampler_weights"}


def moment(seconds: float | None) -> str | None:
    """A time as JSON has it."""
    return None if seconds is None else datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()


def _texts(metadata: Mapping[str, Any]) -> dict[str, str] | None:
    """Clients read metadata of texts alone."""
    return {key: value if isinstance(value, str) else json.dumps(value) for key, value in metadata.items()} or None


def _checkpoint(row: CheckpointRow) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{FOLDERS[row.kind]}/{row.name}",
        "checkpoint_type": row.kind,
        "time": moment(row.created),
        "tinker_path": row.path,
        "size_bytes": row.size_bytes,
        "public": row.public,
        "user_metadata": _texts(row.user_metadata),
        "expires_at": moment(row.expires),
    }


def _run(run: listings.Run) -> dict[str, Any]:
    model = run.model
    return {
        "training_run_id": model.id,
        "base_model": model.base_model,
        "model_owner": model.tenant,
        "is_lora": model.lora_rank > 0,
        "corrupted": False,
        "lora_rank": model.lora_rank or None,
        "last_request_time": moment(model.last_request),
        "last_checkpoint": _checkpoint(run.last) if run.last else None,
        "last_sampler_checkpoint": _checkpoint(run.last_sampler) if run.last_sampler else None,
        "user_metadata": _texts(model.user_metadata),
    }


def _cursor(limit: int, offset: int, total: int) -> dict[str, int]:
    return {"limit": limit, "offset": offset, "total_count": total}


@router.get("/training_runs")
async def training_runs(api: Api, tenant: Who, limit: Limit = 20, offset: Offset = 0) -> dict[str, Any]:
    """Runs, newest first."""
    listing = await listings.list_runs(api.rows, tenant, limit=limit, offset=offset)
    return {
        "training_runs": [_run(run) for run in listing.rows],
        "cursor": _cursor(limit, offset, listing.total),
    }


@router.get("/training_runs/{model_id}")
async def training_run(model_id: str, api: Api, tenant: Who) -> dict[str, Any]:
    """One run."""
    return _run(await listings.get_run(api.rows, model_id, tenant))


@router.get("/training_runs/{model_id}/checkpoints")
async def checkpoints_of_run(model_id: str, api: Api, tenant: Who) -> dict[str, Any]:
    """All that was saved of a run."""
    listing = await listings.list_checkpoints(api.rows, tenant, model_id=model_id)
    return {"checkpoints": [_checkpoint(row) for row in listing.rows]}


@router.get("/checkpoints")
async def checkpoints(api: Api, tenant: Who, limit: Limit = 100, offset: Offset = 0) -> dict[str, Any]:
    """All that was saved, newest first."""
    listing = await listings.list_checkpoints(api.rows, tenant, limit=limit, offset=offset)
    return {
        "checkpoints": [_checkpoint(row) for row in listing.rows],
        "cursor": _cursor(limit, offset, listing.total),
    }


def path_of(model_id: str, folder: str, name: str) -> str:
    """`tinker://…` of a checkpoint that a route names. Raises Refused (400) if there are no such folders."""
    path = f"{clients.PREFIX}{model_id}/{external.SAME_AS if folder == external.FOLDER else folder}/{name}"
    clients.read_path(path)
    return path


_CHECKPOINT = "/training_runs/{model_id}/checkpoints/{folder}/{name}"


@router.delete(_CHECKPOINT, status_code=204)
async def delete(model_id: str, folder: str, name: str, api: Api, tenant: Who) -> Response:
    """Saved weights go."""
    await listings.delete_checkpoint(api.rows, path_of(model_id, folder, name), tenant)
    return Response(status_code=204)


@router.post(f"{_CHECKPOINT}/publish", status_code=204)
async def publish(model_id: str, folder: str, name: str, api: Api, tenant: Who) -> Response:
    """Other tenants may use them by their path."""
    await listings.set_public(api.rows, path_of(model_id, folder, name), tenant, public=True)
    return Response(status_code=204)


@router.delete(f"{_CHECKPOINT}/publish", status_code=204)
async def unpublish(model_id: str, folder: str, name: str, api: Api, tenant: Who) -> Response:
    """Other tenants may not any more."""
    await listings.set_public(api.rows, path_of(model_id, folder, name), tenant, public=False)
    return Response(status_code=204)


@router.put(f"{_CHECKPOINT}/ttl", status_code=204)
async def time_to_live(model_id: str, folder: str, name: str, body: SetTimeToLive, api: Api, tenant: Who) -> Response:
    """How long they are kept from now on."""
    await listings.set_time_to_live(api.rows, path_of(model_id, folder, name), tenant, body.ttl_seconds)
    return Response(status_code=204)


@router.post("/weights_info")
async def weights_info(body: TinkerPath, api: Api, tenant: Who) -> dict[str, Any]:
    """What saved weights are of, one's own or public ones."""
    clients.read_path(body.tinker_path)
    _, model = await clients.readable(api.rows, body.tinker_path, tenant)
    trained = {key: model.spec[key] for key in ("train_mlp", "train_attn")}
    return {
        "base_model": model.base_model,
        "is_lora": model.lora_rank > 0,
        "lora_rank": model.lora_rank or None,
        "optimizer_config": {"type": "adamw"},
        "train_unembed": model.lora_rank == 0,  # whatever was asked for: ModelSpec.notice
        **trained,
    }


@router.get("/sessions")
async def sessions(api: Api, tenant: Who, limit: Limit = 20, offset: Offset = 0) -> dict[str, Any]:
    """Ids, newest first."""
    listing = await listings.list_sessions(api.rows, tenant, limit=limit, offset=offset)
    return {"sessions": [row.id for row in listing.rows]}


@router.get("/sessions/{session_id}")
async def session(session_id: str, api: Api, tenant: Who) -> dict[str, Any]:
    """What a session has."""
    row, models, samplers = await listings.session_parts(api.rows, session_id, tenant)
    return {
        "training_run_ids": models,
        "sampler_ids": samplers,
        "user_metadata": _texts(row.user_metadata),
        "display_name": row.display_name,
    }
