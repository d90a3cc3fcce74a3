import numpy as np
import pytest

from slime_like.algorithms.flops import forward_flops
from slime_like.algorithms.micro_batches import imbalance, largest_differencing, plan_micro_batches
from slime_like.config.batch import BatchConfig
from slime_like.config.model import ModelConfig

DYNAMIC = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": 20}
BY_TURNS = {"balance_by_flops": False}
BY_TOKENS = BY_TURNS | {"balance_data": True}


@pytest.mark.parametrize(
    "options",
    [{"micro_batch_size": 2}, {"balance_data": True}, DYNAMIC, DYNAMIC | BY_TURNS, DYNAMIC | BY_TOKENS],
)
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
    plan = plan_micro_batches([10, 8, 12, 3, 9], data_parallel_size=2, batch=BatchConfig(**DYNAMIC | BY_TURNS))
    assert plan == (((0, 4), (2,)), ((1,), (3,)))


@pytest.mark.parametrize(
    "options", [{}, DYNAMIC, DYNAMIC | BY_TURNS, DYNAMIC | BY_TOKENS, DYNAMIC | {"balance_by_flops": True}]
)
def test_the_interleaved_schedule_gets_as_many_as_it_wants(options):
    lengths = [10, 8, 12, 3, 9]
    plan = plan_micro_batches(
        lengths, data_parallel_size=2, batch=BatchConfig(**options), costs=lengths, count_multiple=4
    )
    assert {len(packs) for packs in plan} == {4}
    assert sorted(i for packs in plan for indices in packs for i in indices) == list(range(5))


def test_balancing_evens_out_tokens():
    lengths = [100, 1, 90, 1, 80, 1, 70, 1]
    batch = BatchConfig(use_dynamic_batch_size=True, max_tokens_per_gpu=1000, balance_by_flops=False)
    plain = plan_micro_batches(lengths, data_parallel_size=2, batch=batch)
    even = plan_micro_batches(
        lengths,
        data_parallel_size=2,
        batch=BatchConfig(use_dynamic_batch_size=True, max_tokens_per_gpu=1000, **BY_TOKENS),
    )
    loads = [[sum(lengths[i] for indices in packs for i in indices) for packs in plan] for plan in (plain, even)]
    assert loads == [[340, 4], [172, 172]]


def test_over_long_sample_is_alone():
    plan = plan_micro_batches([5, 50, 5], data_parallel_size=1, batch=BatchConfig(**DYNAMIC))
    assert plan == (((0, 2), (1,)),)


CAP = 4096
BY_FLOPS = BatchConfig(use_dynamic_batch_size=True, max_tokens_per_gpu=CAP, balance_by_flops=True)
MODEL = ModelConfig(
    num_layers=4,
    hidden_size=512,
    ffn_hidden_size=1536,
    num_attention_heads=8,
    vocab_size=1000,
    swiglu=True,
    disable_bias_linear=True,
)


def long_tail(seed, count):
    """Log-normal lengths as of reasoning traces, a few beyond the cap."""
    generator = np.random.default_rng(seed)
    return np.clip(generator.lognormal(6.2, 1.0, count), 2, 1.5 * CAP).astype(int).tolist()


def by_flops(lengths, ranks, cap=CAP):
    costs = [forward_flops(MODEL).of(n) for n in lengths]
    batch = BatchConfig(use_dynamic_batch_size=True, max_tokens_per_gpu=cap, balance_by_flops=True)
    return plan_micro_batches(lengths, data_parallel_size=ranks, batch=batch, costs=costs), costs


@pytest.mark.parametrize("ranks", [1, 2, 5, 8])
def test_a_plan_by_flops_keeps_every_promise(ranks):
    """Each sample once, equal numbers of micro-batches, the cap, equal shares under another cap.

    Whatever the lengths are.
    """
    for seed in range(40):
        lengths = long_tail(seed, 1 + 7 * seed)
        plan, costs = by_flops(lengths, ranks)
        assert sorted(i for packs in plan for pack in packs for i in pack) == list(range(len(lengths)))
        assert len(plan) == ranks and len({len(packs) for packs in plan}) == 1
        for packs in plan:
            for pack in packs:
                assert sum(lengths[i] for i in pack) <= CAP or len(pack) == 1
            work = [sum(costs[i] for i in pack) for pack in packs]
            assert work == sorted(work, reverse=True)
        wider, _ = by_flops(lengths, ranks, cap=4 * CAP)
        assert [sorted(i for pack in packs for i in pack) for packs in wider] == [
            sorted(i for pack in packs for i in pack) for packs in plan
        ]
        assert len(wider[0]) <= len(plan[0])


def test_the_order_of_the_samples_changes_nothing_by_flops():
    lengths = long_tail(3, 100)
    order = np.random.default_rng(0).permutation(100)

    def shape(lengths):
        plan, _ = by_flops(lengths, 4)
        return [[sorted(lengths[i] for i in pack) for pack in packs] for packs in plan]

    assert shape(lengths) == shape([lengths[i] for i in order])


