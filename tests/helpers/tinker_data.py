"""Datums as the client library has them, drawn at random."""

from __future__ import annotations

import numpy as np
from tinker import types


def draw_datums(rng: np.random.Generator, count: int) -> list[types.Datum]:
    """Chunks of text, and targets of one or several columns, dense or sparse."""
    return [_datum(rng) for _ in range(count)]


def _datum(rng: np.random.Generator) -> types.Datum:
    length = int(rng.integers(1, 40))
    tokens = rng.integers(-(2**31), 2**31, size=length).tolist()
    cut = int(rng.integers(0, length + 1))
    chunks = [types.EncodedTextChunk(tokens=part) for part in (tokens[:cut], tokens[cut:])]
    columns = int(rng.integers(0, 5))
    shape = (length, columns) if columns else (length,)
    arrays = {
        "target_tokens": rng.integers(0, 2**40, size=shape),
        "weights": rng.normal(size=shape).astype(np.float32),
        "advantages": rng.normal(size=shape).astype(np.float32),
    }
    inputs = {name: _tensor(rng, array) for name, array in arrays.items()}
    return types.Datum(model_input=types.ModelInput(chunks=chunks), loss_fn_inputs=inputs)


def _tensor(rng: np.random.Generator, array: np.ndarray) -> types.TensorData:
    import torch

    if array.ndim == 2 and rng.random() < 0.6:
        array = np.where(rng.random(array.shape) < 0.15, array, 0)  # few enough that the library makes it sparse
        return types.TensorData.from_torch_sparse(torch.from_numpy(array))
    if rng.random() < 0.2 and array.ndim == 1:
        return types.TensorData(data=array, dtype="int64" if array.dtype.kind == "i" else "float32")  # without shape
    return types.TensorData.from_numpy(array)
