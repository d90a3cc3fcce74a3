"""The records that flow through a step, and the words we use for them. Read this first.

Glossary
  prompt          one row of the data set, rendered to token ids
  sample          one answer to one prompt: prompt and response tokens in one flat array
  group           all samples of one prompt (n_samples_per_prompt of them, fewer after filtering)
  rollout step    generate rollout_batch_size groups and score them
  train step      one optimizer step over global_batch_size samples (num_steps_per_rollout per rollout step)
  weight version  counts weight syncs; version 0 is what the engine loaded from disk, the first sync sends 1

    Prompt -> Sample -> SampleGroup -> TrainSample -> StepReport             generate, score, train
    weights -> EngineEndpoint -> SyncReceipt (with a DeltaCount)             sync

Records are frozen: a stage that learns something returns a new record (`dataclasses.replace`).
Arrays of one sample all have the same length T = prompt tokens + response tokens; position t describes tokens[t].
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

#: A sample's status: how its generation ended.
COMPLETED, TRUNCATED, ABORTED, FAILED = "completed", "truncated", "aborted", "failed"


@dataclasses.dataclass(frozen=True)
class SupervisedTokens:
    """What is trained on of a row that holds its answers (`--loss-type sft_loss`).

    Example: SupervisedTokens(np.array([11, 12, 21, 2]), np.array([0, 0, 1, 1]))
    """

    tokens: np.ndarray  # [T] int32
    loss_mask: np.ndarray  # [T] int8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """One row of the data set, ready to be sent to an engine.

    Example: Prompt(index=3, text="<|im_start|>user\\nsort 7146…", tokens=np.array([…]), label="1467", metadata={})
    """

    index: int  # position in the stream of prompts (epochs counted through): unique within a run
    text: str  # after the chat template; empty in supervised rows
    tokens: np.ndarray  # [P] int32
    label: Any = None
    metadata: dict = dataclasses.field(default_factory=dict)
    supervised: tuple[SupervisedTokens, ...] = ()  # supervised rows only: several where a template rewrites history
    messages: list[dict] | None = None  # the prompt before the chat template; None where no template was used


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sample:
    """One answer to one prompt, flat: no prompt/response split, the loss mask says what is trained on.

    Example (prompt of 2 tokens, response of 3):
      tokens          [11, 12, 21, 22, 2]
      loss_mask       [ 0,  0,  1,  1, 1]
      engine_logprobs [ 0,  0, -.3, -.1, -.7]   log p(tokens[t] | tokens[<t]); 0 where not generated
      weight_versions [-1, -1,  4,  4, 4]        -1 where not generated
    """

    prompt_index: int
    sample_index: int  # within the group
    tokens: np.ndarray  # [T] int32
    loss_mask: np.ndarray  # [T] int8
    engine_logprobs: np.ndarray  # [T] float32
    weight_versions: np.ndarray  # [T] int32
    response: str  # decoded text of the generated part
    status: str = COMPLETED
    label: Any = None
    metadata: dict = dataclasses.field(default_factory=dict)
    reward: float | None = None  # None until scored
    #: "rule" and "model", unweighted, and "overlong", where a reward has several
    reward_parts: dict[str, float] = dataclasses.field(default_factory=dict)
    error: str | None = None  # why status is "failed"
    routed_experts: np.ndarray | None = None  # see TrainSample; None: not asked for (--use-rollout-routing-replay)
    #: within the episode, where one answer gives several samples: they share sample_index, and a reward
    segment_index: int = 0

    def __post_init__(self):
        length, experts = len(self.tokens), self.routed_experts
        if (
            not length == len(self.loss_mask) == len(self.engine_logprobs) == len(self.weight_versions)
            or experts is not None
            and len(experts) != length
        ):
            names = ("tokens", "loss_mask", "engine_logprobs", "weight_versions", "routed_experts")
            lengths = {name: len(getattr(self, name)) for name in names if getattr(self, name) is not None}
            raise ValueError(f"sample {self.prompt_index}/{self.sample_index}: arrays differ in length: {lengths}")

    @property
    def num_response_tokens(self) -> int:
        """Tokens that are trained on."""
        return int(np.count_nonzero(self.loss_mask))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampleGroup:
    """All samples of one prompt; what advantages are normalised over: its episodes, each counted once."""

    prompt: Prompt
    samples: tuple[Sample, ...]

    @property
    def episodes(self) -> tuple[tuple[Sample, ...], ...]:
        """The samples by sample_index: one each, or the segments of an episode in their order."""
        parts: dict[int, list[Sample]] = {}
        for sample in self.samples:
            parts.setdefault(sample.sample_index, []).append(sample)
        return tuple(tuple(segments) for segments in parts.values())

    @property
    def rewards(self) -> np.ndarray:
        """[G] float64, one an episode: its last segment's. Raises ValueError if one is unscored."""
        last = [segments[-1] for segments in self.episodes]
        missing = [sample.sample_index for sample in last if sample.reward is None]
        if missing:
            raise ValueError(f"prompt {self.prompt.index}: samples {missing} have no reward yet")
        return np.array([sample.reward for sample in last], dtype=np.float64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainSample:
    """What a trainer needs of one sample; put once in the object store, arrays as in Sample."""

    prompt_index: int
    sample_index: int
    tokens: np.ndarray  # [T] int32
    loss_mask: np.ndarray  # [T] int8; position t weighs the loss of predicting tokens[t]; [0] is never trained
    engine_logprobs: np.ndarray  # [T] float32
    weight_versions: np.ndarray  # [T] int32
    reward: float
    #: [T] float32: what each token's log-prob is pushed by; 0 where not trained. float64 where trainers compute on with
    #: them (whitening, a KL).
    advantages: np.ndarray
    #: [T] float32: multiplies each token's share of a loss or mean; 1 where trained, 0 elsewhere, unless a client says
    #: otherwise
    weights: np.ndarray
    #: [T] float32 like engine_logprobs; None where the trainer holds the reference itself
    reference_logprobs: np.ndarray | None = None
    #: [T] float32: the critic's value of the state in which tokens[t] was chosen, entry 0 is 0; ppo only
    values: np.ndarray | None = None
    #: [T] float32: log-prob of the policy minus the reference's, before training; with --kl-coef only
    kl: np.ndarray | None = None
    #: [T, layers, experts per token] int8 or int16: the experts that processed tokens[t] in the engine, any number in a
    #: layer without experts. -1 where the engine does not say: always for the last token, which it sampled and did not
    #: process.
    routed_experts: np.ndarray | None = None
    #: [T] float32: log-prob of the policy minus the teacher's, before training; with --use-opd only
    distillation: np.ndarray | None = None
    metadata: dict = dataclasses.field(default_factory=dict)  # Sample.metadata, for a user's own loss and mean


def routing_fault(experts: np.ndarray, expert_layers: Sequence[int], num_experts: int) -> str | None:
    """What is wrong with a sample's routed experts [T, layers, experts per token]; None if nothing is.

    In each of expert_layers a token has that many different experts of the model's, or -1 for all of them: nobody says.
    So layers of zeros, which a capture that failed leaves, are wrong wherever a token has more than one expert.
    """
    # By columns: comparing whole ones pair by pair is faster than sorting each token's few experts.
    columns = np.ascontiguousarray(np.moveaxis(experts[:, list(expert_layers)], -1, 0))
    unsaid = (columns == -1).all(axis=0)
    wrong = (columns < 0).any(axis=0) | (columns >= num_experts).any(axis=0)
    for first, second in itertools.combinations(range(len(columns)), 2):
        wrong |= columns[first] == columns[second]
    wrong &= ~unsaid
    if not wrong.any():
        return None
    token, place = np.argwhere(wrong)[0]
    what = f"layer {expert_layers[place]}, token {token} has the experts {columns[:, token, place].tolist()}"
    return f"{what}, not {len(columns)} different ones of 0 to {num_experts - 1} ({wrong.sum()} such tokens and layers)"


def per_token(value: float, loss_mask: np.ndarray, dtype: type[np.floating] = np.float32) -> np.ndarray:
    """[T]: `value` at every trained token, 0 elsewhere.

    Example: .5, [1, 0, 1] -> [0, 0, .5]; nothing predicts the first token.
    """
    return per_token_of_each([value], [loss_mask], dtype)[0]


def per_token_of_each(
    values: Sequence[float], loss_masks: Sequence[np.ndarray], dtype: type[np.floating] = np.float32
) -> list[np.ndarray]:
    """per_token of each sample, all at once: views of one array."""
    if not len(values):
        return []
    lengths = [len(mask) for mask in loss_masks]
    stops = np.cumsum(lengths)
    starts = stops - lengths
    trained = np.concatenate(loss_masks) != 0
    trained[starts[np.asarray(lengths) > 0]] = False
    rows = np.where(trained, np.repeat(np.asarray(values, dtype), lengths), dtype(0))
    return [rows[start:stop] for start, stop in zip(starts.tolist(), stops.tolist(), strict=True)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossRow:
    """One datum of a client's loss: what the model reads, and what each position is scored on.

    Unlike in TrainSample a position's target is given, and need not be the next token; K of them where targets are two-
    dimensional. Example: LossRow(tokens=[11, 12], targets=[12, 2], inputs={"weights": [0., 1.]})
    """

    tokens: np.ndarray  # [T] int32
    targets: np.ndarray  # [T] or [T, K] int64: position t is scored on log p(targets[t] | tokens[<=t])
    #: what the loss reads of each target, by clients' names ("weights", "logprobs", "advantages"): float32, as targets
    inputs: Mapping[str, np.ndarray]

    def __post_init__(self):
        shapes = {"targets": self.targets.shape} | {name: array.shape for name, array in self.inputs.items()}
        if self.targets.shape[:1] != self.tokens.shape or any(s != self.targets.shape for s in shapes.values()):
            raise ValueError(f"a datum of {self.tokens.shape} tokens has arrays of other shapes: {shapes}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TenantPass:
    """A pass over a tenant's rows. loss: one of PLAIN_LOSSES, a sum over targets; config: its numbers."""

    weights: str  # the tenant's
    rows: tuple[LossRow, ...]
    loss: str
    config: Mapping[str, float] = dataclasses.field(default_factory=dict)
    forward_only: bool = False  # no gradients are added


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassResult:
    """What a pass gave. metrics: "loss", summed over all targets, and what else the loss reports."""

    log_probs: list[np.ndarray]  # of each row, float32, shaped as its targets
    metrics: dict[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepReport:
    """What one rollout step's training did; equal on every rank. Keys are metric names (`train/loss` …)."""

    step: int
    num_train_steps: int
    num_samples: int
    num_tokens: int
    metrics: dict[str, float]


@dataclasses.dataclass(frozen=True)
class WeightsRef:
    """Which weights: the base model, or an adapter over it, at one version.

    Carried by all that holds, sends, proves or was made by weights.
    The name is what an engine serves the weights under; `base` is the whole model. Example:
    str(WeightsRef("policy", 7)) == "policy@7"
    """

    name: str = "base"
    version: int = 0

    def __str__(self) -> str:
        return f"{self.name}@{self.version}"

    def next(self) -> WeightsRef:
        """The same weights after one more sync."""
        return dataclasses.replace(self, version=self.version + 1)


#: What a trainer trains, and the frozen weights that it may hold beside them. A trainer holds one version of each name.
BASE, REFERENCE, TEACHER = WeightsRef(), WeightsRef("reference"), WeightsRef("teacher")
#: What engines serve the policy's adapters as, where they are sent without the base.
POLICY = WeightsRef("policy")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineEndpoint:
    """How to reach one engine, and how many ranks it has."""

    index: int
    url: str
    api_key: str | None = dataclasses.field(default=None, repr=False)
    tp_size: int = 1
    external: bool = False
    receiver_url: str | None = None  # of the receiver beside it, with --update-weight-mode delta
    receiver_key: str | None = dataclasses.field(default=None, repr=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaCount:
    """What a delta sync sent to one engine: the difference, or everything if no engine could take a difference.

    num_changed of num_elements were different, both 0 if nobody could take a difference. full_engines: those that got
    everything.
    """

    num_bytes: int = 0
    num_changed: int = 0
    num_elements: int = 0
    full_engines: frozenset[int] = frozenset()

    def __add__(self, other: DeltaCount) -> DeltaCount:
        return DeltaCount(
            num_bytes=self.num_bytes + other.num_bytes,
            num_changed=self.num_changed + other.num_changed,
            num_elements=self.num_elements + other.num_elements,
            full_engines=self.full_engines | other.full_engines,
        )

    def metrics(self) -> dict[str, float]:
        """For metrics.jsonl."""
        metrics = {"sync/delta_bytes": float(self.num_bytes), "sync/full_engines": float(len(self.full_engines))}
        return metrics | ({"sync/changed_share": self.num_changed / self.num_elements} if self.num_elements else {})


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyncReceipt:
    """What one weight sync moved. digest: order-independent hash over (name, dtype, shape, bytes) of every tensor.

    engines_proven: how many engines' own digests were found equal to what was sent, in verify_seconds;
    tensors_unproven: how many tensors were left out, because it is not known where an engine keeps them.
    probe_difference: largest mean |log-prob difference| of a fixed prompt between an engine and the trainer, where this
    sync was probed, in probe_seconds.
    bound_share: what sending (in `seconds`) would take at the rate that bounds the transport, over what it took; None
    where that is unknown.
    """

    weights: WeightsRef
    transport: str
    num_tensors: int
    num_bytes: int
    seconds: float
    digest: str
    bound_share: float | None = None
    engines_proven: int = 0
    tensors_unproven: int = 0
    verify_seconds: float = 0.0
    probe_difference: float | None = None
    probe_seconds: float = 0.0
    delta: DeltaCount | None = None

    @property
    def version(self) -> int:
        """Of the weights."""
        return self.weights.version

    def metrics(self) -> dict[str, float | str]:
        """For metrics.jsonl, without the seconds of the whole sync (memory that changes hands, pauses, proofs), which
        only its caller knows."""
        metrics: dict[str, float | str] = {
            "sync/version": self.version,
            "sync/bytes": self.num_bytes,
            "sync/tensors": self.num_tensors,
            "sync/engines_proven": self.engines_proven,
            "sync/tensors_unproven": self.tensors_unproven,
            "sync/send_seconds": self.seconds,
            "sync/verify_seconds": self.verify_seconds,
            "sync/digest": self.digest,
            "sync/transport": self.transport,
        }
        if self.bound_share is not None:
            metrics["sync/bound_share"] = self.bound_share
        if self.probe_difference is not None:
            metrics["sync/probe_logprob_abs_diff"] = self.probe_difference
            metrics["sync/probe_seconds"] = self.probe_seconds
        return metrics | (self.delta.metrics() if self.delta is not None else {})
