"""HF model folders on disk: read single tensors or slices of them, write sharded folders."""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Iterable

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from slime_like.algorithms.finite import describe_non_finite, is_finite
from slime_like.config.base import shortened
from slime_like.config.hf_model import read_hf_config
from slime_like.config.quantisation import STORED_CONFIGS
from slime_like.errors import CheckpointError
from slime_like.megatron_backend.hf.eight_bits import (
    EIGHT_BITS,
    StoredScale,
    block_of,
    scale_names,
)
from slime_like.utils.files import give_usual_mode

INDEX_NAME = "model.safetensors.index.json"
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".index.json", ".h5", ".msgpack")
#: safetensors' word -> torch's, the widest first; float16 fits into float32 only.
_TORCH_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
#: Largest file that save_stage writes.
SHARD_BYTES = 4 * 1024**3


def is_hf_folder(folder: str) -> bool:
    """Whether the folder looks like an HF model: has a config.json."""
    return os.path.isfile(os.path.join(folder, "config.json"))


class HfReader:
    """Tensors of one HF folder by name, read lazily and only as far as asked for. Matrices that are stored in eight
    bits are read as the fp32 numbers that they stand for.

    Raises CheckpointError naming file and tensor where something is missing, torn, of another shape, of a data type
    that is none of floats, or holds a number that is NaN or infinite.
    """

    def __init__(self, folder: str):
        self.folder = folder
        self._open: dict[str, safe_open] = {}
        self._file_of = self._find_tensors()
        self._scale_of = scale_names(self._file_of.keys())

    @property
    def names(self) -> set[str]:
        """Every tensor's name, but for the scales of eight-bit matrices."""
        return set(self._file_of) - set(self._scale_of.values())

    def read(
        self, name: str, *, shape: tuple[int, ...], dim: int | None = None, start: int = 0, stop: int | None = None
    ) -> torch.Tensor:
        """One tensor, or its rows (dim 0) or columns (dim 1) start:stop; `shape` is what the whole of it must be."""
        if name not in self._file_of:
            raise CheckpointError(
                f"{self.folder} has no tensor {name!r}, which this architecture needs (it has {len(self._file_of)}"
                " others)."
            )
        path, view = self._file_of[name], self._slice(name)
        actual_shape = tuple(view.get_shape())
        if actual_shape != shape:
            raise CheckpointError(
                f"{path}: tensor {name!r} has shape {list(actual_shape)}, the architecture asks for {list(shape)}."
            )
        if view.get_dtype() not in (*_TORCH_DTYPES, *EIGHT_BITS):
            raise CheckpointError(
                f"{path}: tensor {name!r} is of the data type {view.get_dtype()}; weights are read as"
                f" {', '.join((*_TORCH_DTYPES, *EIGHT_BITS))}. Fix: a checkpoint in one of them."
            )
        if dim is None:
            part = view[:]
        else:
            part = view[start:stop] if dim == 0 else view[:, start:stop]
        if name not in self._scale_of and view.get_dtype() not in EIGHT_BITS:
            return self._finite(name, part)
        return self._finite(name, part.float() * self._scale(name, view).spread(dim, start, stop))

    def _finite(self, name: str, part: torch.Tensor) -> torch.Tensor:
        if not is_finite(part):
            raise CheckpointError(
                f"{self._file_of[name]}: of tensor {name!r} {describe_non_finite(part)}. Fix: another copy of the"
                " checkpoint."
            )
        return part

    def _scale(self, name: str, view) -> StoredScale:
        """Of an eight-bit matrix."""
        stored, shape, scale_name = view.get_dtype(), tuple(view.get_shape()), self._scale_of.get(name)
        if stored not in EIGHT_BITS or scale_name is None or len(shape) != 2:
            raise CheckpointError(
                f"{self.folder}: tensor {name!r} is {stored} of shape {list(shape)} with {scale_name or 'no scale'};"
                f" what can be read is a matrix of {' or '.join(EIGHT_BITS)} with a scale."
            )
        self._slice(scale_name)  # raises where the index is wrong
        numbers = self._file(self._file_of[scale_name]).get_tensor(scale_name)
        scale = StoredScale(numbers, shape, block_of(self._config, scale_name, self.folder))
        if numbers.numel() != 1 and tuple(numbers.shape) != scale.expected:
            raise CheckpointError(
                f"{self.folder}: {scale_name!r} has shape {list(numbers.shape)}; for a weight of {list(shape)} it is"
                f" {list(scale.expected)}, or one number."
            )
        return scale

    @functools.cached_property
    def _config(self) -> dict:
        return read_hf_config(self.folder)

    def dtype(self) -> str:
        """The widest data type among the weights, in torch's word: what holds all of them without loss. Of a folder
        in eight bits: of those that are not.
        """
        whole = [name for name in self._file_of if name not in self._scale_of and name in self.names]
        types = {self._slice(name).get_dtype() for name in whole}
        return next((ours for theirs, ours in _TORCH_DTYPES.items() if theirs in types), ", ".join(sorted(types)))

    def _find_tensors(self) -> dict[str, str]:
        index = os.path.join(self.folder, INDEX_NAME)
        if os.path.isfile(index):
            try:
                with open(index, encoding="utf-8") as file:
                    parts = dict(json.load(file)["weight_map"])
            except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                raise CheckpointError(f"{index} is no index of tensors: {shortened(error)}") from None
            for name, part in parts.items():
                if not isinstance(part, str) or os.path.basename(part) != part or not part.endswith(".safetensors"):
                    raise CheckpointError(
                        f"{index}: tensor {shortened(name)} is in {shortened(part)}, which is no .safetensors file of"
                        " the folder."
                    )
            return {name: os.path.join(self.folder, part) for name, part in parts.items()}
        single = os.path.join(self.folder, "model.safetensors")
        if not os.path.isfile(single):
            raise CheckpointError(f"{self.folder} has neither {INDEX_NAME} nor model.safetensors: no weights to load.")
        return dict.fromkeys(self._file(single).keys(), single)

    def _slice(self, name: str):
        path = self._file_of[name]
        try:
            return self._file(path).get_slice(name)
        except SafetensorError as error:
            raise CheckpointError(
                f"{path}: tensor {name!r} cannot be read: {error}. The file and {INDEX_NAME} do not fit together."
            ) from None

    def _file(self, path: str):
        if path not in self._open:
            try:
                self._open[path] = safe_open(path, framework="pt", device="cpu")
            except (OSError, ValueError, SafetensorError) as error:
                raise CheckpointError(f"{path} cannot be read: {error}") from None
        return self._open[path]


