"""A row's positions, order and spans against plain loops; its rope against Megatron's of packed sequences."""

from __future__ import annotations

import dataclasses
import types

import numpy as np
import pytest
import torch

from slime_like.algorithms.shared_prompts import Branch
from slime_like.megatron_backend.model.packed import (
    RowRotary,
    _spans_of_branches,
    packed_sequences,
    shared_sequences,
)
from slime_like.megatron_backend.step.context_parallel import ContextShare

LENGTHS = [8, 4, 12]
CPU = torch.device("cpu")


def shares(size: int) -> list[ContextShare]:
    return [ContextShare(size=size, rank=rank) for rank in range(size)]


def test_a_row_is_known_on_the_host():
    row = packed_sequences([3, 2], ContextShare(), CPU)
    assert row.boundaries == (0, 3, 5) and row.lengths == [3, 2]
    assert row.positions.tolist() == [0, 1, 2, 0, 1] and row.cu_seqlens_q.tolist() == [0, 3, 5]
    assert (row.qkv_format, row.max_seqlen_q, row.order) == ("thd", 3, None)
    assert row.spans.queries.tolist() == row.spans.keys.tolist() == [0, 3, 5] and row.spans.most_keys == 3


@pytest.mark.parametrize("size", [2, 3])
def test_the_ranks_parts_come_together_in_order(size):
    lengths = [2 * size, 4 * size]
    parts = [share.local(lengths) for share in shares(size)]
    for share, part in zip(shares(size), parts, strict=True):
        row = packed_sequences(lengths, share, CPU)
        assert np.concatenate(parts)[row.order].tolist() == list(range(6 * size))
        assert row.positions.tolist() == [p if p < 2 * size else p - 2 * size for p in part]


@pytest.mark.parametrize("size", [1, 2])
def test_each_token_sees_its_sequence_up_to_itself(size):
    parts = np.concatenate([share.local(LENGTHS) for share in shares(size)])
    starts = np.cumsum([0, *LENGTHS])
    for share in shares(size):
        # The device decides whether spans are laid out; the numbers are the host's.
        spans = packed_sequences(LENGTHS, share, CPU).spans if size == 1 else spans_of(share)
        keys = np.arange(sum(LENGTHS)) if spans.index is None else parts[spans.index]
        seen = {}
        queries, ends = spans.queries.tolist(), spans.keys.tolist()
        for a, b, c, d in zip(queries, queries[1:], ends, ends[1:], strict=False):
            assert b - a <= spans.most_queries and d - c <= spans.most_keys
            for query in range(a, b):
                seen[query] = keys[c : d - (b - 1 - query)].tolist()
        for query, token in enumerate(share.local(LENGTHS)):
            start = max(s for s in starts if s <= token)
            assert seen[query] == list(range(start, token + 1))


def spans_of(share: ContextShare):
    """What a GPU would be told."""
    from slime_like.megatron_backend.model.packed import _spans_of_chunks

    parts = [dataclasses.replace(share, rank=rank).local(LENGTHS) for rank in range(share.size)]
    return _spans_of_chunks(LENGTHS, share, np.argsort(np.concatenate(parts)), CPU)


#: A prompt, two answers, of which the second forks; a sequence alone.
BRANCHES = [
    Branch(start=0, stop=5),
    Branch(start=5, stop=7, before=((0, 5),)),
    Branch(start=7, stop=10, before=((0, 5),)),
    Branch(start=10, stop=11, before=((0, 5), (7, 10))),
    Branch(start=11, stop=13, before=((0, 5), (7, 10))),
    Branch(start=13, stop=17),
]


def test_a_row_of_branches():
    row = shared_sequences(BRANCHES, 3, CPU)
    assert row.boundaries == (0, 5, 7, 10, 11, 13, 17, 20) and row.max_seqlen_q == 10
    assert row.positions.tolist() == [*range(5), 5, 6, 5, 6, 7, 8, 8, 9, *range(4), *range(3)]
    assert row.branches[-1] == Branch(start=17, stop=20) and row.branches[:-1] == tuple(BRANCHES)
    assert shared_sequences([], 2, CPU).boundaries == (0, 2)


