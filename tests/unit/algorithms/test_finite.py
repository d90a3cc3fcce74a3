"""The fast check agrees with torch.isfinite on every number, wherever the bad one is."""

from __future__ import annotations

import pytest
import torch

from slime_like.algorithms.finite import describe_non_finite, is_finite


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_every_place_is_seen(dtype):
    plain = torch.randn(3, 67).to(dtype)  # longer than a vector register, and with a rest
    assert is_finite(plain) and is_finite(plain[:0]) and is_finite(torch.tensor(1.0, dtype=dtype))
    for place in range(plain.numel()):
        for value in (float("nan"), float("inf"), -float("inf")):
            tensor = plain.clone()
            tensor.view(-1)[place] = value
            assert not is_finite(tensor) and not torch.isfinite(tensor).all()
            assert not is_finite(tensor.T)


def test_the_largest_numbers_are_numbers():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert is_finite(torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min], dtype=dtype))


def test_the_count_and_the_first_place():
    tensor = torch.tensor([[0.0, 1.0], [float("nan"), float("inf")]])
    assert describe_non_finite(tensor) == "2 of 4 numbers are NaN or infinite (first nan at [1, 0])"