def save_stage(tensors: Iterable[tuple[str, torch.Tensor]], folder: str, prefix: str) -> tuple[dict[str, str], int]:
    """Write named tensors as `<prefix>-<n>.safetensors` files of bounded size.

    Returns {name: file name}, and bytes in all.
    """
    file_of: dict[str, str] = {}
    pending: dict[str, torch.Tensor] = {}
    number = total_bytes = 0

    def flush() -> None:
        nonlocal number
        number += 1
        name = f"{prefix}-{number:05d}.safetensors"
        save_file(
            {key: value.contiguous().cpu() for key, value in pending.items()},
            os.path.join(folder, name),
            metadata={"format": "pt"},
        )
        give_usual_mode(os.path.join(folder, name))
        file_of.update(dict.fromkeys(pending, name))
        pending.clear()

    for name, tensor in tensors:
        if pending and sum(t.nbytes for t in pending.values()) + tensor.nbytes > SHARD_BYTES:
            flush()
        # A clone: parameters are views of one buffer, and safetensors refuses tensors that share memory.
        pending[name] = tensor.detach().clone()
        total_bytes += tensor.nbytes
    if pending:
        flush()
    return file_of, total_bytes


def finish_folder(folder: str, *, template: str, file_of: dict[str, str], total_bytes: int, dtype: torch.dtype) -> None:
    """Add the index, and config and tokenizer files of `template`; config.json is told the dtype of the weights, and
    nothing of eight bits that they were read from.
    """
    with open(os.path.join(folder, INDEX_NAME), "w", encoding="utf-8") as file:
        json.dump(
            {"metadata": {"total_size": total_bytes}, "weight_map": dict(sorted(file_of.items()))}, file, indent=1
        )
    for entry in os.scandir(template):
        if entry.is_file() and not entry.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copyfile(entry.path, os.path.join(folder, entry.name))
    path = os.path.join(folder, "config.json")
    with open(path, encoding="utf-8") as file:
        config = json.load(file)
    for key in STORED_CONFIGS:
        config.pop(key, None)
    # transformers 5 writes "dtype", older versions "torch_dtype".
    config["dtype" if "dtype" in config else "torch_dtype"] = str(dtype).removeprefix("torch.")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(config, file, indent=2)
