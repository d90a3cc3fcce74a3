"""Arrays of the wire: dense or CSR, in protobuf's messages and in JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slime_like.tinker.api.wire.bounds import BodyLimits, ValueBudget
from slime_like.tinker.api.wire.messages import BFLOAT16, FLOAT32, INT32, INT64, MESSAGES
from slime_like.tinker.errors import Refused
from slime_like.tinker.records import NO_TOKEN, UNLISTED

#: Little-endian on every host. A bfloat16 is the upper half of a float32.
_DTYPES = {FLOAT32: "<f4", INT64: "<i8", INT32: "<i4", BFLOAT16: "<u2"}
_JSON_DTYPES = {"float32": np.float32, "int64": np.int64}


class TensorReader:
    """Reads the arrays of one request, and counts them."""

    def __init__(self, limits: BodyLimits):
        self._limits, self._budget = limits, ValueBudget(limits.values)

    def from_message(self, tensor: Any, name: str) -> np.ndarray:
        """float32, int32 or int64, as its dtype says; bfloat16 gives float32. Raises Refused."""
        encoding = tensor.WhichOneof("one")
        shape = list(tensor.shape)
        if encoding == "sparse_csr":
            sparse = tensor.sparse_csr
            values = self._numbers(sparse.values, tensor.dtype, name)
            rows = self._numbers(sparse.crow_indices, INT64, f"{name}'s row pointers")
            columns = self._numbers(sparse.col_indices, INT64, f"{name}'s columns")
            return self._densify(values, rows, columns, shape, name)
        return _shaped(self._numbers(tensor.dense, tensor.dtype, name), shape, name)

    def from_json(self, tensor: Mapping[str, Any], name: str) -> np.ndarray:
        """The same of an object {"data", "dtype", "shape"?, "sparse_crow_indices"?, "sparse_col_indices"?}."""
        dtype = _JSON_DTYPES.get(tensor["dtype"])
        if dtype is None:
            raise Refused(f"{name}: dtype {tensor['dtype']!r} is unknown; known: {', '.join(_JSON_DTYPES)}", status=400)
        values = self._listed(tensor["data"], dtype, name)
        shape = list(tensor.get("shape") or [])
        if tensor.get("sparse_crow_indices") is None:
            return _shaped(values, shape, name)
        rows = self._listed(tensor["sparse_crow_indices"], np.int64, f"{name}'s row pointers")
        columns = self._listed(tensor.get("sparse_col_indices") or [], np.int64, f"{name}'s columns")
        return self._densify(values, rows, columns, shape, name)

    def targets_from_json(self, tensor: Mapping[str, Any], name: str) -> np.ndarray:
        """[N, K] int64 of from_json's object: tokens, NO_TOKEN, and UNLISTED where a sparse array has no cell.

        Raises Refused.
        """
        if tensor["dtype"] != "int64":
            raise Refused(f"{name}: token ids are int64, not {tensor['dtype']!r}", status=400)
        if tensor.get("sparse_crow_indices") is None:
            targets = self.from_json(tensor, name)
        else:  # what is not listed is zero, and tokens are numbered from zero: so count from UNLISTED
            values = self._listed(tensor["data"], np.int64, name)
            targets = self.from_json({**tensor, "data": (values - UNLISTED).tolist()}, name) + UNLISTED
        low = NO_TOKEN if tensor.get("sparse_crow_indices") is None else UNLISTED
        if targets.ndim != 2 or not targets.shape[1] <= self._limits.targets_per_token or (targets < low).any():
            raise Refused(
                f"{name}: token ids, or -1 for none, of shape [len(prompt) - 1, K], K up to"
                f" {self._limits.targets_per_token}; not {list(targets.shape)}"
                + (f" with {targets.min()}" if targets.size else ""),
                status=400,
            )
        return targets

    def tokens(self, data: bytes) -> np.ndarray:
        """[N] int32 of a chunk of text."""
        return self._numbers(data, INT32, "a chunk of tokens")

    def listed_tokens(self, values: Sequence[int]) -> np.ndarray:
        """[N] int32 of a list. Raises Refused if one is no int32."""
        return self._listed(values, np.int32, "a chunk of tokens")

    def _numbers(self, data: bytes, dtype: int, name: str) -> np.ndarray:
        if dtype not in _DTYPES:
            raise Refused(f"{name}: dtype {dtype} is unknown", status=400)
        kind = np.dtype(_DTYPES[dtype])
        if len(data) % kind.itemsize:
            raise Refused(f"{name}: {len(data)} bytes are no whole number of {kind.itemsize}-byte values", status=400)
        self._budget.take(len(data) // kind.itemsize)
        values = np.frombuffer(data, kind)
        if dtype == BFLOAT16:
            return (values.astype(np.uint32) << 16).view(np.float32)
        return values.astype(kind.newbyteorder("="))  # a copy: the body's bytes are read-only

    def _listed(self, values: Sequence[Any], dtype: type, name: str) -> np.ndarray:
        self._budget.take(len(values))
        try:
            # Numbers too large for float32 become infinite, and are refused as such by whoever reads them.
            with np.errstate(over="ignore"):
                return np.asarray(values, dtype).reshape(-1)
        except (OverflowError, TypeError, ValueError) as error:
            raise Refused(f"{name}: no list of {np.dtype(dtype).name}: {str(error)[:200]}", status=400) from None

    def _densify(
        self, values: np.ndarray, rows: np.ndarray, columns: np.ndarray, shape: list[int], name: str
    ) -> np.ndarray:
        """Zeros but for the listed values. Places must be in order, each once, as torch wants of CSR."""
        if len(shape) != 2 or shape[0] != len(rows) - 1 or not 0 <= shape[1] <= self._limits.targets_per_token:
            raise Refused(
                f"{name}: a sparse array of shape {shape[:8]} with {len(rows)} row pointers; needs [rows, columns],"
                f" rows + 1 pointers, and at most {self._limits.targets_per_token} columns",
                status=400,
            )
        per_row = np.diff(rows)
        is_whole = rows[0] == 0 and rows[-1] == len(values) == len(columns)
        if not is_whole or (per_row < 0).any() or (columns < 0).any() or (columns >= shape[1]).any():
            raise Refused(f"{name}: row pointers and columns do not fit {len(values)} values in {shape}", status=400)
        self._budget.take(shape[0] * shape[1])
        places = np.repeat(np.arange(shape[0]), per_row) * shape[1] + columns
        if (np.diff(places) <= 0).any():
            raise Refused(f"{name}: columns of a row must ascend", status=400)
        dense = np.zeros(shape[0] * shape[1], values.dtype)
        dense[places] = values
        return dense.reshape(shape)


def _shaped(values: np.ndarray, shape: list[int], name: str) -> np.ndarray:
    if not shape:
        return values
    size = 1
    for length in shape:
        size *= length  # Python's: a product of strangers' int64 may overflow one
    if len(shape) > 2 or min(shape) < 0 or size != len(values):
        raise Refused(f"{name}: {len(values)} values have no shape {shape[:8]}", status=400)
    return values.reshape(shape)


def to_message(values: np.ndarray) -> Any:
    """A Tensor message, dense; float32, int32 or int64."""
    dtype = {np.dtype(np.float32): FLOAT32, np.dtype(np.int32): INT32, np.dtype(np.int64): INT64}[values.dtype]
    return MESSAGES["Tensor"](dense=little_endian(values), dtype=dtype, shape=values.shape)


def to_sparse_message(values: np.ndarray) -> Any:
    """A Tensor message: CSR of [N, K] float32, whose NaN are not listed."""
    listed = ~np.isnan(values)
    sparse = MESSAGES["SparseCsr"](
        values=little_endian(values[listed]),
        crow_indices=little_endian(np.cumsum([0, *listed.sum(1)], dtype=np.int64)),
        col_indices=little_endian(np.nonzero(listed)[1].astype(np.int64)),
    )
    return MESSAGES["Tensor"](sparse_csr=sparse, dtype=FLOAT32, shape=values.shape)


def little_endian(values: np.ndarray) -> bytes:
    """The bytes of values as the wire has them."""
    return values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()


def to_json(values: np.ndarray) -> dict[str, Any]:
    """{"data", "dtype", "shape"}; what JSON has no number for is the largest or smallest that float32 has."""
    if values.dtype.kind != "f":
        return {"data": values.reshape(-1).tolist(), "dtype": "int64", "shape": list(values.shape)}
    return {"data": finite(values).reshape(-1).tolist(), "dtype": "float32", "shape": list(values.shape)}


def finite(values: np.ndarray) -> np.ndarray:
    """Values that JSON can say: it has no infinity."""
    return np.nan_to_num(values, nan=0.0)
