"""The zig-zag split of a pack, and its inverse."""

import dataclasses

import numpy as np
import pytest
import torch

from slime_like.megatron_backend.step.context_parallel import ContextShare, zigzag_positions
from slime_like.megatron_backend.step.packing import PackLayout, pack
from slime_like.records import TrainSample, per_token


def sample(tokens, mask, advantage=1.0):
    size = len(tokens)
    return TrainSample(
        prompt_index=0, sample_index=0, tokens=np.array(tokens, dtype=np.int32),
        loss_mask=np.array(mask, dtype=np.int8),
        engine_logprobs=np.arange(size, dtype=np.float32), weight_versions=np.zeros(size, dtype=np.int32), reward=0.0,
        advantages=per_token(advantage, mask), weights=per_token(1.0, mask),
    )  # fmt: skip


def test_each_rank_has_an_early_and_a_late_chunk():
    assert zigzag_positions(8, 2, 0).tolist() == [0, 1, 6, 7]
    assert zigzag_positions(8, 2, 1).tolist() == [2, 3, 4, 5]
    with pytest.raises(AssertionError, match="6 tokens"):
        zigzag_positions(6, 2, 0)


def test_padding_is_per_sequence_and_then_per_rank():
    assert ContextShare().segments([5, 4], multiple=4) == [5, 4, 3]
    assert ContextShare(size=2).segments([5, 4], multiple=1) == [8, 4]
    assert ContextShare(size=2).segments([5, 4], multiple=4) == [8, 4, 4]
    assert ContextShare(size=4).segments([3], multiple=3) == [8, 16]
    assert ContextShare(size=2).segments([], multiple=1) == [4]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ranks_hold_every_token_once_and_scores_come_back_in_order(size):
    lengths = [5, 3, 16]
    shares = [ContextShare(size=size, rank=rank) for rank in range(size)]
    segments = shares[0].segments(lengths, multiple=2)
    parts = [share.local(segments) for share in shares]
    assert sorted(np.concatenate(parts).tolist()) == list(range(sum(segments)))
    assert {len(part) for part in parts} == {sum(segments) // size}
    starts = np.cumsum([0, *segments])[:3]
    wanted = np.concatenate([start + np.arange(n) for start, n in zip(starts, lengths, strict=True)])
    restoring = shares[0].restoring(lengths, segments)
    if size == 1:
        assert restoring is None
    else:
        np.testing.assert_array_equal(np.concatenate(parts)[restoring], wanted)


def test_targets_at_chunk_borders_come_from_the_whole_sequence():
    samples = [sample([1, 2, 3, 4, 5, 6, 7], [0, 0, 1, 1, 1, 1, 1])]
    share = ContextShare(size=2)
    shares = [dataclasses.replace(share, rank=rank) for rank in range(2)]
    packs = [
        pack(samples, [0], np.ones(1), layout=PackLayout(), device=torch.device("cpu"), context=each) for each in shares
    ]
    assert packs[0].tokens[0].tolist() == [1, 2, 7, 0] and packs[0].targets.tolist() == [2, 3, 0, 0]
    assert packs[1].tokens[0].tolist() == [3, 4, 5, 6] and packs[1].targets.tolist() == [4, 5, 6, 7]
    assert packs[0].positions[0].tolist() == [0, 1, 6, 7]
    for one in packs:
        assert one.sequences.cu_seqlens_q.tolist() == [0, 8] and one.sequences.max_seqlen_q == 8
        # Scores, and what is trained, are of the 7 real tokens.
        assert one.num_scores == 7 and one.trained.tolist() == [1, 2, 3, 4, 5]
        assert one.engine_logprobs.tolist() == [2, 3, 4, 5, 6]


def test_a_filler_has_tokens_and_no_scores():
    filler = pack(
        [],
        [],
        np.ones(0),
        layout=PackLayout(multiple=2),
        device=torch.device("cpu"),
        context=ContextShare(size=2, rank=1),
    )
    assert filler.tokens.shape == (1, 2) and filler.num_scores == 0 and len(filler.trained) == 0
