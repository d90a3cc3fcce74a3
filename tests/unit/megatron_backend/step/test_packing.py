import dataclasses

import numpy as np
import pytest
import torch

from slime_like.megatron_backend.step.context_parallel import ContextShare
from slime_like.megatron_backend.step.packing import PackLayout, num_trained_tokens, pack, record_layout
from slime_like.records import TrainSample, per_token


def sample(tokens, mask, advantage=1.0):
    length = len(tokens)
    return TrainSample(
        prompt_index=0,
        sample_index=0,
        tokens=np.array(tokens, dtype=np.int32),
        loss_mask=np.array(mask, dtype=np.int8),
        engine_logprobs=-np.arange(length, dtype=np.float32),
        weight_versions=np.zeros(length, dtype=np.int32),
        reward=0.0,
        advantages=per_token(advantage, mask),
        weights=per_token(1.0, mask),
    )


def test_pack_by_hand():
    samples = [sample([11, 12, 21, 22], [0, 0, 1, 1], 2.0), sample([31, 41, 42], [0, 1, 0], -1.0)]
    packed = pack(samples, (1, 0), np.array([0.25, 0.5]), layout=PackLayout(multiple=4), device=torch.device("cpu"))
    assert packed.tokens.tolist() == [[31, 41, 42, 11, 12, 21, 22, 0]]
    assert packed.positions.tolist() == [[0, 1, 2, 0, 1, 2, 3, 0]]
    assert packed.sequences.cu_seqlens_q.tolist() == [0, 3, 7, 8]
    assert packed.sequences.max_seqlen_q == 4  # the longest sequence, not the pack
    # Entry j predicts the token after it: sample 1 trains on 41 (from j = 0), sample 0 on 21 and 22 (from j = 4, 5).
    assert packed.targets.tolist() == [41, 42, 0, 12, 21, 22, 0, 0]
    assert packed.trained.tolist() == [0, 4, 5]
    assert packed.weights.tolist() == [0.5, 0.25, 0.25]
    assert packed.advantages.tolist() == [-1.0, 2.0, 2.0]
    assert packed.engine_logprobs.tolist() == [-1.0, -2.0, -3.0]


def test_padded_by_hand():
    samples = [sample([11, 12, 21, 22, 23], [0, 0, 1, 1, 0], 2.0), sample([31, 41, 42], [0, 1, 0], -1.0)]
    packed = pack(
        samples, (1, 0), np.array([0.25, 0.5]), layout=PackLayout(padded=True, multiple=4), device=torch.device("cpu")
    )
    assert packed.tokens.tolist() == [[31, 41, 42, 0, 0, 0, 0, 0], [11, 12, 21, 22, 23, 0, 0, 0]]
    assert packed.positions.tolist() == [list(range(8)), list(range(8))]
    assert packed.targets.tolist() == [41, 42, 0, 0, 0, 0, 0, 0, 12, 21, 22, 23, 0, 0, 0, 0]
    assert packed.sequences is None
    # Scores are brought into the layout of samples end to end: [16] -> [8].
    assert packed.num_scores == 8
    assert packed.restoring.tolist() == [0, 1, 2, 8, 9, 10, 11, 12]
    assert packed.trained.tolist() == [0, 4, 5]
    assert packed.engine_logprobs.tolist() == [-1.0, -2.0, -3.0]


@pytest.mark.parametrize(("padded", "shape"), [(False, (1, 12)), (True, (2, 8))])
def test_all_packs_of_one_shape(padded, shape):
    samples = [sample(list(range(length)), [1] * length) for length in (5, 3, 7, 4)]
    chosen = [(0,), (1, 2), (3,), ()]
    one_shape = PackLayout(padded=padded, multiple=4).holding(
        [[len(samples[i].tokens) for i in indices] for indices in chosen], ContextShare()
    )
    for indices in chosen:
        packed = pack(samples, indices, np.ones(4), layout=one_shape, device=torch.device("cpu"))
        assert packed.tokens.shape == shape
        assert packed.lengths == tuple(len(samples[i].tokens) for i in indices)


def test_filler_trains_nothing():
    packed = pack([], (), np.zeros(0), layout=PackLayout(multiple=2), device=torch.device("cpu"))
    assert packed.tokens.shape == (1, 2)
    assert len(packed.trained) == 0
    assert packed.sequences.cu_seqlens_q.tolist() == [0, 2]


def test_first_token_is_never_trained():
    assert num_trained_tokens(sample([1, 2, 3], [1, 0, 1])) == 1


def test_back_to_record_layout():
    rows = record_layout(torch.tensor([1.0, 2.0, 9.0, 3.0, 9.0, 9.0]), (3, 2))
    assert [r.tolist() for r in rows] == [[0.0, 1.0, 2.0], [0.0, 3.0]]


def test_a_tokens_own_weight_multiplies_its_share():
    one = dataclasses.replace(
        sample([11, 12, 21, 22], [0, 0, 1, 1]), weights=np.array([9, 9, 0.5, -2], dtype=np.float32)
    )
    packed = pack([one], (0,), np.array([0.25]), layout=PackLayout(), device=torch.device("cpu"))
    assert packed.weights.tolist() == [0.125, -0.5] and packed.own_weights.tolist() == [0.5, -2.0]
