"""Samples of one train step -> balanced micro-batches per data parallel rank -> packed tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from slime_like.config.training import BatchConfig
from slime_like.megatron_backend.context_parallel import ContextShare
from slime_like.records import TrainSample

#: plan[data parallel rank][micro-batch] = positions of samples in the train step's list; an empty tuple is a filler.
Plan = tuple[tuple[tuple[int, ...], ...], ...]


def plan_micro_batches(lengths: Sequence[int], *, data_parallel_size: int, batch: BatchConfig) -> Plan:
    """Share samples out over the data parallel ranks and cut each share into micro-batches.

    lengths: tokens of each sample. Every rank gets the same number of micro-batches, filled up with empty ones where
    there are too few samples. With dynamic batches none exceeds max_tokens_per_gpu, except one over-long sample alone.
    Deterministic: the same lengths give the same plan on every rank.
    """
    ranks = range(data_parallel_size)
    if batch.balance_data:
        shares = _balanced_shares(lengths, data_parallel_size)
    else:
        shares = [list(range(rank, len(lengths), data_parallel_size)) for rank in ranks]
    if batch.use_dynamic_batch_size:
        packs = [_first_fit(share, lengths, batch.max_tokens_per_gpu) for share in shares]
    else:
        size = batch.micro_batch_size
        packs = [[share[i : i + size] for i in range(0, len(share), size)] for share in shares]
    count = max(1, *(len(p) for p in packs)) if packs else 1
    for rank in ranks:
        _split_up_to(packs[rank], count, lengths)
    return tuple(tuple(tuple(pack) for pack in packs[rank]) for rank in ranks)


def _balanced_shares(lengths: Sequence[int], num_shares: int) -> list[list[int]]:
    """Greedy, longest first, each to the share with the fewest tokens; within 4/3 of the best possible maximum (Graham, 1969)."""
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    totals = [0] * num_shares
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        target = min(range(num_shares), key=lambda r: (totals[r], len(shares[r]), r))
        shares[target].append(index)
        totals[target] += lengths[index]
    return [sorted(share) for share in shares]


def _first_fit(share: list[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Each sample into the first pack that has room for it."""
    packs: list[list[int]] = []
    totals: list[int] = []
    for index in share:
        fitting = (p for p, total in enumerate(totals) if total + lengths[index] <= max_tokens)
        target = next(fitting, None)
        if target is None:
            packs.append([index])
            totals.append(lengths[index])
        else:
            packs[target].append(index)
            totals[target] += lengths[index]
    return packs


def _split_up_to(packs: list[list[int]], count: int, lengths: Sequence[int]) -> None:
    """Halve the fullest divisible pack until there are `count`; append empty ones when none is left to halve."""
    while len(packs) < count:
        divisible = [p for p in packs if len(p) > 1]
        if not divisible:
            packs.append([])
            continue
        fullest = max(divisible, key=lambda p: sum(lengths[i] for i in p))
        halves = [[fullest[i] for i in half] for half in _balanced_shares([lengths[i] for i in fullest], 2)]
        position = packs.index(fullest)
        packs[position : position + 1] = halves


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """One micro-batch, its samples laid end to end. T tokens, K of them trained.

    Everything but tokens and positions is in *predicting* layout: entry j belongs to the prediction of the token after j.
    With context parallelism tokens, positions and targets are this rank's part, [T / ranks]; all else describes the whole samples,
    without the padding between them, as scores do after `context_parallel.whole`.
    """

    samples: tuple[int, ...]  # positions in the train step's list
    lengths: tuple[int, ...]  # tokens of each sample
    tokens: torch.Tensor  # [1, T] int64
    positions: torch.Tensor  # [1, T] int64, from 0 in each sample
    targets: torch.Tensor  # [T] int64: the token predicted at j; 0 at the end of a sample
    sequences: PackedSeqParams
    trained: torch.Tensor  # [K] int64: which j are trained on
    weights: torch.Tensor  # [K] float32: what each weighs in the mean over the global batch
    sample_of_token: torch.Tensor  # [K] int64: which of `samples` each belongs to
    advantages: torch.Tensor  # [K] float32
    engine_logprobs: torch.Tensor  # [K] float32
    restoring: torch.Tensor | None = None  # int64: see ContextShare.restoring; None without context parallelism

    @property
    def num_scores(self) -> int:
        """Length of log-probs, entropies and values of this pack."""
        return self.tokens.shape[1] if self.restoring is None else len(self.restoring)


