"""Sequences that lie end to end in one row: where they begin, known on the host; positions, rope and attention from it.

Megatron's own way (thd, 0.16.1) asks the device for the boundaries in every layer, four times; each time the host waits
until the device has done all its work. Here they are laid out once a micro-batch, and every layer sees one row of
tokens: Megatron's rope and attention take what is not "thd" as it is.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Sequence

import numpy as np
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from slime_like.algorithms.shared_prompts import Branch
from slime_like.megatron_backend.step.context_parallel import ContextShare

#: PackedSeqParams.qkv_format of the row; Megatron compares with "thd" only.
_ROW = "row"
#: What a call of attention costs beside its pairs of query and key, in pairs: on a CPU core, forward and backward, 0.6
#: to 0.8 ms with 9 heads of 64 (bf16, an AMD EPYC), where a million pairs take 84 ms.
PAIRS_A_CALL = 8192


@dataclasses.dataclass(frozen=True, kw_only=True)
class Spans:
    """What a kernel for sequences of different lengths is told: which queries see which keys.

    Span i: queries [queries[i], queries[i + 1]) see the keys [keys[i], keys[i + 1]); the last query sees all of them,
    the one before it all but one, and so on. With one rank spans are sequences; with context parallelism each of a
    sequence's two chunks here is one, whose keys are everything up to its end.
    """

    queries: torch.Tensor  # [spans + 1] int32
    keys: torch.Tensor  # [spans + 1] int32
    most_queries: int
    most_keys: int
    #: int64: where the keys are in the ranks' parts laid end to end, some more than once; None: they are as they come
    index: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SeenPiece:
    """Tokens [start, stop) of a row whose attention is one call, and the ranges of the row that they see any of."""

    start: int
    stop: int
    seen: tuple[tuple[int, int], ...]
    #: [stop - start, tokens of `seen`] bool; None: causal among themselves
    visible: torch.Tensor | None = None


@dataclasses.dataclass
class PackedSequences(PackedSeqParams):
    """Megatron's description of a pack, and the same for the host and for a row.

    Example: sequences of 3 and 2 tokens: boundaries (0, 3, 5), positions [0, 1, 2, 0, 1].
    """

    boundaries: tuple[int, ...] = (0,)  # of the sequences, all context parallel ranks together
    positions: torch.Tensor | None = None  # [T / ranks] int64: of this rank's tokens in their sequences
    #: [T] int64: where in the ranks' parts laid end to end each token is; None: one rank
    order: torch.Tensor | None = None
    spans: Spans | None = None  # None: no kernel would ask
    #: where some tokens stand for several sequences: what lies in the row, instead of one sequence after the other
    branches: tuple[Branch, ...] | None = None

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sequence, all context parallel ranks together."""
        return [stop - start for start, stop in zip(self.boundaries, self.boundaries[1:], strict=False)]

    @functools.cached_property
    def pieces(self) -> list[SeenPiece]:
        """The attention of `branches` where no kernel takes them all at once: one call for a tree of short branches."""
        assert self.branches is not None and self.positions is not None, "only a row of branches is cut into pieces"
        return [piece for tree in _trees(self.branches) for piece in _pieces_of(tree, self.positions.device)]


def packed_sequences(segments: Sequence[int], context: ContextShare, device: torch.device) -> PackedSequences:
    """Sequences of these lengths end to end, as Megatron's thd and for a row.

    Padding at a sequence's end is seen by no token before it, so it may pass for a part of the sequence.
    """
    boundaries = np.concatenate([[0], np.cumsum(segments)]).astype(np.int32)
    on_device = torch.as_tensor(boundaries, device=device)
    positions = np.concatenate([np.arange(length) for length in segments])[context.local(segments)]
    order, spans = None, None
    if context.size > 1:
        parts = [dataclasses.replace(context, rank=rank).local(segments) for rank in range(context.size)]
        place = np.argsort(np.concatenate(parts))
        order = torch.as_tensor(place, device=device)
        if device.type == "cuda":
            spans = _spans_of_chunks(segments, context, place, device)
    else:
        spans = Spans(queries=on_device, keys=on_device, most_queries=max(segments), most_keys=max(segments))
    both = dict.fromkeys(("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded"), on_device)
    return PackedSequences(
        qkv_format="thd",
        max_seqlen_q=max(segments),
        max_seqlen_kv=max(segments),
        **both,
        boundaries=tuple(boundaries.tolist()),
        positions=torch.as_tensor(positions, device=device),
        order=order,
        spans=spans,
    )


