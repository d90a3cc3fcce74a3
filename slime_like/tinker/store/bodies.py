"""Calls and answers as bytes, and back: one safetensors file each, its JSON in the metadata. Nothing is pickled.

Numbers come back bitwise; NaN and infinities too.
"""

from __future__ import annotations

import dataclasses
import json
import struct
from typing import Any

import numpy as np
import safetensors.numpy

from slime_like.records import LossRow, PassResult
from slime_like.tinker.records import (
    Call,
    CallResult,
    Kind,
    SampledSequence,
    SampleJob,
    SampleResult,
    TopLogprobs,
)

_KEY = "slime_like"


def pack_call(call: Call) -> bytes:
    """What unpack_call reads."""
    arrays: dict[str, np.ndarray] = {}
    for index, row in enumerate(call.rows):
        arrays[f"rows.{index}.tokens"], arrays[f"rows.{index}.targets"] = row.tokens, row.targets
        arrays |= {f"rows.{index}.inputs.{name}": array for name, array in row.inputs.items()}
    plain = {field.name: getattr(call, field.name) for field in dataclasses.fields(call)}
    del plain["rows"], plain["sample"]
    document: dict[str, Any] = plain | {"fields": dict(call.fields), "num_rows": len(call.rows)}
    if call.sample is not None:
        arrays["sample.prompt"] = call.sample.prompt
        job = {field.name: getattr(call.sample, field.name) for field in dataclasses.fields(call.sample)}
        del job["prompt"], job["prompt_targets"]
        if call.sample.prompt_targets is not None:
            arrays["sample.prompt_targets"] = call.sample.prompt_targets
        document["sample"] = job
    return _pack(document, arrays)


def unpack_call(body: bytes) -> Call:
    """The call that pack_call was given."""
    document, arrays = _unpack(body)
    rows: list[dict[str, Any]] = [{"inputs": {}} for _ in range(document.pop("num_rows"))]
    for key, array in arrays.items():
        side, _, rest = key.partition(".")
        if side == "rows":
            index, _, name = rest.partition(".")
            field, _, of_inputs = name.partition(".")
            if of_inputs:
                rows[int(index)][field][of_inputs] = array
            else:
                rows[int(index)][field] = array
    job = document.pop("sample", None)
    if job is not None:
        stop = None if job["stop"] is None else tuple(job["stop"])
        own = {"prompt": arrays["sample.prompt"], "prompt_targets": arrays.get("sample.prompt_targets"), "stop": stop}
        job = SampleJob(**(job | own))
    document["kind"] = Kind(document["kind"])
    return Call(rows=tuple(LossRow(**row) for row in rows), sample=job, **document)


def pack_result(answer: CallResult) -> bytes:
    """What unpack_result reads."""
    result = answer.result
    if isinstance(result, PassResult):
        arrays = {f"log_probs.{index}": array for index, array in enumerate(result.log_probs)}
        return _pack({"is": "pass", "kind": answer.kind, "metrics": result.metrics}, arrays)
    if not isinstance(result, SampleResult):
        return _pack({"is": "fields", "kind": answer.kind, "fields": dict(result)}, {})
    arrays = {}
    _put_top(arrays, "prompt", result.topk_prompt)
    if result.prompt_logprobs is not None:
        arrays["prompt.sampled"] = result.prompt_logprobs
    if result.prompt_targets is not None:
        arrays["prompt.targets"] = result.prompt_targets
    for index, sequence in enumerate(result.sequences):
        arrays[f"{index}.tokens"], arrays[f"{index}.logprobs"] = sequence.tokens, sequence.logprobs
        _put_top(arrays, str(index), sequence.topk)
    document = {
        "is": "sample",
        "kind": answer.kind,
        "stop_reasons": [sequence.stop_reason for sequence in result.sequences],
        "prompt_cache_hit_tokens": result.prompt_cache_hit_tokens,
        "weights": result.weights,
    }
    return _pack(document, arrays)


def unpack_result(body: bytes) -> CallResult:
    """The answer that pack_result was given."""
    document, arrays = _unpack(body)
    kind, what = Kind(document["kind"]), document["is"]
    if what == "fields":
        return CallResult(kind=kind, result=document["fields"])
    if what == "pass":
        log_probs = [arrays[f"log_probs.{index}"] for index in range(len(arrays))]
        return CallResult(kind=kind, result=PassResult(log_probs=log_probs, metrics=document["metrics"]))
    sequences = tuple(
        SampledSequence(
            tokens=arrays[f"{index}.tokens"],
            logprobs=arrays[f"{index}.logprobs"],
            stop_reason=reason,
            topk=_take_top(arrays, str(index)),
        )
        for index, reason in enumerate(document["stop_reasons"])
    )
    result = SampleResult(
        sequences=sequences,
        prompt_logprobs=arrays.get("prompt.sampled"),
        prompt_targets=arrays.get("prompt.targets"),
        topk_prompt=_take_top(arrays, "prompt"),
        prompt_cache_hit_tokens=document["prompt_cache_hit_tokens"],
        weights=document["weights"],
    )
    return CallResult(kind=kind, result=result)


def _put_top(arrays: dict[str, np.ndarray], name: str, top: TopLogprobs | None) -> None:
    if top is not None:
        arrays[f"{name}.top_ids"], arrays[f"{name}.top_logprobs"] = top.token_ids, top.logprobs


def _take_top(arrays: dict[str, np.ndarray], name: str) -> TopLogprobs | None:
    if f"{name}.top_ids" not in arrays:
        return None
    return TopLogprobs(token_ids=arrays[f"{name}.top_ids"], logprobs=arrays[f"{name}.top_logprobs"])


def _pack(document: dict[str, Any], arrays: dict[str, np.ndarray]) -> bytes:
    contiguous = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    return safetensors.numpy.save(contiguous, metadata={_KEY: json.dumps(document)})


def _unpack(body: bytes) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    # A safetensors file begins with its header's length (8 bytes, little endian) and the header, JSON.
    (length,) = struct.unpack_from("<Q", body)
    header = json.loads(body[8 : 8 + length])
    return json.loads(header["__metadata__"][_KEY]), safetensors.numpy.load(body)
