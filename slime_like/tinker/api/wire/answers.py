"""Results of calls as clients read them: protobuf where they accept it, JSON otherwise."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from slime_like.records import PassResult
from slime_like.tinker.api.wire.messages import FLOAT32, MESSAGES, STOP_REASONS
from slime_like.tinker.api.wire.tensors import finite, little_endian, to_json, to_message, to_sparse_message
from slime_like.tinker.records import CallResult, Kind, SampleResult, TopLogprobs

#: How clients join the metrics of the parts of a batch; they refuse a name that says none.
REDUCTIONS = ("mean", "sum", "min", "max", "slack", "hash2", "unique")
#: What every datum's answer is called.
_LOGPROBS = "logprobs"
_RECORD = "ArrayRecord"
#: The log-prob of a cell without a token, as clients know it; an engine's is NaN.
_EMPTY = -99999.0


def metric_names(metrics: dict[str, float]) -> dict[str, float]:
    """Metrics by names that clients take: `name:reduction`.

    A pass's "loss" is a sum, and so is what says nothing of itself. Example: {"loss": 2.0} -> {"loss:sum": 2.0}
    """
    named = {}
    for name, value in metrics.items():
        stem, _, reduction = name.rpartition(":")
        is_named = bool(stem) and ":" not in stem and reduction in REDUCTIONS
        named[name if is_named else f"{name.replace(':', '_')}:sum"] = float(value)
    return named


def pass_to_protobuf(result: PassResult) -> bytes:
    """ForwardBackwardOutput: log-probs of each datum, neighbours of one number of targets in one record."""
    records = []
    for trailing, rows in itertools.groupby(result.log_probs, lambda row: row.shape[1:]):
        arrays = [little_endian(row.astype(np.float32, copy=False)) for row in rows]
        offsets = np.cumsum([0, *(len(data) for data in arrays)], dtype=np.int64)
        tensor = MESSAGES["BatchedTensor"](
            data=b"".join(arrays), offsets=little_endian(offsets), dtype=FLOAT32, trailing_shape=trailing
        )
        records.append(MESSAGES["ArrayRecord"](type_tag=_RECORD, fields={_LOGPROBS: tensor}, num_datums=len(arrays)))
    output = MESSAGES["ForwardBackwardOutput"](
        loss_fn_output_type=_RECORD, loss_fn_outputs=records, metrics=metric_names(result.metrics)
    )
    return output.SerializeToString()


def pass_to_json(result: PassResult) -> dict[str, Any]:
    """What clients before 0.25 read."""
    return {
        "loss_fn_output_type": _RECORD,
        "loss_fn_outputs": [{_LOGPROBS: to_json(row)} for row in result.log_probs],
        "metrics": metric_names(result.metrics),
    }


def sample_to_protobuf(result: SampleResult) -> bytes:
    """SampleResponse."""
    sequences = [
        MESSAGES["SampledSequence"](
            stop_reason=STOP_REASONS[sequence.stop_reason],
            tokens=little_endian(sequence.tokens.astype(np.int32, copy=False)),
            logprobs=little_endian(sequence.logprobs.astype(np.float32, copy=False)),
            topk_sampled_logprobs=_top_to_message(sequence.topk),
        )
        for sequence in result.sequences
    ]
    response = MESSAGES["SampleResponse"](
        sequences=sequences,
        topk_prompt_logprobs=_top_to_message(result.topk_prompt),
        prompt_cache_hit_tokens=result.prompt_cache_hit_tokens,
    )
    if result.prompt_logprobs is not None:
        response.prompt_logprobs = little_endian(result.prompt_logprobs.astype(np.float32, copy=False))
    if result.prompt_targets is not None:
        as_message = to_sparse_message if np.isnan(result.prompt_targets).any() else to_message
        response.target_prompt_logprobs.CopyFrom(as_message(result.prompt_targets))
    return response.SerializeToString()


def _top_to_message(top: TopLogprobs | None) -> Any:
    if top is None:
        return None
    length, k = top.token_ids.shape
    is_empty = np.isnan(top.logprobs)
    return MESSAGES["TopkLogprobs"](
        token_ids=little_endian(np.where(is_empty, 0, top.token_ids).astype(np.int32)),
        logprobs=little_endian(np.where(is_empty, _EMPTY, top.logprobs).astype(np.float32)),
        k=k,
        length=length,
    )


def sample_to_json(result: SampleResult) -> dict[str, Any]:
    """What clients before 0.25 read: None where there is no log-prob."""
    answer: dict[str, Any] = {
        "type": "sample",
        "sequences": [
            {
                "tokens": sequence.tokens.tolist(),
                "logprobs": finite(sequence.logprobs).tolist(),
                "stop_reason": sequence.stop_reason,
            }
            for sequence in result.sequences
        ],
    }
    if result.prompt_logprobs is not None:
        answer["prompt_logprobs"] = [None if np.isnan(value) else float(value) for value in result.prompt_logprobs]
    if result.topk_prompt is not None:
        # The first position has nothing before it.
        answer["topk_prompt_logprobs"] = [
            None
            if np.isnan(values).all() or (values <= _EMPTY).all()
            else list(zip(ids.tolist(), values.tolist(), strict=True))
            for ids, values in zip(result.topk_prompt.token_ids, result.topk_prompt.logprobs, strict=True)
        ]
    return answer


#: Kinds with an answer that protobuf has a message for.
TO_PROTOBUF: dict[Kind, Callable[[Any], bytes]] = {
    Kind.FORWARD: pass_to_protobuf,
    Kind.FORWARD_BACKWARD: pass_to_protobuf,
    Kind.SAMPLE: sample_to_protobuf,
}
_TO_JSON: dict[Kind, Callable[[Any], dict[str, Any]]] = {
    Kind.FORWARD: pass_to_json,
    Kind.FORWARD_BACKWARD: pass_to_json,
    Kind.SAMPLE: sample_to_json,
}


def to_json_answer(done: CallResult) -> dict[str, Any]:
    """Any call's result as JSON; those of the kinds without arrays are what the service gave, with their type."""
    if done.kind in _TO_JSON:
        return _TO_JSON[done.kind](done.result)
    if "sampler_id" in done.result:
        return {"type": done.kind.value, "sampling_session_id": done.result["sampler_id"]}
    kind = Kind.LOAD_WEIGHTS if done.kind == Kind.CREATE_FROM_STATE else done.kind
    return {**done.result, "type": kind.value}