def shared_sequences(branches: Sequence[Branch], padding: int, device: torch.device) -> PackedSequences:
    """The row of these branches, and `padding` tokens behind them.

    Megatron's thd has no word for it: only a model that takes packs as rows can be given it.
    """
    end = branches[-1].stop if branches else 0
    everything = [*branches, Branch(start=end, stop=end + padding)] if padding else branches
    lengths = [branch.stop - branch.start for branch in everything]
    first = [branch.first_position for branch in everything]
    seen = [before + length for before, length in zip(first, lengths, strict=True)]
    positions = np.concatenate([np.arange(a, b) for a, b in zip(first, seen, strict=True)])
    boundaries = np.cumsum([0, *lengths])
    return PackedSequences(
        qkv_format=_ROW,
        max_seqlen_q=max(seen),
        max_seqlen_kv=max(seen),
        boundaries=tuple(boundaries.tolist()),
        positions=torch.as_tensor(positions, device=device),
        spans=_spans_of_branches(everything, device) if device.type == "cuda" else None,
        branches=tuple(everything),
    )


def _trees(branches: Sequence[Branch]) -> list[list[Branch]]:
    """Branches that see others, each behind the one that all of them see."""
    trees: list[list[Branch]] = []
    for branch in branches:
        if branch.before:
            trees[-1].append(branch)
        else:
            trees.append([branch])
    return trees


def _pieces_of(tree: Sequence[Branch], device: torch.device) -> list[SeenPiece]:
    """One piece for the whole tree where that looks at few more pairs of tokens than one for each of its branches."""
    start, stop = tree[0].start, tree[-1].stop
    pairs = sum((branch.stop - branch.start) * (branch.first_position + branch.stop - branch.start) for branch in tree)
    if (stop - start) ** 2 - pairs > PAIRS_A_CALL * (len(tree) - 1):
        return [_piece_of(branch, device) for branch in tree]
    if len(tree) == 1:
        return [SeenPiece(start=start, stop=stop, seen=((start, stop),))]
    visible = np.zeros((stop - start, stop - start), dtype=bool)
    for branch in tree:
        rows = slice(branch.start - start, branch.stop - start)
        for a, b in branch.before:
            visible[rows, a - start : b - start] = True
        visible[rows, rows] = _causal(branch.stop - branch.start)
    return [SeenPiece(start=start, stop=stop, seen=((start, stop),), visible=torch.as_tensor(visible, device=device))]


@functools.lru_cache(maxsize=64)
def _causal(length: int) -> np.ndarray:
    return np.tri(length, dtype=bool)


def _piece_of(branch: Branch, device: torch.device) -> SeenPiece:
    seen = (*branch.before, (branch.start, branch.stop))
    if not branch.before:
        return SeenPiece(start=branch.start, stop=branch.stop, seen=seen)
    # Causal SDPA of fewer queries than keys lets the first query see the first key only; here the last sees all.
    length = branch.stop - branch.start
    visible = torch.ones(length, branch.first_position + length, dtype=torch.bool, device=device)
    return SeenPiece(start=branch.start, stop=branch.stop, seen=seen, visible=visible.tril(branch.first_position))