def pack(
    samples: Sequence[TrainSample],
    indices: Sequence[int],
    token_weights: np.ndarray,
    *,
    multiple: int,
    device: torch.device,
    context: ContextShare | None = None,
) -> PackedBatch:
    """Lay the samples at `indices` end to end, on `device`.

    token_weights: [len(samples)], see algorithms/reduce. multiple: a rank's tokens are padded to a multiple of it (sequence parallel
    ranks hold equal parts); the padding is a sequence of its own. An empty `indices` makes a filler that trains nothing.
    """
    context = context or ContextShare()
    chosen = [samples[i] for i in indices]
    lengths = [len(s.tokens) for s in chosen]
    segments = context.segments(lengths, multiple=multiple)
    # T counts the padding; max_seqlen is the longest sequence, because megatron (0.16.1) takes positions over the whole pack when it equals T.
    boundaries = torch.tensor(np.concatenate([[0], np.cumsum(segments)]), dtype=torch.int32, device=device)
    tokens = np.zeros(sum(segments), dtype=np.int64)
    positions = np.concatenate([np.arange(n) for n in segments]).astype(np.int64)
    targets = np.zeros_like(tokens)
    trained, weights, owners, advantages, engine = [], [], [], [], []
    start = first = 0  # of a sample among the scores, and among the padded sequences
    for place, (index, sample) in enumerate(zip(indices, chosen, strict=True)):
        length = len(sample.tokens)
        tokens[first : first + length] = sample.tokens
        targets[first : first + length - 1] = sample.tokens[1:]
        at = np.flatnonzero(sample.loss_mask[1:])
        trained.append(at + start)
        weights.append(np.full(len(at), token_weights[index]))
        owners.append(np.full(len(at), place))
        advantages.append(np.full(len(at), sample.advantage))
        engine.append(sample.engine_logprobs[1:][at])
        start, first = start + length, first + segments[place]

    def joined(parts: list[np.ndarray], dtype: torch.dtype) -> torch.Tensor:
        return torch.as_tensor(np.concatenate([np.zeros(0), *parts]), dtype=dtype, device=device)

    longest = max(segments)
    local, restoring = context.local(segments), context.restoring(lengths, segments)
    return PackedBatch(
        samples=tuple(indices),
        lengths=tuple(lengths),
        tokens=torch.as_tensor(tokens[local], device=device)[None],
        positions=torch.as_tensor(positions[local], device=device)[None],
        targets=torch.as_tensor(targets[local], device=device),
        sequences=_sequences(boundaries, longest),
        trained=joined(trained, torch.int64),
        weights=joined(weights, torch.float32),
        sample_of_token=joined(owners, torch.int64),
        advantages=joined(advantages, torch.float32),
        engine_logprobs=joined(engine, torch.float32),
        restoring=None if restoring is None else torch.as_tensor(restoring, device=device),
    )


def _sequences(boundaries: torch.Tensor, longest: int) -> PackedSeqParams:
    """Padding at a sequence's end is seen by no token before it, so it may pass for a part of the sequence."""
    both = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"), boundaries)
    return PackedSeqParams(qkv_format="thd", max_seqlen_q=longest, max_seqlen_kv=longest, **both)


def num_trained_tokens(sample: TrainSample) -> int:
    """Tokens of a sample that the loss sees; the first token is predicted by nothing."""
    return int(np.count_nonzero(sample.loss_mask[1:]))


def packed_rows(rows: Mapping[int, np.ndarray], packs: Sequence[PackedBatch]) -> list[torch.Tensor]:
    """The inverse of record_layout: [T] of each pack in predicting layout, 0 where nothing is predicted.

    rows: position of a sample in the train step's list -> its array [length]; its entry 0 belongs to no prediction.
    """
    found = []
    for pack_ in packs:
        values, start = np.zeros(pack_.num_scores, dtype=np.float32), 0
        for index, length in zip(pack_.samples, pack_.lengths, strict=True):
            values[start : start + length - 1] = rows[index][1:]
            start += length
        found.append(torch.as_tensor(values, device=pack_.tokens.device))
    return found


def record_layout(values: torch.Tensor, lengths: Sequence[int]) -> list[np.ndarray]:
    """[T] of a pack in predicting layout -> per sample [length] float32, where entry t belongs to tokens[t] and entry 0 is 0."""
    flat = values.detach().float().cpu().numpy()
    out, start = [], 0
    for length in lengths:
        row = np.zeros(length, dtype=np.float32)
        row[1:] = flat[start : start + length - 1]
        out.append(row)
        start += length
    return out
