"""What adapters add to a layer: as a hook on it, and to tokens of several."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as functional

from slime_like.megatron_backend.lora.adapter import LoraAdapter
from slime_like.megatron_backend.lora.experts import ExpertAdapters
from slime_like.megatron_backend.lora.layers import called


def added(adapter: LoraAdapter | ExpertAdapters):
    """A forward hook for Megatron's linear layers that adds the adapter's share to their output."""

    def hook(_, args: tuple, kwargs: dict, output):
        return with_gain(adapter, *called(args, kwargs, output))

    return hook


def with_gain(adapter: LoraAdapter | ExpertAdapters | None, inputs: tuple, output: tuple) -> tuple:
    """A layer's output and bias with what the adapter, if there is one, adds for these inputs (layers.called)."""
    if adapter is None:
        return output
    gain = adapter(*inputs[:2]) if isinstance(adapter, ExpertAdapters) else adapter(inputs[0])
    return output if gain is None else (output[0] + gain, *output[1:])


def added_by_segments(
    adapters: Sequence[LoraAdapter | None],
    hidden: torch.Tensor,
    input_sizes: Sequence[int],
    output_sizes: Sequence[int],
) -> torch.Tensor | None:
    """What one layer's output gains where its tokens (the first dimension) are segments with an adapter each; None
    where no segment has one.

    The sizes differ where tensor parallel ranks share the tokens on one side of the layer. A x of all segments goes
    between the ranks at once, with ranks padded to the largest.
    """
    some = next((adapter for adapter in adapters if adapter is not None), None)
    if some is None:
        return None
    widths = [0 if adapter is None else adapter.shape.rank * len(adapter.places) for adapter in adapters]
    narrow = [
        functional.pad(adapter.narrowed(part, list(adapter.parts.values())), (0, max(widths) - width))
        if adapter is not None
        else part.new_zeros(*part.shape[:-1], max(widths))
        for adapter, part, width in zip(adapters, hidden.split(list(input_sizes)), widths, strict=True)
    ]
    pieces = some.between_ranks(torch.cat(narrow)).split(list(output_sizes))
    rows = sum(some.shape.sizes)
    gains = []
    for adapter, piece, width in zip(adapters, pieces, widths, strict=True):
        if adapter is None:
            gains.append(piece.new_zeros(*piece.shape[:-1], rows))
            continue
        columns: list[torch.Tensor | None] = [None] * len(adapter.shape.sizes)
        inner = piece[..., :width].split(adapter.shape.rank, -1)
        for (place, part), own in zip(adapter.parts.items(), inner, strict=True):
            columns[place] = functional.linear(own, part.lora_b) * adapter.shape.scale
        gains.append(adapter.joined(columns, piece))
    return torch.cat(gains)
