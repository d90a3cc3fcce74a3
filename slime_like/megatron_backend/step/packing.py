"""Samples of one micro-batch -> packed tensors, and scores per token -> rows per sample."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from slime_like.megatron_backend.model.packed import PackedSequences, packed_sequences
from slime_like.megatron_backend.step.context_parallel import ContextShare
from slime_like.records import TrainSample


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackLayout:
    """How samples lie in a micro-batch's tensors: end to end in one row (Megatron calls it thd), or padded, one a row
    (bshd).

    multiple: a rank's tokens (of a row) are padded to a multiple of it, since sequence parallel ranks hold equal parts.
    min_rows, min_tokens (of a row, of all context parallel ranks): what the tensors have at least; see holding.
    """

    padded: bool = False
    multiple: int = 1
    min_rows: int = 1
    min_tokens: int = 0

    def segments(self, lengths: Sequence[int], context: ContextShare) -> list[int]:
        """Lengths of the sequences in the tensors: the samples', with their padding, then sequences of padding alone.

        Examples: lengths [3, 5], multiple 4: end to end -> [3, 5]; padded -> [8, 8].
        """
        if not self.padded:
            return context.segments(lengths, multiple=self.multiple, at_least=self.min_tokens)
        unit = context.unit(self.multiple)
        row = max(*lengths, self.min_tokens, 1) if lengths else max(self.min_tokens, 1)
        return [-(-row // unit) * unit] * max(len(lengths), self.min_rows)

    def holding(self, packs: Sequence[Sequence[int]], context: ContextShare) -> PackLayout:
        """The layout in which all these packs, given as lengths of their samples, have tensors of one shape."""
        segments = [self.segments(lengths, context) for lengths in packs]
        if self.padded:
            return dataclasses.replace(
                self, min_rows=max(len(s) for s in segments), min_tokens=max(s[0] for s in segments)
            )
        return dataclasses.replace(self, min_tokens=max(sum(s) for s in segments))


@dataclasses.dataclass(frozen=True)
class Predictions:
    """Which tokens of a row predict what, where some predict several tokens and others none: P in all.

    Example: the first of three tokens predicts two, the second one: rows [0, 0, 1], ends (0, 2, 3, 3).
    """

    rows: torch.Tensor  # [P] int64: who predicts; ascending
    ends: tuple[int, ...]  # [T + 1]: predictions before each token's

    @classmethod
    def of(cls, counts: Sequence[int], device: torch.device) -> Predictions:
        """counts: how many each token makes."""
        rows = np.repeat(np.arange(len(counts)), counts)
        return cls(torch.as_tensor(rows, device=device), (0, *np.cumsum(counts).tolist()))

    def within(self, block: slice) -> tuple[slice, torch.Tensor]:
        """Of a block of tokens: (its predictions, who makes each, counted from the block's first token)."""
        predictions = slice(self.ends[block.start], self.ends[block.stop])
        return predictions, self.rows[predictions] - block.start


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """One micro-batch: R rows of T tokens, K of them trained.

    End to end there is one row; padded, each sample has its own.
    Everything but tokens and positions is in *predicting* layout: entry j belongs to the prediction of the token after
    j. With context parallelism tokens, positions and targets are this rank's part, [T / ranks]; all else describes the
    whole samples, without the padding between them, as scores do after `context_parallel.whole`.
    """

    samples: tuple[int, ...]  # positions in the train step's list
    lengths: tuple[int, ...]  # tokens of each sample
    tokens: torch.Tensor  # [R, T] int64
    positions: torch.Tensor  # [R, T] int64, from 0 in each sample
    #: [R x T] int64: the token predicted at j; 0 at the end of a sample; [P] with `predictions`
    targets: torch.Tensor
    sequences: PackedSequences | None  # None: padded
    trained: torch.Tensor  # [K] int64: which j are trained on
    weights: torch.Tensor  # [K] float32: what each weighs in the mean over the global batch, its own weight included
    own_weights: torch.Tensor  # [K] float32: TrainSample.weights, what each weighs in a sum
    sample_of_token: torch.Tensor  # [K] int64: which of `samples` each belongs to
    advantages: torch.Tensor  # [K] float32
    engine_logprobs: torch.Tensor  # [K] float32
    restoring: torch.Tensor | None = None  # int64: see ContextShare.restoring
    #: [R, T] bool, laid out as tokens: what belongs to no sample; None: nothing, on no rank
    padding: torch.Tensor | None = None
    metadata: tuple[dict, ...] = ()  # of each sample
    #: [R, T, layers, experts per token] int16, laid out as tokens; -1: the router's own choice
    routed_experts: torch.Tensor | None = None
    #: Where samples share tokens, some of which predict several: `restoring` is about its P entries, None: one each
    predictions: Predictions | None = None

    @property
    def num_scores(self) -> int:
        """Length of log-probs, entropies and values of this pack."""
        return self.tokens.numel() if self.restoring is None else len(self.restoring)


def pack(
    samples: Sequence[TrainSample],
    indices: Sequence[int],
    token_weights: np.ndarray,
    *,
    layout: PackLayout,
    device: torch.device,
    context: ContextShare | None = None,
) -> PackedBatch:
    """Lay the samples at `indices` out, on `device`.

    token_weights: [len(samples)], see algorithms/reduce. An empty `indices` makes a filler that trains nothing.
    """
    context = context or ContextShare()
    chosen = [samples[i] for i in indices]
    lengths = [len(s.tokens) for s in chosen]
    segments = layout.segments(lengths, context)
    tokens = np.zeros(sum(segments), dtype=np.int64)
    positions = np.concatenate([np.arange(n) for n in segments]).astype(np.int64)
    targets, padding = np.zeros_like(tokens), np.ones(len(tokens), dtype=bool)
    first = 0
    for sample, segment in zip(chosen, segments, strict=False):  # segments of padding alone come last
        end = first + len(sample.tokens)
        tokens[first:end], targets[first : end - 1], padding[first:end] = sample.tokens, sample.tokens[1:], False
        first += segment
    rows = len(segments) if layout.padded else 1
    local, restoring = context.local(segments), context.restoring(lengths, segments)
    return PackedBatch(
        samples=tuple(indices),
        lengths=tuple(lengths),
        tokens=torch.as_tensor(tokens[local], device=device).reshape(rows, -1),
        positions=torch.as_tensor(positions[local], device=device).reshape(rows, -1),
        targets=torch.as_tensor(targets[local], device=device),
        sequences=None if layout.padded else packed_sequences(segments, context, device),
        **trained_columns(chosen, token_weights[list(indices)], device=device),
        restoring=None if restoring is None else torch.as_tensor(restoring, device=device),
        padding=torch.as_tensor(padding[local], device=device).reshape(rows, -1) if padding.any() else None,
        metadata=tuple(sample.metadata for sample in chosen),
        routed_experts=_routed_experts(chosen, segments, local, rows=rows, device=device),
    )


def trained_columns(
    samples: Sequence[TrainSample], token_weights: np.ndarray, *, device: torch.device
) -> dict[str, torch.Tensor]:
    """The columns [K] of PackedBatch: one entry for each trained token. token_weights: [len(samples)]."""
    lengths = np.array([len(sample.tokens) for sample in samples], dtype=np.int64)
    owners = np.repeat(np.arange(len(samples)), lengths)
    is_trained = _joined([sample.loss_mask for sample in samples]) != 0
    is_trained[np.cumsum(lengths) - lengths] = False  # nothing predicts a sample's first token
    at = np.flatnonzero(is_trained)
    own_weights = _joined([sample.weights for sample in samples])[at]
    weights = token_weights[owners[at]] * own_weights.astype(np.float64)

    def column(values: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(values, dtype=dtype, device=device)

    return {
        "trained": column(at - 1, torch.int64),
        "weights": column(weights, torch.float32),
        "own_weights": column(own_weights, torch.float32),
        "sample_of_token": column(owners[at], torch.int64),
        "advantages": column(_joined([sample.advantages for sample in samples])[at], torch.float32),
        "engine_logprobs": column(_joined([sample.engine_logprobs for sample in samples])[at], torch.float32),
    }


def _joined(rows: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate(rows) if rows else np.zeros(0)


def _routed_experts(
    samples: Sequence[TrainSample], segments: Sequence[int], local: np.ndarray, *, rows: int, device: torch.device
) -> torch.Tensor | None:
    """PackedBatch.routed_experts; None where no sample brings them. Padding is for the router to choose."""
    if not samples or samples[0].routed_experts is None:
        return None
    whole = np.full((sum(segments), *samples[0].routed_experts.shape[1:]), -1, dtype=np.int16)
    first = 0
    for sample, segment in zip(samples, segments, strict=False):  # segments of padding alone come last
        whole[first : first + len(sample.tokens)] = sample.routed_experts
        first += segment
    mine = torch.as_tensor(whole[local], device=device)
    return mine.reshape(rows, -1, *mine.shape[1:])


def num_trained_tokens(sample: TrainSample) -> int:
    """Tokens of a sample that the loss sees; the first token is predicted by nothing."""
    return int(np.count_nonzero(sample.loss_mask[1:]))


def packed_rows(rows: Mapping[int, np.ndarray], packs: Sequence[PackedBatch]) -> list[torch.Tensor]:
    """The inverse of record_layout: [T] of each pack in predicting layout, 0 where nothing is predicted.

    rows: position of a sample in the train step's list -> its array [length]; its entry 0 belongs to no prediction.
    """
    tensors = []
    for pack_ in packs:
        values, start = np.zeros(pack_.num_scores, dtype=np.float32), 0
        for index, length in zip(pack_.samples, pack_.lengths, strict=True):
            values[start : start + length - 1] = rows[index][1:]
            start += length
        tensors.append(torch.as_tensor(values, device=pack_.tokens.device))
    return tensors


def laid_out_as(
    packs: Sequence[PackedBatch], scores: Sequence[torch.Tensor], scored: Sequence[PackedBatch]
) -> list[torch.Tensor]:
    """Scores of the packs `scored` -> scores of `packs`, which hold the same samples otherwise cut.

    Predicting layout [T], 0 at padding.
    """
    rows: dict[int, torch.Tensor] = {}
    for pack_, values in zip(scored, scores, strict=True):
        parts = values[: sum(pack_.lengths)].split(pack_.lengths)
        rows.update(zip(pack_.samples, parts, strict=True))
    tensors = []
    for pack_ in packs:
        values = torch.zeros(pack_.num_scores, dtype=torch.float32, device=pack_.tokens.device)
        if pack_.samples:
            values[: sum(pack_.lengths)] = torch.cat([rows[index] for index in pack_.samples])
        tensors.append(values)
    return tensors


def record_layout(values: torch.Tensor, lengths: Sequence[int]) -> list[np.ndarray]:
    """[T] of a pack in predicting layout -> per sample [length] float32, where entry t belongs to tokens[t] and entry 0
    is 0.
    """
    flat = values.detach().float().cpu().numpy()
    out, start = [], 0
    for length in lengths:
        row = np.zeros(length, dtype=np.float32)
        row[1:] = flat[start : start + length - 1]
        out.append(row)
        start += length
    return out
