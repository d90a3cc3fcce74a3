import numpy as np
import pytest
import torch

from slime_like.config.training import BatchConfig
from slime_like.megatron_backend.packing import num_trained_tokens, pack, plan_micro_batches, record_layout
from slime_like.records import TrainSample

DYNAMIC = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 20}


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
        advantage=advantage,
    )


@pytest.mark.parametrize("options", [{"micro_batch_size": 2}, DYNAMIC, DYNAMIC | {"balance_data": True}, {"balance_data": True}])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("count", [1, 2, 7, 24])
def test_every_sample_is_trained_once_and_ranks_stay_in_step(options, ranks, count):
    lengths = np.random.default_rng(count).integers(2, 19, count).tolist()
    plan = plan_micro_batches(lengths, data_parallel_size=ranks, batch=BatchConfig(**options))
    assert len(plan) == ranks
    assert sorted(i for packs in plan for indices in packs for i in indices) == list(range(count))
    assert len({len(packs) for packs in plan}) == 1
    if options.get("use_dynamic_batch_size"):
        assert all(sum(lengths[i] for i in indices) <= 20 for packs in plan for indices in packs)
    else:
        assert all(len(indices) <= options.get("micro_batch_size", 1) for packs in plan for indices in packs)
    assert plan == plan_micro_batches(lengths, data_parallel_size=ranks, batch=BatchConfig(**options))


def test_plan_by_hand():
    # Strided shares [0, 2, 4] and [1, 3]; first fit under 20: [10, 9], [12] and [8, 3], which is halved to keep step.
    plan = plan_micro_batches([10, 8, 12, 3, 9], data_parallel_size=2, batch=BatchConfig(**DYNAMIC))
    assert plan == (((0, 4), (2,)), ((1,), (3,)))


def test_balancing_evens_out_tokens():
    lengths = [100, 1, 90, 1, 80, 1, 70, 1]
    batch = BatchConfig(use_dynamic_batch_size=True, max_tokens_per_gpu=1000)
    plain = plan_micro_batches(lengths, data_parallel_size=2, batch=batch)
    even = plan_micro_batches(lengths, data_parallel_size=2, batch=BatchConfig(use_dynamic_batch_size=True, max_tokens_per_gpu=1000, balance_data=True))
    loads = [[sum(lengths[i] for indices in packs for i in indices) for packs in plan] for plan in (plain, even)]
    assert loads == [[340, 4], [172, 172]]


def test_over_long_sample_is_alone():
    plan = plan_micro_batches([5, 50, 5], data_parallel_size=1, batch=BatchConfig(**DYNAMIC))
    assert plan == (((0, 2), (1,)),)


def test_pack_by_hand():
    samples = [sample([11, 12, 21, 22], [0, 0, 1, 1], 2.0), sample([31, 41, 42], [0, 1, 0], -1.0)]
    packed = pack(samples, (1, 0), np.array([0.25, 0.5]), multiple=4, device=torch.device("cpu"))
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


def test_filler_trains_nothing():
    packed = pack([], (), np.zeros(0), multiple=2, device=torch.device("cpu"))
    assert packed.tokens.shape == (1, 2)
    assert len(packed.trained) == 0
    assert packed.sequences.cu_seqlens_q.tolist() == [0, 2]


def test_first_token_is_never_trained():
    assert num_trained_tokens(sample([1, 2, 3], [1, 0, 1])) == 1


def test_back_to_record_layout():
    rows = record_layout(torch.tensor([1.0, 2.0, 9.0, 3.0, 9.0, 9.0]), (3, 2))
    assert [r.tolist() for r in rows] == [[0.0, 1.0, 2.0], [0.0, 3.0]]