def test_long_tails_are_balanced_within_one_percent_and_nearly_full():
    """Against balancing of tokens, which leaves the rank with the longest samples the most attention."""
    lengths = long_tail(0, 512)
    plan, costs = by_flops(lengths, 8)
    by_tokens = plan_micro_batches(
        lengths,
        data_parallel_size=8,
        batch=BatchConfig(use_dynamic_batch_size=True, max_tokens_per_gpu=CAP, **BY_TOKENS),
        costs=costs,
    )
    assert imbalance(plan, costs) < 0.01 < imbalance(by_tokens, costs)
    # No packing needs fewer micro-batches on a rank than the rank's tokens fill.
    bound = max(-(-sum(min(lengths[i], CAP) for pack in packs for i in pack) // CAP) for packs in plan)
    assert len(plan[0]) <= bound + 1
    assert len(plan[0]) <= len(by_tokens[0])


def test_a_plan_by_flops_by_hand():
    # The long sample costs more than the three short ones together, although it has as many tokens.
    lengths, costs = [6, 2, 2, 2], [36, 4, 4, 4]
    batch = BatchConfig(use_dynamic_batch_size=True, max_tokens_per_gpu=6, balance_by_flops=True)
    assert plan_micro_batches(lengths, data_parallel_size=2, batch=batch, costs=costs) == (((0,),), ((1, 2, 3),))
    assert imbalance((((0,),), ((1, 2, 3),)), costs) == pytest.approx(36 / 24 - 1)


def test_largest_differencing_by_hand():
    # 8-7 and 6-5 leave differences 1 and 1; those leave 0; 4 goes to either side: 16 and 14 (the best possible is 15
    # and 15).
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in share) for share in largest_differencing([8, 7, 6, 5, 4], 2)) == [
        14,
        16,
    ]
    assert largest_differencing([], 2) == [[], []]
    assert sorted(map(len, largest_differencing([3, 3], 4))) == [0, 0, 1, 1]


def test_a_share_that_only_filling_up_can_pack():
    """Spreading 5, 4, 3, 3, 3 over two packs of 9 puts 3 beside 5 and beside 4 and has no room for the last.

    Filling up has: 5 + 4 and 3 + 3 + 3.
    """
    batch = BatchConfig(use_dynamic_batch_size=True, max_tokens_per_gpu=9, balance_by_flops=True)
    plan = plan_micro_batches([5, 4, 3, 3, 3], data_parallel_size=1, batch=batch, costs=[5, 4, 3, 3, 3])
    assert sorted(plan[0]) == [(0, 1), (2, 3, 4)]


def planned(lengths, ranks, cap=CAP, **options):
    """(plan, costs) of dynamic batches."""
    costs = [forward_flops(MODEL).of(n) for n in lengths]
    batch = BatchConfig(use_dynamic_batch_size=True, max_tokens_per_gpu=cap, **options)
    return plan_micro_batches(lengths, data_parallel_size=ranks, batch=batch, costs=costs), costs


@pytest.mark.parametrize("options", [{}, {"balance_data": True}])
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_several_ranks_are_balanced_unless_that_is_denied(ranks, options):
    """Whatever the lengths are: the plan that the flag gives, no two ranks further apart than the largest sample is."""
    saved = []
    for seed in range(40):
        lengths = long_tail(seed, 1 + 5 * seed)
        plan, costs = planned(lengths, ranks, **options)
        assert plan == planned(lengths, ranks, balance_by_flops=True)[0]
        loads = [sum(costs[i] for pack in packs for i in pack) for packs in plan]
        assert max(loads) - min(loads) <= max(costs)
        if seed:
            turns, _ = planned(lengths, ranks, **BY_TURNS)
            assert imbalance(plan, costs) <= imbalance(turns, costs)
            saved.append(len(turns[0]) - len(plan[0]))
    assert min(saved) >= -1 and sum(saved) > 0  # short samples, of more tokens for as much work, may need one more


def test_one_rank_keeps_the_order_of_its_samples_where_that_costs_no_micro_batch():
    """First fit in their order, as without balancing; only fewer micro-batches are worth another order."""
    kept = fewer = 0
    for seed in range(60):
        lengths = long_tail(seed, 1 + 2 * seed)
        plan, _ = planned(lengths, 1)
        in_order, _ = planned(lengths, 1, **BY_TURNS)
        by_work, _ = planned(lengths, 1, balance_by_flops=True)
        assert len(plan[0]) == min(len(in_order[0]), len(by_work[0]))
        assert plan == (in_order if len(in_order[0]) <= len(by_work[0]) else by_work)
        assert all(sum(lengths[i] for i in pack) <= CAP or len(pack) == 1 for pack in plan[0])
        kept, fewer = kept + (plan == in_order), fewer + (plan != in_order)
    assert kept and fewer


def test_work_that_is_not_given_is_the_number_of_tokens():
    lengths = [6, 2, 2, 2]
    batch = BatchConfig(use_dynamic_batch_size=True, max_tokens_per_gpu=6)
    assert sorted(plan_micro_batches(lengths, data_parallel_size=2, batch=batch)) == [((0,),), ((1, 2, 3),)]
