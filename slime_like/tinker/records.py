"""The records of the server. Ids: a model's is `{session}:train:{model_seq_id}`, which clients make up themselves.

client's request -> Call -> (trainer: TenantPass ... | engines: SampleJob) -> CallResult -> client's future
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slime_like.records import LossRow


class Kind(enum.StrEnum):
    """What a call asks for; all but SAMPLE are a model's, and executed in the order of their seq_id."""

    CREATE_MODEL = "create_model"
    CREATE_FROM_STATE = "create_from_state"
    FORWARD = "forward"
    FORWARD_BACKWARD = "forward_backward"
    OPTIM_STEP = "optim_step"
    SAVE_WEIGHTS = "save_weights"
    SAVE_FOR_SAMPLER = "save_weights_for_sampler"
    LOAD_WEIGHTS = "load_weights"
    UNLOAD_MODEL = "unload_model"
    REFUSED = "refused"
    SAMPLE = "sample"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """What a client asked for. lora_rank 0: full parameters. lora_alpha None: the server's rule for a rank."""

    model_id: str
    tenant: str
    base_model: str
    lora_rank: int
    lora_alpha: float | None = None
    seed: int = 0
    train_attn: bool = True
    train_mlp: bool = True
    train_unembed: bool = True

    @property
    def notice(self) -> str:
        """What of it is not done, for the client; "" where all is."""
        if not self.lora_rank or not self.train_unembed:
            return ""
        return NO_UNEMBED


#: Engines score wrongly where adapters of the output layer meet in a batch (docs/lora.md), so none is trained.
NO_UNEMBED = (
    "train_unembed=True has no effect: adapters of this server are of attention and MLPs, the output layer has none"
    " (lora_rank=0 trains it). train_unembed=False says the same without this notice."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamSettings:
    """Of one optim_step. grad_clip_norm 0: gradients are not clipped."""

    learning_rate: float
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    grad_clip_norm: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleJob:
    """One request to a sampler. stop None: the model's end tokens; (): nothing stops it but max_tokens.

    prompt_targets: [P - 1, K] int64, tokens whose log-probs are wanted in the place of prompt tokens 1, 2, ...;
    NO_TOKEN: none, UNLISTED: none, and the sparse array that they came in does not have the cell.
    """

    sampler_id: str
    prompt: np.ndarray  # [P] int32
    num_samples: int = 1
    max_tokens: int | None = None  # None: what is left of the context
    temperature: float = 1.0
    top_k: int = -1
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] | tuple[int, ...] | None = None
    prompt_logprobs: bool = False
    prompt_logprobs_last_n: int | None = None  # of the last tokens only, the likeliest ones' too; None: of all
    topk_prompt_logprobs: int = 0
    topk_sample_logprobs: int = 0
    prompt_targets: np.ndarray | None = None


#: In SampleJob.prompt_targets.
NO_TOKEN, UNLISTED = -1, -2


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopLogprobs:
    """[N, K] the likeliest tokens at N positions and their log-probs, most likely first."""

    token_ids: np.ndarray  # int32
    logprobs: np.ndarray  # float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampledSequence:
    """One answer. stop_reason: "stop" or "length"."""

    tokens: np.ndarray  # [R] int32
    logprobs: np.ndarray  # [R] float32
    stop_reason: str
    topk: TopLogprobs | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleResult:
    """Of one SampleJob. weights: which the tokens are of, as engines name them."""

    sequences: tuple[SampledSequence, ...]
    prompt_logprobs: np.ndarray | None = None  # [P] float32, NaN for the first, and where none was asked for
    topk_prompt: TopLogprobs | None = None
    prompt_targets: np.ndarray | None = None  # [P - 1, K] float32, 0 where NO_TOKEN was, NaN where UNLISTED was
    prompt_cache_hit_tokens: int = 0
    weights: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """What a client wants done, before it has an id. fields: JSON of what the kind needs beside rows and sample.

    CREATE_MODEL {"spec": ModelSpec's fields}; CREATE_FROM_STATE {"spec", "path", "optimizer"}; FORWARD and
    FORWARD_BACKWARD {"loss", "config"} and rows; OPTIM_STEP {"adam": AdamSettings' fields}; SAVE_WEIGHTS {"name",
    "ttl_seconds", "overwrite", "user_metadata"}; SAVE_FOR_SAMPLER the same with "name" or, for a sampler that lives no
    longer than its session, "sampler_id" and "sampler_kind" ("snapshot", or "inflight": newer ones may stand for it);
    LOAD_WEIGHTS {"path", "optimizer"}; SAMPLE: sample.
    REFUSED {"message"}: a call that makes no sense; it fails in its turn, so that those after it do not wait for it.
    """

    kind: Kind
    tenant: str
    session_id: str
    model_id: str | None = None
    sampler_id: str | None = None
    seq_id: int | None = None
    fields: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rows: Sequence[LossRow] = ()
    sample: SampleJob | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallResult:
    """What became of a call. Of passes and samples `result` is a PassResult or SampleResult, of the others a dict.

    CREATE_MODEL {"model_id"}, with a "notice" of what is not done; CREATE_FROM_STATE, UNLOAD_MODEL {"model_id"},
    LOAD_WEIGHTS {"path", "model_id"}; OPTIM_STEP {"metrics"}; SAVE_WEIGHTS and SAVE_FOR_SAMPLER {"path", "size_bytes"},
    for a sampler of its own {"sampler_id"}.
    """

    kind: Kind
    result: Any


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallFailure:
    """Why there is no answer. category: "user", "server" or "unknown", as clients tell them apart."""

    kind: Kind
    category: str
    message: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class StillWaiting:
    """Not done yet. queue_state: "active", "paused_capacity" or "paused_rate_limit"."""

    queue_state: str = "active"
    reason: str = ""
