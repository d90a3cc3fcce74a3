"""Samplers, and what is asked of them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from slime_like.tinker.api import bodies
from slime_like.tinker.api.context import Api, Context, Who
from slime_like.tinker.api.wire.requests import read_prompt
from slime_like.tinker.api.wire.tensors import TensorReader
from slime_like.tinker.errors import Refused
from slime_like.tinker.records import Call, Kind, SampleJob
from slime_like.tinker.store import clients

router = APIRouter(prefix="/api/v1")


def sampleable(api: Context, name: str) -> str:
    """The name of a base model. Raises Refused (400) with those that there are."""
    model = api.settings.model(name)
    if model is None or not model.sampleable:
        known = [model.name for model in api.settings.models if model.sampleable]
        raise Refused(f"base_model {name[:200]!r} is not served for sampling; {', '.join(known)} is", status=400)
    return model.name


@router.post("/create_sampling_session")
async def create_sampling_session(body: bodies.CreateSamplingSession, api: Api, tenant: Who) -> dict[str, str]:
    """A sampler of saved weights, or of a base model."""
    sampler_id = f"{body.session_id}:sample:{body.sampling_session_seq_id}"
    if body.model_path is not None:
        clients.read_path(body.model_path)
        base_model = ""
    elif body.base_model is not None:
        base_model = sampleable(api, body.base_model)
    else:
        raise Refused("a sampling session needs model_path or base_model", status=400)
    await clients.begin_sampler(api.rows, sampler_id, tenant, base_model=base_model, model_path=body.model_path)
    return {"sampling_session_id": sampler_id, "type": "create_sampling_session"}


@router.get("/samplers/{sampler_id}")
async def get_sampler(sampler_id: str, api: Api, tenant: Who) -> dict[str, str | None]:
    """What a sampler is of."""
    row = await clients.get_sampler(api.rows, sampler_id, tenant)
    return {"sampler_id": row.id, "base_model": row.base_model, "model_path": row.model_path}


@router.post("/asample")
async def asample(body: bodies.SampleBody, api: Api, tenant: Who) -> dict[str, Any]:
    """Ask for answers; each has an id of its own, which clients look for."""
    job = _job(body, api)
    row = await api.known.sampler(body.sampling_session_id, tenant)
    call = Call(
        kind=Kind.SAMPLE,
        tenant=tenant,
        session_id=row.session_id,
        sampler_id=row.id,
        seq_id=body.seq_id,
        sample=job,
    )
    request_id = await api.submit(call)
    ids = [f"{request_id}:{place}" for place in range(body.num_samples)]
    return {"request_id": request_id, "sample_sequence_ids": ids}


def _job(body: bodies.SampleBody, api: Context) -> SampleJob:
    limits = api.settings.limits
    if body.prompt_alt_tokens_k:
        raise Refused(
            "prompt_alt_tokens_k: the engines draw tokens behind a prompt, not at each of its positions. Fix:"
            " topk_prompt_logprobs, the likeliest tokens there and their log-probs",
            status=400,
        )
    if body.record_stability_info:
        raise Refused("record_stability_info: nothing is recorded for StableReinforce, a loss of the hosted service's",
                      status=400)  # fmt: skip
    if body.prompt_logprobs_last_n is not None and not body.prompt_logprobs:
        raise Refused("prompt_logprobs_last_n is about prompt_logprobs, which are not asked for", status=400)
    targets = body.target_prompt_logprobs
    if body.num_samples > limits.num_samples:
        raise Refused(f"num_samples {body.num_samples}: up to {limits.num_samples} are taken", status=400)
    params = body.sampling_params
    if params.top_k == 0:
        raise Refused("top_k 0 leaves no token; -1 is all of them", status=400)
    return SampleJob(
        sampler_id=body.sampling_session_id,
        prompt=read_prompt((chunk.model_dump() for chunk in body.prompt.chunks), limits),
        num_samples=body.num_samples,
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        seed=params.seed,
        stop=read_stop(params.stop, limits.stop_sequences, limits.text_characters),
        prompt_logprobs=bool(body.prompt_logprobs),
        topk_prompt_logprobs=body.topk_prompt_logprobs,
        prompt_logprobs_last_n=body.prompt_logprobs_last_n,
        topk_sample_logprobs=body.topk_sample_logprobs,
        prompt_targets=(
            None
            if targets is None
            else TensorReader(limits).targets_from_json(targets.model_dump(), "target_prompt_logprobs")
        ),
    )


def read_stop(
    stop: str | list[str] | list[int] | None, most: int, most_characters: int
) -> tuple[str, ...] | tuple[int, ...] | None:
    """SampleJob's stop. Raises Refused (400): too many, or an empty text, which everything ends with."""
    if stop is None:
        return None
    stops = (stop,) if isinstance(stop, str) else tuple(stop)
    if len(stops) > most:
        raise Refused(f"{len(stops)} stop sequences; up to {most} are taken", status=400)
    if any(isinstance(one, str) and not 1 <= len(one) <= most_characters for one in stops):
        raise Refused(f"a stop sequence has 1 to {most_characters} characters", status=400)
    return stops  # type: ignore[return-value]
