"""How context parallel ranks share the tokens of a pack, and how their scores come together again.

Each sequence is padded to 2 x ranks equal chunks; rank r holds chunks r and 2 x ranks - 1 - r, so that causal attention
costs every rank the same (zig-zag: Megatron's and transformer-engine's split). Scores are gathered at once, so that
losses, log-probs and values see whole samples on every rank and nobody else knows of the split.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region


@dataclasses.dataclass(frozen=True, kw_only=True)
class ContextShare:
    """This rank's place among those that share its sequences."""

    size: int = 1
    rank: int = 0

    @classmethod
    def of_this_rank(cls) -> ContextShare:
        """As the process groups say."""
        return cls(
            size=parallel_state.get_context_parallel_world_size(), rank=parallel_state.get_context_parallel_rank()
        )

    def padded(self, length: int) -> int:
        """Tokens of a sequence after padding to equal chunks."""
        unit = 2 * self.size if self.size > 1 else 1
        return -(-length // unit) * unit

    def segments(self, lengths: Sequence[int], *, multiple: int, at_least: int = 0) -> list[int]:
        """Sequences of a pack: padded samples, and one of padding where a rank's tokens would not divide by `multiple`,
        or be none at all.

        at_least: tokens of the whole pack, one that other lengths gave with the same multiple.
        Example: 2 ranks, lengths [5, 4], multiple 4 -> [8, 4, 4].
        """
        sequences = [self.padded(length) for length in lengths]
        unit = self.unit(multiple)
        total = sum(sequences)
        padding = max(-total % unit, 0 if total else unit, at_least - total)
        return [*sequences, padding] if padding else sequences

    def unit(self, multiple: int) -> int:
        """What the tokens of all ranks together must divide by, so that each rank has equal chunks and a multiple of
        `multiple`.
        """
        return math.lcm(2 * self.size, self.size * multiple) if self.size > 1 else multiple

    def local(self, segments: Sequence[int]) -> np.ndarray:
        """Places in the whole pack of this rank's tokens, in its order."""
        starts = np.cumsum([0, *segments[:-1]])
        return np.concatenate(
            [
                start + zigzag_positions(length, self.size, self.rank)
                for start, length in zip(starts, segments, strict=True)
            ]
        )

    def restoring(self, lengths: Sequence[int], segments: Sequence[int]) -> np.ndarray | None:
        """[sum of lengths]: where in the ranks' parts laid end to end each token of the samples is, without padding.

        None if there is one rank and no padding before the last sample's end: scores are in their places then.
        """
        if self.size == 1 and all(length == segment for length, segment in zip(lengths, segments, strict=False)):
            return None
        parts = np.concatenate([dataclasses.replace(self, rank=rank).local(segments) for rank in range(self.size)])
        place = np.argsort(parts)
        starts = np.cumsum([0, *segments[:-1]])
        of_samples = [np.arange(start, start + length) for start, length in zip(starts, lengths, strict=False)]
        return place[np.concatenate([np.zeros(0, dtype=np.int64), *of_samples])]


def zigzag_positions(length: int, size: int, rank: int) -> np.ndarray:
    """Positions, in one sequence of `length` tokens, of those that rank `rank` of `size` holds.

    Example: 8, 2, 0 -> [0, 1, 6, 7].
    """
    if size == 1:
        return np.arange(length)
    assert length % (2 * size) == 0, f"a sequence of {length} tokens does not divide into {2 * size} chunks"
    chunk, last = length // (2 * size), 2 * size - 1 - rank
    return np.concatenate([np.arange(rank * chunk, (rank + 1) * chunk), np.arange(last * chunk, (last + 1) * chunk)])


def whole(values: torch.Tensor, restoring: torch.Tensor | None) -> torch.Tensor:
    """Scores of this rank's tokens -> of all tokens of the pack's samples, equal on every context parallel rank.

    Collective if there are several.
    restoring: see ContextShare.restoring. Differentiable where every rank computes the same loss from the result: each
    keeps the gradient of its own tokens, so gradients of weights are to be summed over the ranks.
    """
    if restoring is None:
        return values
    group = parallel_state.get_context_parallel_group()
    if group.size() == 1:
        return values[restoring]
    return gather_from_sequence_parallel_region(values, tensor_parallel_output_grad=False, group=group)[restoring]
