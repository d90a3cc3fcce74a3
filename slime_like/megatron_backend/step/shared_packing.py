"""Samples that begin alike -> one micro-batch in which what they have in common lies once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from slime_like.algorithms.shared_prompts import SharedRow
from slime_like.megatron_backend.model.packed import shared_sequences
from slime_like.megatron_backend.step.context_parallel import ContextShare
from slime_like.megatron_backend.step.packing import PackedBatch, PackLayout, Predictions, pack, trained_columns
from slime_like.megatron_backend.step.routing_replay import OWN_CHOICE
from slime_like.records import TrainSample

_TOKEN_BITS = 32


def pack_shared(
    samples: Sequence[TrainSample],
    row: SharedRow,
    token_weights: np.ndarray,
    *,
    layout: PackLayout,
    device: torch.device,
) -> PackedBatch:
    """Lay the samples of a row out, on `device`; as `pack` where they have nothing in common.

    token_weights: [len(samples)], see algorithms/reduce. Scores and columns are those of whole samples, as ever: a
    token that stands for several says of each what it says.
    """
    if not row.shares:
        return pack(samples, row.samples, token_weights, layout=layout, device=device)
    assert not layout.padded, "one sample a row cannot share its tokens with another"
    chosen = [samples[i] for i in row.samples]
    padding = sum(layout.segments(row.lengths, ContextShare())) - sum(row.lengths)
    sequences = shared_sequences(row.branches, padding, device)
    size = sum(row.lengths) + padding
    tokens, is_padding = np.zeros(size, dtype=np.int64), np.ones(size, dtype=bool)
    everywhere = np.concatenate(row.places)
    tokens[everywhere], is_padding[everywhere] = np.concatenate([sample.tokens for sample in chosen]), False
    predictions, targets, restoring = _predictions(chosen, row, size, device)
    assert sequences.positions is not None
    return PackedBatch(
        samples=row.samples,
        lengths=tuple(len(sample.tokens) for sample in chosen),
        tokens=torch.as_tensor(tokens, device=device)[None],
        positions=sequences.positions[None],
        targets=targets,
        sequences=sequences,
        **trained_columns(chosen, token_weights[list(row.samples)], device=device),
        restoring=restoring,
        padding=torch.as_tensor(is_padding, device=device)[None] if padding else None,
        metadata=tuple(sample.metadata for sample in chosen),
        routed_experts=_routed_experts(chosen, row, size, device),
        predictions=predictions,
    )


def _predictions(
    samples: Sequence[TrainSample], row: SharedRow, size: int, device: torch.device
) -> tuple[Predictions, torch.Tensor, torch.Tensor]:
    """(who predicts, what: [P], which of them is each sample's at each of its tokens: [sum of lengths]).

    The last token of a sample predicts token 0, for nobody.
    """
    places = np.concatenate(row.places)
    targets = np.roll(np.concatenate([sample.tokens for sample in samples]).astype(np.int64), -1)
    targets[np.cumsum([len(sample.tokens) for sample in samples]) - 1] = 0
    wanted, which = np.unique((places << _TOKEN_BITS) | targets, return_inverse=True)
    counts = np.bincount(wanted >> _TOKEN_BITS, minlength=size)
    return (
        Predictions.of(counts.tolist(), device),
        torch.as_tensor(wanted & ((1 << _TOKEN_BITS) - 1), device=device),
        torch.as_tensor(which.reshape(-1), device=device),
    )


def _routed_experts(
    samples: Sequence[TrainSample], row: SharedRow, size: int, device: torch.device
) -> torch.Tensor | None:
    """PackedBatch.routed_experts; samples have a token in common only where these are equal, too."""
    if samples[0].routed_experts is None:
        return None
    whole = np.full((size, *samples[0].routed_experts.shape[1:]), OWN_CHOICE, dtype=np.int16)
    for sample, places in zip(samples, row.places, strict=True):
        whole[places] = sample.routed_experts
    return torch.as_tensor(whole, device=device)[None]
