"""JSON bodies of clients. Fields that are not here are left out, as clients of another version send others."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, AliasChoices, BaseModel, ConfigDict, Field

_MAX_METADATA_BYTES = 16 * 1024
_YEAR_S = 365 * 24 * 3600


def _small(metadata: dict[str, Any]) -> dict[str, Any]:
    # In UTF-8, as it is answered later: half a surrogate pair has none, and raises a ValueError here.
    size = len(json.dumps(metadata, ensure_ascii=False).encode())
    if size > _MAX_METADATA_BYTES:
        raise ValueError(f"metadata of {size} bytes; {_MAX_METADATA_BYTES} are taken")
    return metadata


#: No control characters: PostgreSQL's texts have no NUL.
_PRINTED = r"^[^\x00-\x1f\x7f]*$"
Id = Annotated[str, Field(min_length=1, max_length=128, pattern=_PRINTED)]
Path = Annotated[str, Field(min_length=1, max_length=512, pattern=_PRINTED)]
#: Of a checkpoint: it becomes a folder's name.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,199}$")]
Counter = Annotated[int, Field(ge=0, lt=2**31)]
Metadata = Annotated[dict[str, Any], AfterValidator(_small)]
TimeToLive = Annotated[int, Field(ge=1, le=10 * _YEAR_S)]
_Positive = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]


class ClientBody(BaseModel):
    """Of all bodies. Clients name fields `model_…`."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=(), hide_input_in_errors=True)


class CreateSession(ClientBody):
    tags: list[Annotated[str, Field(max_length=256, pattern=_PRINTED)]] = Field(default=[], max_length=64)
    user_metadata: Metadata = {}
    sdk_version: Annotated[str, Field(max_length=32, pattern=_PRINTED)] | None = None
    project_id: Annotated[str, Field(max_length=128, pattern=_PRINTED)] | None = None
    display_name: Annotated[str, Field(max_length=256, pattern=_PRINTED)] | None = None


class Heartbeat(ClientBody):
    session_id: Id


class FinishReason(ClientBody):
    type: Literal["success", "errored", "interrupted"] = "success"


class FinishSession(ClientBody):
    reason: FinishReason = FinishReason()


class LoraBody(ClientBody):
    rank: Annotated[int, Field(ge=0, le=4096)]
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    train_unembed: bool = True
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerBody(ClientBody):
    type: Literal["adamw"] = "adamw"


class CreateModel(ClientBody):
    session_id: Id
    model_seq_id: Counter
    base_model: Path
    lora_config: LoraBody | None = None
    optimizer_config: OptimizerBody = OptimizerBody()
    user_metadata: Metadata | None = None


class OfModel(ClientBody):
    model_id: Id


class Step(ClientBody):
    """What all of a model's requests have; seq_id counts them."""

    model_id: Id
    seq_id: Annotated[int, Field(ge=1, lt=2**31)] | None = None


class AdamBody(ClientBody):
    learning_rate: _Positive = 1e-4
    beta1: _Share = 0.9
    beta2: _Share = 0.95
    eps: _Positive = 1e-12
    weight_decay: _Positive = 0.0
    grad_clip_norm: _Positive = 0.0


class OptimStep(Step):
    adam_params: AdamBody


class SaveWeights(Step):
    path: Name | None = None
    ttl_seconds: TimeToLive | None = None
    overwrite: bool = False
    user_metadata: Metadata | None = None


class SaveForSampler(SaveWeights):
    sampling_session_seq_id: Counter | None = None
    kind: Literal["snapshot", "inflight"] = "snapshot"


class SaveExternal(SaveWeights):
    """As files for elsewhere."""

    age_encryption_recipients: list[str] | None = None


class LoadWeights(ClientBody):
    """Into a model (model_id), or as a new one (session_id and model_seq_id)."""

    model_id: Id | None = None
    seq_id: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    session_id: Id | None = None
    model_seq_id: Counter | None = None
    path: Path
    optimizer: bool
    base_model: Path | None = None
    optimizer_config: OptimizerBody | None = None
    user_metadata: Metadata | None = None


class TextChunk(ClientBody):
    tokens: list[int]
    type: Literal["encoded_text"] = "encoded_text"


class PromptBody(ClientBody):
    chunks: list[TextChunk] = Field(max_length=4096)


class JsonTensor(ClientBody):
    data: list[float] | list[int]
    dtype: str
    shape: list[int] | None = None
    sparse_crow_indices: list[int] | None = None
    sparse_col_indices: list[int] | None = None


class JsonDatum(ClientBody):
    model_input: PromptBody
    loss_fn_inputs: Annotated[dict[str, JsonTensor], Field(max_length=64)]


class JsonPassInput(ClientBody):
    data: list[JsonDatum]
    loss_fn: Annotated[str, Field(max_length=64)]
    loss_fn_config: Annotated[dict[str, float | str], Field(max_length=64)] | None = None


class JsonPass(ClientBody):
    """forward_backward or forward of clients before 0.25."""

    model_id: Id
    seq_id: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    data: JsonPassInput = Field(validation_alias=AliasChoices("forward_backward_input", "forward_input"))


class CreateSamplingSession(ClientBody):
    session_id: Id
    sampling_session_seq_id: Counter
    base_model: Path | None = None
    model_path: Path | None = None


class SamplingParams(ClientBody):
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: str | list[str] | list[int] | None = None
    temperature: _Positive = 1.0
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] = -1
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0


class SampleBody(ClientBody):
    sampling_session_id: Id
    seq_id: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    num_samples: Annotated[int, Field(ge=1)] = 1
    prompt: PromptBody
    sampling_params: SamplingParams
    prompt_logprobs: bool | None = None
    topk_prompt_logprobs: Annotated[int, Field(ge=0, le=1024)] = 0
    topk_sample_logprobs: Annotated[int, Field(ge=0, le=1024)] = 0
    target_prompt_logprobs: JsonTensor | None = None
    prompt_alt_tokens_k: int = 0
    prompt_logprobs_last_n: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    record_stability_info: bool | None = None


class RetrieveFuture(ClientBody):
    request_id: Id
    allow_metadata_only: bool = False


class CancelFuture(ClientBody):
    request_id: Id


class TinkerPath(ClientBody):
    tinker_path: Path


class SetTimeToLive(ClientBody):
    ttl_seconds: TimeToLive | None = None
