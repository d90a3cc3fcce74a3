"""Adapters of a layer that is one for all experts of a rank: one an expert, computed for all at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as functional

from slime_like.config.lora_targets import COLUMN, ROW
from slime_like.megatron_backend.lora.adapter import LoraAdapter

#: Kernels want rows that start at multiples of 16 bytes.
_MULTIPLE = 8
#: Public since torch 2.10.
_grouped_mm = getattr(functional, "grouped_mm", None) or torch._grouped_mm


class ExpertAdapters(torch.nn.Module):
    """The adapters of a rank's experts, in their order, for tokens that lie by expert (transformer-engine's grouped
    layers). Experts have them alike (LoraConfig.target_problems).
    """

    def __init__(self, adapters: Sequence[LoraAdapter]):
        super().__init__()
        for place, adapter in enumerate(adapters):
            self.add_module(str(place), adapter)

    @property
    def adapters(self) -> list[LoraAdapter]:
        """Of each expert here."""
        return list(self.children())

    def forward(self, hidden: torch.Tensor, sizes: Sequence[int]) -> torch.Tensor | None:
        """What the layer's output [tokens, rows here] gains for its input [tokens, inputs here], of which sizes[i] in a
        row are expert i's; None while switched off.
        """
        adapters = self.adapters
        first, shape = adapters[0], adapters[0].shape
        if not first.counts:
            return None
        if not len(hidden):  # no kernel for it, but zeros are gradients, too
            pairs = zip(adapters, hidden.split(list(sizes)), strict=True)
            return torch.cat([adapter(tokens) for adapter, tokens in pairs])
        ends = torch.tensor(sizes).cumsum(0).to(hidden.device, torch.int32, non_blocking=True)
        extra = -shape.rank % _MULTIPLE
        matrix_a = torch.cat(
            [functional.pad(self._all("lora_a", place), (0, 0, 0, extra)) for place in first.places], 1
        )
        narrow = _grouped(hidden, first.whole(matrix_a, ROW), ends).split(shape.rank + extra, -1)
        gains: list[torch.Tensor | None] = [None] * len(shape.sizes)
        for place, inner in zip(first.places, narrow, strict=True):
            matrix_b = first.whole(functional.pad(self._all("lora_b", place), (0, extra)), COLUMN)
            gains[place] = _grouped(inner, matrix_b, ends) * shape.scale
        return first.joined(gains, hidden)

    def _all(self, name: str, place: int) -> torch.Tensor:
        """[experts, ...]: A or B of the HF module in this place of each."""
        return torch.stack([getattr(adapter.parts[place], name) for adapter in self.adapters])


def adapters_of(adapter: LoraAdapter | ExpertAdapters) -> list[LoraAdapter]:
    """Of each matrix of a layer."""
    return adapter.adapters if isinstance(adapter, ExpertAdapters) else [adapter]


def _grouped(tokens: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """[tokens, inputs] times the matrix [outputs, inputs] of each expert, whose tokens end there."""
    return _grouped_mm(tokens, matrices.transpose(1, 2), offs=ends)
