"""Passes over data that a client sends, in protobuf and in the JSON of clients before 0.25, and prompts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from slime_like.records import LossRow
from slime_like.tinker.api.wire.bounds import BodyLimits, check_counts
from slime_like.tinker.api.wire.messages import MESSAGES
from slime_like.tinker.api.wire.tensors import TensorReader
from slime_like.tinker.errors import Refused

_TARGETS = "target_tokens"


class RefusedPass(Refused):
    """A pass that can be read, and makes no sense. model_id, seq_id: whose place it was to take."""

    def __init__(self, refused: Refused, model_id: str, seq_id: int):
        super().__init__(str(refused), status=refused.status)
        self.model_id, self.seq_id = model_id, seq_id


@dataclasses.dataclass(frozen=True, kw_only=True)
class PassRequest:
    """forward_backward, or forward."""

    model_id: str
    seq_id: int | None
    rows: list[LossRow]
    loss: str
    config: dict[str, float]
    forward_only: bool


def read_pass(body: bytes, limits: BodyLimits) -> PassRequest:
    """A ForwardBackwardRequest's bytes. Raises Refused (400, 413) for all that cannot be meant."""
    check_counts(body, limits)
    message = MESSAGES["ForwardBackwardRequest"]()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise Refused(f"the body is no ForwardBackwardRequest: {error}", status=400) from None
    try:
        return _read(message, limits)
    except Refused as refused:
        raise RefusedPass(refused, message.model_id, message.seq_id) from None


def _read(message: Any, limits: BodyLimits) -> PassRequest:
    reader = TensorReader(limits)
    rows = []
    for place, datum in enumerate(message.data):
        chunks = [reader.tokens(_text(chunk, place)) for chunk in datum.model_input]
        inputs = {name: reader.from_message(tensor, name) for name, tensor in datum.loss_fn_inputs.items()}
        rows.append(_row(chunks, inputs, place))
    config: dict[str, Any] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        config[name] = value.text if value.WhichOneof("one") == "text" else value.number
    return _checked(message.model_id, message.seq_id, rows, message.loss_fn, config, message.forward_only)


def read_json_pass(body: Mapping[str, Any], limits: BodyLimits) -> PassRequest:
    """The same of bodies.JsonPass's fields; forward has a route of its own there."""
    wanted = body["data"]
    if len(wanted["data"]) > limits.datums:
        raise Refused(f"more than {limits.datums} datums in one request", status=413)
    reader = TensorReader(limits)
    rows = []
    for place, datum in enumerate(wanted["data"]):
        chunks = [reader.listed_tokens(chunk["tokens"]) for chunk in datum["model_input"]["chunks"]]
        inputs = {name: reader.from_json(tensor, name) for name, tensor in datum["loss_fn_inputs"].items()}
        rows.append(_row(chunks, inputs, place))
    config = wanted.get("loss_fn_config") or {}
    return _checked(body["model_id"], body["seq_id"], rows, wanted["loss_fn"], config, False)


def read_prompt(chunks: Iterable[Mapping[str, Any]], limits: BodyLimits) -> np.ndarray:
    """[P] int32 of a prompt's chunks. Raises Refused if there is no token, or too many."""
    reader = TensorReader(limits)
    parts = [reader.listed_tokens(chunk["tokens"]) for chunk in chunks]
    prompt = np.concatenate(parts) if parts else np.zeros(0, np.int32)
    if not 1 <= len(prompt) <= limits.prompt_tokens:
        raise Refused(f"a prompt of {len(prompt)} tokens; 1 to {limits.prompt_tokens} are taken", status=400)
    return prompt


def _text(chunk: Any, place: int) -> bytes:
    kind = chunk.WhichOneof("one")
    if kind != "encoded_text":
        raise Refused(f"datum {place} has a chunk of kind {kind}; only tokens are taken", status=400)
    return chunk.encoded_text.tokens


def _row(chunks: list[np.ndarray], inputs: dict[str, np.ndarray], place: int) -> LossRow:
    """A datum: its targets, and whatever else the loss may read as float32 of the same shape."""
    tokens = np.concatenate(chunks) if chunks else np.zeros(0, np.int32)
    if not len(tokens):
        raise Refused(f"datum {place} has no tokens", status=400)
    targets = inputs.pop(_TARGETS, None)
    if targets is None or targets.dtype.kind != "i":
        raise Refused(f"datum {place} needs {_TARGETS}, as whole numbers; it has {sorted(inputs)}", status=400)
    arrays = {}
    for name, values in inputs.items():
        with np.errstate(over="ignore"):
            arrays[name] = values.astype(np.float32)
        if not np.isfinite(arrays[name]).all():
            raise Refused(f"datum {place}: {name} has a value that is not finite", status=400)
    try:
        return LossRow(tokens=tokens, targets=targets.astype(np.int64), inputs=arrays)
    except ValueError as error:
        raise Refused(f"datum {place}: {error}", status=400) from None


def _checked(
    model_id: str, seq_id: int | None, rows: list[LossRow], loss: str, config: Mapping[str, Any], forward_only: bool
) -> PassRequest:
    if not rows:
        raise Refused("a pass needs at least one datum", status=400)
    if seq_id is not None and seq_id < 1:
        raise Refused(f"seq_id {seq_id}: requests of a model are counted from 1", status=400)
    numbers = {}
    for name, value in config.items():
        if isinstance(value, str) or not math.isfinite(value):
            raise Refused(f"loss_fn_config: {name[:80]!r} is {str(value)[:80]!r}, not a finite number", status=400)
        numbers[name] = float(value)
    return PassRequest(
        model_id=model_id, seq_id=seq_id, rows=rows, loss=loss, config=numbers, forward_only=forward_only
    )
