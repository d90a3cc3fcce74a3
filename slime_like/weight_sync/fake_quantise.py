"""Weights rounded to int4 and back: what --fake-quantization trains with, and what engines are sent then.

Symmetric, with a scale for each group of columns of a row: the larger of a group's numbers in magnitude becomes 7 or
-7. Groups lie along a row, so a matrix, its rows in another order, and its columns cut between whole groups are rounded
alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from slime_like.config.fake_quantisation import INT4_LARGEST
from slime_like.config.quantisation import LINEAR
from slime_like.weight_sync.buckets import NamedTensor
from slime_like.weight_sync.quantise import SMALLEST


def rounded_to_int4(weight: torch.Tensor, group: int) -> torch.Tensor:
    """The nearest multiples of each group's scale, in the weight's type. weight: [N, K], K a multiple of `group`."""
    parts = weight.detach().float().reshape(weight.shape[0], -1, group)
    scale = parts.abs().amax(-1, keepdim=True).clamp(min=SMALLEST) / INT4_LARGEST
    return ((parts / scale).round() * scale).reshape(weight.shape).to(weight.dtype)


def over_linear(tensors: Iterable[NamedTensor], group: int) -> Iterator[NamedTensor]:
    """HF tensors, those of linear layers rounded."""
    for name, tensor in tensors:
        yield name, rounded_to_int4(tensor, group) if LINEAR.search(name) else tensor
