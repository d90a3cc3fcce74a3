"""Groups in micro-batches: everything once, below the cap, ranks in step and even."""

from __future__ import annotations

import numpy as np
import pytest

from slime_like.algorithms.shared_batches import EVEN_ENOUGH, even_shares, plan_shared_micro_batches
from slime_like.algorithms.shared_prompts import PromptGroup


def group(first: int, prompt: int, answers: list[int]) -> PromptGroup:
    return PromptGroup(
        samples=tuple(range(first, first + len(answers))),
        lengths=tuple(prompt + answer for answer in answers),
        common=(prompt,) * (len(answers) - 1),
    )


def ragged(count: int, num_samples: int = 8) -> list[PromptGroup]:
    generator = np.random.default_rng(count)
    return [
        group(n * num_samples, int(generator.integers(5, 60)), generator.integers(1, 40, num_samples).tolist())
        for n in range(count)
    ]


def tokens(unit: PromptGroup) -> int:
    return unit.tokens


@pytest.mark.parametrize("cap", [30, 200, 5000])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [1, 2, 7, 24])
@pytest.mark.parametrize("multiple", [1, 4])
def test_every_sample_once_below_the_cap_and_ranks_in_step(count, ranks, cap, multiple):
    groups = ragged(count)
    plan = plan_shared_micro_batches(
        groups, data_parallel_size=ranks, most_tokens=cap, cost=tokens, count_multiple=multiple
    )
    packs = [pack for of_rank in plan for pack in of_rank]
    assert sorted(i for pack in packs for unit in pack for i in unit.samples) == list(range(8 * count))
    assert len(plan) == ranks and len({len(of_rank) for of_rank in plan}) == 1 and len(plan[0]) % multiple == 0
    for pack in packs:
        assert sum(map(tokens, pack)) <= cap or [len(unit.samples) for unit in pack] == [1]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_which_samples_a_rank_gets_does_not_depend_on_the_cap(ranks):
    plans = [
        plan_shared_micro_batches(ragged(7), data_parallel_size=ranks, most_tokens=cap, cost=tokens)
        for cap in (30, 200, 5000)
    ]
    shares = [[sorted(i for pack in packs for unit in pack for i in unit.samples) for packs in plan] for plan in plans]
    assert shares[0] == shares[1] == shares[2]


def test_groups_stay_together_where_ranks_are_even_anyway():
    groups = [group(8 * n, 100, [10] * 8) for n in range(4)]
    plan = plan_shared_micro_batches(groups, data_parallel_size=2, most_tokens=400, cost=tokens)
    assert [[sum(map(tokens, pack)) for pack in packs] for packs in plan] == [[360], [360]]
    assert sum(len(unit.samples) for packs in plan for pack in packs for unit in pack) == 32


def test_a_group_is_split_only_above_the_cap():
    plan = plan_shared_micro_batches([group(0, 100, [10] * 8)], data_parallel_size=1, most_tokens=150, cost=tokens)
    assert [[sum(map(tokens, pack)) for pack in packs] for packs in plan] == [[150, 130]]


def test_parts_fill_what_whole_groups_leave_free():
    """Three groups of 60 leave 40 free in each micro-batch of 100; short prompts make parts cheap."""
    groups = [group(8 * n, 4, [7] * 8) for n in range(5)]
    plan = plan_shared_micro_batches(groups, data_parallel_size=1, most_tokens=100, cost=tokens)
    assert len(plan[0]) == 4 and sum(tokens(unit) for pack in plan[0] for unit in pack) <= 5 * 60 * 1.05
    # long ones are better left whole
    groups = [group(8 * n, 44, [2] * 8) for n in range(5)]
    plan = plan_shared_micro_batches(groups, data_parallel_size=1, most_tokens=100, cost=tokens)
    assert len(plan[0]) == 5 and sum(tokens(unit) for pack in plan[0] for unit in pack) == 5 * 60


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_ranks_are_even(ranks):
    for count in (1, 3, 9, 30):
        shares = even_shares(ragged(count, num_samples=64 // count + 8), ranks, tokens)
        loads = [sum(map(tokens, share)) for share in shares]
        assert max(loads) * ranks / sum(loads) - 1 <= 3 * EVEN_ENOUGH, (count, loads)


def test_one_sample_cannot_be_split():
    plan = plan_shared_micro_batches([group(0, 5, [3])], data_parallel_size=2, most_tokens=100, cost=tokens)
    assert sorted(len(pack) for packs in plan for pack in packs) == [0, 1]
