"""A model's requests. Each becomes a Call, and is answered with the id of its future."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

from fastapi import APIRouter, Request
from pydantic import ValidationError

from slime_like.tinker.api import bodies, external
from slime_like.tinker.api.context import Api, Context, Who
from slime_like.tinker.api.settings import ServedModel
from slime_like.tinker.api.wire.bounds import inflate
from slime_like.tinker.api.wire.requests import PassRequest, read_json_pass, read_pass
from slime_like.tinker.errors import Refused
from slime_like.tinker.records import AdamSettings, Call, Kind, ModelSpec
from slime_like.tinker.store import clients

router = APIRouter(prefix="/api/v1")

#: Of the request that makes a model, before those that its client counts from 1.
_FIRST = 0


async def _submit(api: Context, call: Call) -> dict[str, str]:
    await api.known.session(call.session_id, call.tenant)
    request_id = await api.submit(call)
    return {"request_id": request_id, "model_id": str(call.model_id)}


def _step(kind: Kind, tenant: str, body: bodies.Step, fields: dict[str, Any]) -> Call:
    session_id = clients.session_of(body.model_id)
    return Call(
        kind=kind, tenant=tenant, session_id=session_id, model_id=body.model_id, seq_id=body.seq_id, fields=fields
    )


def trainable(api: Context, name: str) -> ServedModel:
    """The base model of a name. Raises Refused (400) with those that there are."""
    model = api.settings.model(name)
    if model is None or not model.trainable:
        known = [model.name for model in api.settings.models if model.trainable]
        raise Refused(f"base_model {name[:200]!r} is not served for training; {', '.join(known)} is", status=400)
    return model


@router.post("/create_model")
async def create_model(body: bodies.CreateModel, api: Api, tenant: Who) -> dict[str, str]:
    """A new model: an adapter, or all parameters where there is no lora_config or its rank is 0."""
    base = trainable(api, body.base_model)
    lora = body.lora_config or bodies.LoraBody(rank=0)
    if lora.rank > base.max_lora_rank:
        raise Refused(f"lora rank {lora.rank}: this server takes up to {base.max_lora_rank}", status=400)
    model_id = f"{body.session_id}:train:{body.model_seq_id}"
    spec = ModelSpec(
        model_id=model_id,
        tenant=tenant,
        base_model=base.name,
        lora_rank=lora.rank,
        seed=lora.seed or 0,
        train_attn=lora.train_attn,
        train_mlp=lora.train_mlp,
        train_unembed=lora.train_unembed,
    )
    fields = {"spec": dataclasses.asdict(spec), "user_metadata": body.user_metadata or {}}
    return await _submit(
        api,
        Call(
            kind=Kind.CREATE_MODEL,
            tenant=tenant,
            session_id=body.session_id,
            model_id=model_id,
            seq_id=_FIRST,
            fields=fields,
        ),
    )


@router.post("/get_info")
async def get_info(body: bodies.OfModel, api: Api, tenant: Who) -> dict[str, Any]:
    """What a model is of."""
    row = await clients.get_model(api.rows, body.model_id, tenant)
    base = api.settings.model(row.base_model)
    data = {
        "arch": base.architecture if base else "",
        "model_name": row.base_model,
        "tokenizer_id": base.tokenizer if base else row.base_model,
    }
    return {
        "type": "get_info",
        "model_id": row.id,
        "model_data": data,
        "is_lora": row.lora_rank > 0,
        "lora_rank": row.lora_rank,
        "model_name": row.base_model,
        "optimizer_config": {"type": "adamw"},
    }


@router.post("/forward_backward")
async def forward_backward(request: Request, api: Api, tenant: Who) -> dict[str, str]:
    """A pass that adds gradients, or with forward_only none; protobuf, or JSON of clients before 0.25."""
    return await _pass(request, api, tenant, forward_only=False)


@router.post("/forward")
async def forward(request: Request, api: Api, tenant: Who) -> dict[str, str]:
    """A pass without gradients, of clients before 0.25."""
    return await _pass(request, api, tenant, forward_only=True)


async def _pass(request: Request, api: Context, tenant: str, *, forward_only: bool) -> dict[str, str]:
    body = await request.body()
    encoding, content = request.headers.get("content-encoding"), request.headers.get("content-type", "")
    # In a thread: a body of megabytes takes long enough for others to notice.
    wanted = await asyncio.to_thread(_decode, body, encoding, content, api.settings.limits)
    is_forward = forward_only or wanted.forward_only
    call = Call(
        kind=Kind.FORWARD if is_forward else Kind.FORWARD_BACKWARD,
        tenant=tenant,
        session_id=clients.session_of(wanted.model_id),
        model_id=wanted.model_id,
        seq_id=wanted.seq_id,
        fields={"loss": wanted.loss, "config": wanted.config},
        rows=wanted.rows,
    )
    return await _submit(api, call)


def _decode(body: bytes, encoding: str | None, content: str, limits) -> PassRequest:
    plain = inflate(body, encoding, limits.body_bytes)
    if content.startswith("application/x-protobuf"):
        return read_pass(plain, limits)
    try:
        return read_json_pass(bodies.JsonPass.model_validate_json(plain).model_dump(), limits)
    except ValidationError as error:
        raise Refused(_first_problem(error), status=422) from None


def _first_problem(error: ValidationError) -> str:
    problem = error.errors(include_url=False, include_input=False, include_context=False)[0]
    return f"{'.'.join(map(str, problem['loc'][:8]))}: {problem['msg']}"


@router.post("/optim_step")
async def optim_step(body: bodies.OptimStep, api: Api, tenant: Who) -> dict[str, str]:
    """One step of AdamW on the gradients that are there."""
    adam = AdamSettings(**body.adam_params.model_dump())
    return await _submit(api, _step(Kind.OPTIM_STEP, tenant, body, {"adam": dataclasses.asdict(adam)}))


def _saving(body: bodies.SaveWeights) -> dict[str, Any]:
    return {
        "ttl_seconds": body.ttl_seconds,
        "overwrite": body.overwrite,
        "user_metadata": body.user_metadata or {},
    }


def _name(body: bodies.SaveWeights) -> str:
    if body.path is None and body.seq_id is None:
        raise Refused("saved weights need a name (path)", status=400)
    return body.path or f"{body.seq_id:06d}"


@router.post("/save_weights")
async def save_weights(body: bodies.SaveWeights, api: Api, tenant: Who) -> dict[str, str]:
    """Weights and optimizer state, to go on from."""
    fields = {"name": _name(body), **_saving(body)}
    return await _submit(api, _step(Kind.SAVE_WEIGHTS, tenant, body, fields))


@router.post("/save_weights_for_sampler")
async def save_weights_for_sampler(body: bodies.SaveForSampler, api: Api, tenant: Who) -> dict[str, str]:
    """Weights to sample from, under a name, or as a sampler that lives as long as the session."""
    fields = _saving(body)
    if body.path is None and body.sampling_session_seq_id is not None:
        fields["sampler_id"] = f"{clients.session_of(body.model_id)}:sample:{body.sampling_session_seq_id}"
        fields["sampler_kind"] = body.kind
    else:
        fields["name"] = _name(body)
    return await _submit(api, _step(Kind.SAVE_FOR_SAMPLER, tenant, body, fields))


@router.post("/save_weights_external")
async def save_weights_external(body: bodies.SaveExternal, api: Api, tenant: Who) -> dict[str, str]:
    """Weights as files for elsewhere: what samplers load is PEFT's folder, or HF's, already."""
    if body.age_encryption_recipients:
        raise Refused("this server does not encrypt files; serve it by TLS", status=400)
    fields = {"name": _name(body), **_saving(body)}
    taken = await _submit(api, _step(Kind.SAVE_FOR_SAMPLER, tenant, body, fields))
    return {**taken, "request_id": external.mark(taken["request_id"])}


@router.post("/load_weights")
async def load_weights(body: bodies.LoadWeights, api: Api, tenant: Who) -> dict[str, str]:
    """Saved weights into a model that is there, or as the first request of a new one."""
    clients.read_path(body.path)
    if body.model_id is not None:
        if not await clients.is_own(api.rows, body.path, tenant):
            await clients.readable(api.rows, body.path, tenant)
        # Of the tenant's own it may be that a save before this one writes it first.
        step = bodies.Step(model_id=body.model_id, seq_id=body.seq_id)
        fields = {"path": body.path, "optimizer": body.optimizer}
        return await _submit(api, _step(Kind.LOAD_WEIGHTS, tenant, step, fields))
    if body.session_id is None or body.model_seq_id is None:
        raise Refused("load_weights needs model_id, or session_id and model_seq_id", status=400)
    checkpoint, owner = await clients.readable(api.rows, body.path, tenant)
    if body.base_model not in (None, owner.base_model):
        raise Refused(f"{body.path[:300]!r} is of {owner.base_model}, not of {str(body.base_model)[:200]}", status=400)
    if body.optimizer and not checkpoint.has_optimizer:
        raise Refused(f"{body.path[:300]!r} has no optimizer state. Fix: create it without", status=400)
    model_id = f"{body.session_id}:train:{body.model_seq_id}"
    spec = {**owner.spec, "model_id": model_id, "tenant": tenant}
    call = Call(
        kind=Kind.CREATE_FROM_STATE,
        tenant=tenant,
        session_id=body.session_id,
        model_id=model_id,
        seq_id=_FIRST,
        fields={
            "spec": spec,
            "path": body.path,
            "optimizer": body.optimizer,
            "user_metadata": body.user_metadata or {},
        },
    )
    return await _submit(api, call)


@router.post("/unload_model")
async def unload_model(body: bodies.OfModel, api: Api, tenant: Who) -> dict[str, str]:
    """Forget a model; what was saved of it stays."""
    return await _submit(api, _step(Kind.UNLOAD_MODEL, tenant, bodies.Step(model_id=body.model_id), {}))
