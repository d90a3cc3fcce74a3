"""A rollout's groups in one file, to train on again without engines. NumPy's npz and JSON: reading it runs no code."""

from __future__ import annotations

import dataclasses
import io
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from slime_like.errors import DataError
from slime_like.records import Prompt, Sample, SampleGroup
from slime_like.utils.files import write_atomic

_FORMAT = 1
_SAMPLE_ARRAYS = {"tokens": np.int32, "loss_mask": np.int8, "engine_logprobs": np.float32, "weight_versions": np.int32}
_SAMPLE_FIELDS = (
    "prompt_index",
    "sample_index",
    "segment_index",
    "response",
    "status",
    "label",
    "metadata",
    "reward",
    "reward_parts",
    "error",
)
_PROMPT_FIELDS = ("index", "text", "label", "metadata", "response", "messages")


def debug_path(template: str, rollout_id: int) -> Path:
    """The path with '{rollout_id}' replaced; other braces stay as they are."""
    return Path(template.replace("{rollout_id}", str(rollout_id)))


def save_rollout(template: str, rollout_id: int, groups: Sequence[SampleGroup]) -> Path:
    """Write the groups of one rollout; returns the path. Raises DataError if a label or metadata is no JSON value."""
    path = debug_path(template, rollout_id)
    samples = [sample for group in groups for sample in group.samples]
    described = {
        "format": _FORMAT,
        "rollout_id": rollout_id,
        "prompts": [_pick(group.prompt, _PROMPT_FIELDS) for group in groups],
        "group_sizes": [len(group.samples) for group in groups],
        "samples": [_pick(sample, _SAMPLE_FIELDS) for sample in samples],
    }
    try:
        text = json.dumps(described)
    except (TypeError, ValueError) as error:
        raise DataError(f"--save-debug-rollout-data {path}: a label or metadata is no JSON value: {error}") from error
    arrays: dict[str, Any] = {"described": np.frombuffer(text.encode(), dtype=np.uint8)}
    arrays |= flatten("prompt_tokens", [group.prompt.tokens for group in groups], np.int32)
    for name, dtype in _SAMPLE_ARRAYS.items():
        arrays |= flatten(name, [getattr(sample, name) for sample in samples], dtype)
    arrays |= _flatten_experts([sample.routed_experts for sample in samples])
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    write_atomic(path, buffer.getvalue())
    return path


def load_rollout(template: str, rollout_id: int) -> tuple[SampleGroup, ...]:
    """The groups that save_rollout wrote, equal in every field.

    Raises DataError if the file is missing or of another kind.
    """
    path = debug_path(template, rollout_id)
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        described = json.loads(arrays["described"].tobytes())
        if described["format"] != _FORMAT:
            raise DataError(
                f"--load-debug-rollout-data {path}: format {described['format']}, but this version reads {_FORMAT}."
            )
        prompts = [
            Prompt(tokens=tokens, **fields)
            for tokens, fields in zip(split("prompt_tokens", arrays), described["prompts"], strict=True)
        ]
        columns: dict[str, Any] = {name: split(name, arrays) for name in _SAMPLE_ARRAYS}
        columns["routed_experts"] = _split_experts(arrays, len(described["samples"]))
        samples = [
            Sample(**{name: columns[name][i] for name in columns}, **fields)
            for i, fields in enumerate(described["samples"])
        ]
    except FileNotFoundError:
        raise DataError(f"--load-debug-rollout-data {path}: no such file (rollout {rollout_id}).") from None
    except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(
            f"--load-debug-rollout-data {path}: is no file of --save-debug-rollout-data: {type(error).__name__}:"
            f" {error}"
        ) from error
    ends = np.cumsum(described["group_sizes"]).tolist()
    starts = [0, *ends][: len(ends)]
    return tuple(
        SampleGroup(prompt=prompt, samples=tuple(samples[a:b]))
        for prompt, a, b in zip(prompts, starts, ends, strict=True)
    )


def _pick(record, names: tuple[str, ...]) -> dict:
    known = {field.name for field in dataclasses.fields(record)}
    return {name: getattr(record, name) for name in names if name in known}


def flatten(name: str, arrays: list[np.ndarray], dtype) -> dict[str, np.ndarray]:
    """One long array and the length of each part."""
    joined = np.concatenate([np.zeros(0, dtype), *(np.asarray(array, dtype) for array in arrays)])
    return {name: joined, f"{name}_lengths": np.array([len(array) for array in arrays], dtype=np.int64)}


def _flatten_experts(experts: list[np.ndarray | None]) -> dict[str, np.ndarray]:
    """Nothing where no sample has routed experts; one without them has length 0."""
    arrays = [array for array in experts if array is not None]
    if not arrays:
        return {}
    lengths = np.array([0 if array is None else len(array) for array in experts], dtype=np.int64)
    return {"routed_experts": np.concatenate(arrays), "routed_experts_lengths": lengths}


def _split_experts(arrays: dict[str, np.ndarray], count: int) -> list[np.ndarray | None]:
    """[T, layers, experts per token] of each sample, None for one without."""
    if "routed_experts" not in arrays:
        return [None] * count
    return [array if len(array) else None for array in split("routed_experts", arrays)]


def split(name: str, arrays: dict[str, np.ndarray]) -> list[np.ndarray]:
    lengths = arrays[f"{name}_lengths"]
    return np.split(arrays[name], np.cumsum(lengths)[:-1]) if len(lengths) else []