def test_each_token_of_a_branch_sees_what_is_before_it():
    spans = _spans_of_branches(BRANCHES, CPU)
    queries, keys = spans.queries.tolist(), spans.keys.tolist()
    for number, branch in enumerate(BRANCHES):
        assert (queries[number], queries[number + 1]) == (branch.start, branch.stop)
        before = [place for a, b in branch.before for place in range(a, b)]
        seen = spans.index[keys[number] : keys[number + 1]].tolist()
        assert seen == before + list(range(branch.start, branch.stop))
    assert (spans.most_queries, spans.most_keys) == (5, 10)


#: Thirty tokens where BRANCHES has one: too many pairs for one call.
LONG_BRANCHES = [
    Branch(start=30 * b.start, stop=30 * b.stop, before=tuple((30 * a, 30 * z) for a, z in b.before)) for b in BRANCHES
]


@pytest.mark.parametrize(("branches", "calls"), [(BRANCHES, 3), (LONG_BRANCHES, 7), (LONG_BRANCHES[:3], 4)])
def test_a_row_is_cut_into_pieces_that_see_the_same(branches, calls):
    """However many branches one call is for; the last answer has nothing in common with the rest, nor has padding."""
    row = shared_sequences(branches, 3, CPU)
    seen = {}
    for piece in row.pieces:
        places = [place for a, b in piece.seen for place in range(a, b)]
        size = piece.stop - piece.start
        visible = torch.ones(size, size).tril().bool() if piece.visible is None else piece.visible
        for token, mask in zip(range(piece.start, piece.stop), visible, strict=True):
            seen[token] = [place for place, sees in zip(places, mask, strict=True) if sees]
    assert list(seen) == list(range(row.boundaries[-1])) and row.pieces is row.pieces
    for branch in row.branches:
        before = [place for a, b in branch.before for place in range(a, b)]
        for token in range(branch.start, branch.stop):
            assert seen[token] == before + list(range(branch.start, token + 1))
    assert len(row.pieces) == calls


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_of_a_row_is_megatrons_of_packed_sequences(size, interleaved):
    from megatron.core.models.common.embeddings.rope_utils import apply_rotary_pos_emb
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    config = types.SimpleNamespace(
        apply_rope_fusion=False, rotary_interleaved=interleaved, multi_latent_attention=False, mrope_section=None
    )
    for share in shares(size):
        group = types.SimpleNamespace(size=lambda: size, rank=lambda share=share: share.rank)
        whole = RotaryEmbedding(16, 1.0, rotary_interleaved=interleaved, use_cpu_initialization=True, cp_group=group)
        row = packed_sequences(LENGTHS, share, CPU)
        heads = torch.randn(sum(LENGTHS) // size, 3, 16, generator=torch.Generator().manual_seed(0))
        theirs = apply_rotary_pos_emb(
            heads, whole(max(LENGTHS), packed_seq=True), config, cu_seqlens=row.cu_seqlens_q, cp_group=group
        )
        for without_row in (False, True):
            rotary = RowRotary(whole, without_row=without_row)
            embedding = rotary(rotary.get_rotary_seq_len(None, None, None, None, row), packed_seq=False, cp_group=None)
            if without_row:
                if interleaved:
                    continue  # no latent attention is
                ours = apply_rotary_pos_emb(heads, embedding, config, cp_group=group)
            else:
                ours = apply_rotary_pos_emb(heads[:, None], embedding, config, cp_group=group)[:, 0]
            assert torch.equal(ours, theirs)


def test_a_batch_of_rows_is_left_to_megatrons_rope():
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    group = types.SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    whole = RotaryEmbedding(16, 1.0, use_cpu_initialization=True, cp_group=group)
    config = types.SimpleNamespace(sequence_parallel=False, context_parallel_size=1)
    rotary = RowRotary(whole, without_row=False)
    length = rotary.get_rotary_seq_len(None, None, torch.zeros(6, 2, 4), config, None)
    assert length == 6 and torch.equal(rotary(length), whole(6))
