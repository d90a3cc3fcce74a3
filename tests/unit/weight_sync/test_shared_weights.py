"""Parameters in shared memory: where they lie, who can read them, and that they leave room."""

from __future__ import annotations

import os

import pytest
import torch

from slime_like.weight_sync.shared_weights import SharedWeights


def test_tensors_lie_where_it_says_and_outlive_the_file():
    numbers = torch.arange(10.0)
    shared = SharedWeights(64 + 64 + 64)
    try:
        vector, half, matrix = shared.take(numbers), shared.take(numbers.bfloat16()), shared.take(numbers.view(2, 5))
        folder = os.path.dirname(shared.path)
        assert os.stat(shared.path).st_mode & 0o777 == 0o600 and os.stat(folder).st_mode & 0o777 == 0o700
        assert [shared.start_of(tensor) for tensor in (vector, half, matrix)] == [0, 64, 128]
        assert [tensor.data_ptr() % 64 for tensor in (vector, half, matrix)] == [0, 0, 0]
        assert shared.start_of(matrix[1]) == 128 + 20 and shared.start_of(vector[:0]) is None
        assert shared.start_of(numbers) is None, "elsewhere"
        assert shared.start_of(matrix.t()) is None, "not in order"
        matrix[1, 0] = 7.5
        with open(shared.path, "rb") as file:
            assert file.read()[148:152] == torch.tensor([7.5]).numpy().tobytes()
    finally:
        shared.close()
    shared.close()
    assert not os.path.exists(folder)
    assert vector.equal(numbers) and half.equal(numbers.bfloat16()) and matrix[1, 0] == 7.5


def test_they_leave_half_of_shared_memory_free():
    before = set(os.listdir("/dev/shm"))
    with pytest.raises(OSError, match="more than half of the .* free"):
        SharedWeights(1 << 60)
    assert set(os.listdir("/dev/shm")) <= before
