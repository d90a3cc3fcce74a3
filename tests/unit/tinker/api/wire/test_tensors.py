"""Arrays of every kind that the wire has."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tinker.proto.response_conv import _tensor_data_from_proto
from tinker.proto.tinker_public_pb2 import Tensor

from slime_like.tinker.api.wire.bounds import BodyLimits
from slime_like.tinker.api.wire.messages import BFLOAT16, FLOAT32, INT32, INT64, MESSAGES
from slime_like.tinker.api.wire.tensors import TensorReader, to_json, to_message
from slime_like.tinker.errors import Refused


def read(message, **limits) -> np.ndarray:
    return TensorReader(BodyLimits(**limits)).from_message(message, "x")


def csr(values, rows, columns, shape, dtype=FLOAT32, kind="<f4"):
    return MESSAGES["Tensor"](
        sparse_csr=MESSAGES["SparseCsr"](
            values=np.array(values, kind).tobytes(),
            crow_indices=np.array(rows, "<i8").tobytes(),
            col_indices=np.array(columns, "<i8").tobytes(),
        ),
        dtype=dtype,
        shape=shape,
    )


def test_a_bfloat16_is_what_torch_makes_of_it():
    values = torch.randn(7, generator=torch.Generator().manual_seed(1)).bfloat16()
    message = MESSAGES["Tensor"](dense=values.view(torch.int16).numpy().tobytes(), dtype=BFLOAT16)
    np.testing.assert_array_equal(read(message), values.float().numpy(), strict=True)


@pytest.mark.parametrize(("dtype", "kind"), [(FLOAT32, np.float32), (INT32, np.int32), (INT64, np.int64)])
def test_there_and_back(dtype: int, kind: type):
    values = np.arange(-3, 3).astype(kind).reshape(2, 3)
    message = to_message(values)
    assert message.dtype == dtype
    np.testing.assert_array_equal(read(message), values, strict=True)
    theirs = _tensor_data_from_proto(Tensor.FromString(message.SerializeToString()))
    np.testing.assert_array_equal(theirs.to_numpy(), values)


def test_rows_pointers_and_columns_are_torchs():
    dense = torch.tensor([[0.0, 2.0, 0.0], [0.0, 0.0, 0.0], [3.0, 0.0, 4.0]])
    sparse = dense.to_sparse_csr()
    parts = (sparse.values(), sparse.crow_indices(), sparse.col_indices())
    np.testing.assert_array_equal(read(csr(*(part.numpy() for part in parts), [3, 3])), dense.numpy())


@pytest.mark.parametrize(
    ("rows", "columns", "shape"),
    [
        ([0, 1], [0, 1], [1, 2]),  # one value in the rows, two there
        ([0, 2], [0, 2], [1, 2]),  # a column beyond the last
        ([0, 2], [0, -1], [1, 2]),
        ([0, 2], [1, 0], [1, 2]),  # not in order
        ([0, 2], [1, 1], [1, 2]),  # twice
        ([0, 3, 2], [0, 1], [2, 2]),  # a row of -1 values
        ([1, 2], [0, 1], [1, 2]),
        ([0, 2], [0, 1], [2, 2]),  # a row without a pointer
        ([0, 2], [0, 1], [2]),
        ([0, 2], [0, 1], [1, 2**40]),
        ([], [], [0, 2]),
    ],
)
def test_sparse_arrays_that_do_not_fit_are_refused(rows, columns, shape):
    with pytest.raises(Refused) as refused:
        read(csr([1.0, 2.0], rows, columns, shape))
    assert refused.value.status == 400


def test_memory_for_values_is_counted_before_it_is_taken():
    few = csr([], [0] * 1025, [], [1024, 1024])
    assert read(few).shape == (1024, 1024)
    with pytest.raises(Refused, match="more than 1000000 values") as refused:
        read(few, values=1_000_000)
    assert refused.value.status == 413


def test_json_of_numbers_that_json_lacks():
    assert to_json(np.array([1.0, np.nan], np.float32)) == {"data": [1.0, 0.0], "dtype": "float32", "shape": [2]}
    (low,) = to_json(np.array([-np.inf], np.float32))["data"]
    assert low == np.finfo(np.float32).min
    assert to_json(np.array([[1, 2]], np.int32)) == {"data": [1, 2], "dtype": "int64", "shape": [1, 2]}


def test_json_that_is_no_array_is_refused():
    reader = TensorReader(BodyLimits())
    for tensor in (
        {"data": [1.5], "dtype": "int32"},
        {"data": [1e400], "dtype": "int64"},
        {"data": [2**63], "dtype": "int64"},
        {"data": [1, 2], "dtype": "float32", "shape": [3]},
    ):
        with pytest.raises(Refused):
            reader.from_json(tensor, "x")