def _spans_of_branches(branches: Sequence[Branch], device: torch.device) -> Spans:
    """A branch is a span: its tokens see those before it, and themselves."""
    ranges = [[*branch.before, (branch.start, branch.stop)] for branch in branches]
    lengths = [branch.stop - branch.start for branch in branches]
    seen = [sum(b - a for a, b in own) for own in ranges]
    index = np.concatenate([np.arange(a, b) for own in ranges for a, b in own])
    return Spans(
        queries=torch.as_tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device=device),
        keys=torch.as_tensor(np.cumsum([0, *seen]), dtype=torch.int32, device=device),
        most_queries=max(lengths),
        most_keys=max(seen),
        index=torch.as_tensor(index, device=device),
    )


def _spans_of_chunks(segments: Sequence[int], context: ContextShare, place: np.ndarray, device: torch.device) -> Spans:
    """place: of each token, in the ranks' parts laid end to end."""
    queries, keys, index = [0], [0], []
    for start, length in zip(np.cumsum([0, *segments[:-1]]), segments, strict=True):
        chunk = length // (2 * context.size)
        for number in (context.rank, 2 * context.size - 1 - context.rank):
            queries.append(queries[-1] + chunk)
            keys.append(keys[-1] + (number + 1) * chunk)
            index.append(place[start : start + (number + 1) * chunk])
    return Spans(
        queries=torch.tensor(queries, dtype=torch.int32, device=device),
        keys=torch.tensor(keys, dtype=torch.int32, device=device),
        most_queries=int(max(np.diff(queries))),
        most_keys=int(max(np.diff(keys))),
        index=torch.as_tensor(np.concatenate(index), device=device),
    )


class RowRotary(torch.nn.Module):
    """Rotary embeddings of each token of a row, where Megatron's module gives those of each position.

    whole: Megatron's. without_row: its user has dropped the row's dimension (multi-latent attention).
    """

    def __init__(self, whole: torch.nn.Module, *, without_row: bool):
        super().__init__()
        self.whole = whole
        self._without_row = without_row

    def get_rotary_seq_len(self, inference_context, transformer, transformer_input, config, packed_seq_params=None):
        """What forward() is then called with: the row, where there is one."""
        if isinstance(packed_seq_params, PackedSequences):
            return packed_seq_params
        return self.whole.get_rotary_seq_len(
            inference_context, transformer, transformer_input, config, packed_seq_params
        )

    def forward(self, where: PackedSequences | int, **options):
        """[T / ranks, 1, 1, D] of a row (without_row: [T / ranks, 1, D]); for a length what Megatron's gives.

        Yarn's module gives a scale beside.
        """
        if not isinstance(where, PackedSequences):
            return self.whole(where, **options)
        given = self.whole(where.max_seqlen_q, packed_seq=True)
        embedding, *scale = given if isinstance(given, tuple) else (given,)
        rows = embedding.index_select(0, where.positions)
        rows = rows.squeeze(1) if self._without_row else rows
        return (rows, *scale) if scale else rows


def take_packs_as_rows(stage: GPTModel) -> None:
    """Let a stage whose attention is ours see packs as rows, whoever calls it with Megatron's description of them."""
    for module in list(stage.modules()):
        rotary = getattr(module, "rotary_pos_emb", None)
        if isinstance(rotary, torch.nn.Module):
            module.rotary_pos_emb = RowRotary(rotary, without_row=isinstance(module, MLASelfAttention))
    stage.register_forward_pre_hook(_pack_as_row, with_kwargs=True)


def known_on_host(packed: PackedSeqParams) -> PackedSequences:
    """The same pack; whoever described it to Megatron only makes the host ask for its boundaries."""
    if isinstance(packed, PackedSequences):
        return packed
    boundaries = packed.cu_seqlens_q
    return packed_sequences(boundaries.diff().tolist(), ContextShare.of_this_rank(), boundaries.device)


def _pack_as_row(_: torch.nn.Module, args: tuple, options: dict) -> tuple[tuple, dict]:
    packed = options.get("packed_seq_params")
    if packed is None:
        return args, options
    row = copy.copy(known_on_host(packed))
    row.qkv_format = _ROW
    return args, options | {"packed_seq_params": row}
