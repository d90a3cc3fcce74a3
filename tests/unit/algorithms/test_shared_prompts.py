"""Branches of samples that begin alike, against a trie of plain dictionaries."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from slime_like.algorithms.flops import TokenFlops
from slime_like.algorithms.shared_prompts import LEAST_COMMON_TOKENS, Branch, prompt_groups, saved, shared_row
from slime_like.records import TrainSample


def sample(tokens, prompt: int = 0, experts=None) -> TrainSample:
    length = len(tokens)
    ones = np.ones(length, dtype=np.float32)
    return TrainSample(
        prompt_index=prompt, sample_index=0, tokens=np.array(tokens, dtype=np.int32),
        loss_mask=np.ones(length, dtype=np.int8), engine_logprobs=-ones,
        weight_versions=np.zeros(length, dtype=np.int32), reward=1.0, advantages=ones, weights=ones,
        routed_experts=experts,
    )  # fmt: skip


PROMPT = list(range(10, 20))
#: Case -> samples' tokens.
FORKS = [PROMPT + [1] * 8, PROMPT + [1] * 8 + [2] * 5, PROMPT + [1] * 8 + [3] * 6, PROMPT + [4, 5]]
CASES = {
    "answers": [PROMPT + [1, 2], PROMPT + [3, 4, 5], PROMPT + [6]],
    "alone": [PROMPT],
    "twice the same": [PROMPT + [1, 2]] * 2,
    "forks": FORKS,
    "one is the prompt itself": [PROMPT, PROMPT + [7]],
    "nothing in common": [[1, 2, 3, 4, 5, 6], [7, 8, 9, 10, 11, 12]],
    "too little in common": [[1, 2, 3, 4, 5, 6], [1, 2, 3, 7, 8, 9]],
}


def seen_from(branches, place: int) -> list[int]:
    """The places that a token sees, itself last."""
    (own,) = [branch for branch in branches if branch.start <= place < branch.stop]
    return [p for a, b in own.before for p in range(a, b)] + list(range(own.start, place + 1))


def test_by_hand():
    row = shared_row(prompt_groups([sample(PROMPT + [3, 4]), sample(PROMPT + [1])]))
    assert row.branches == (
        Branch(start=0, stop=10),
        Branch(start=10, stop=11, before=((0, 10),)),
        Branch(start=11, stop=13, before=((0, 10),)),
    )
    assert row.samples == (1, 0)  # in the order of their tokens
    assert [places.tolist() for places in row.places] == [[*range(10), 10], [*range(10), 11, 12]]
    assert row.branches[2].first_position == 10 and row.lengths == [10, 1, 2] and row.shares


@pytest.mark.parametrize("case", CASES)
def test_each_sample_finds_its_own_tokens_and_sees_them_in_order(case):
    samples = [sample(tokens) for tokens in CASES[case]]
    (group,) = prompt_groups(samples)
    row = shared_row([group])
    assert sorted(row.samples) == list(range(len(samples)))
    assert [branch.start for branch in row.branches] == [0, *np.cumsum(row.lengths)[:-1]]
    assert sum(row.lengths) == group.tokens
    assert row.shares == (group.tokens < sum(map(len, CASES[case])))
    held: dict[int, int] = {}
    for index, places in zip(row.samples, row.places, strict=True):
        tokens = CASES[case][index]
        assert len(places) == len(tokens)
        for number, place in enumerate(places):
            assert held.setdefault(int(place), tokens[number]) == tokens[number]
            assert seen_from(row.branches, place) == places[: number + 1].tolist()
    assert sorted(held) == list(range(group.tokens))


def tries(samples) -> int:
    """Tokens of a trie of all samples, told apart from the first difference on."""
    return len({tuple(tokens[:stop]) for tokens in samples for stop in range(1, len(tokens) + 1)})


@pytest.mark.parametrize("case", ["answers", "alone", "twice the same", "forks", "one is the prompt itself"])
def test_as_few_tokens_as_a_trie(case):
    assert prompt_groups([sample(tokens) for tokens in CASES[case]])[0].tokens == tries(CASES[case])


def test_random_trees_are_as_small_as_tries_but_for_short_branches():
    generator = np.random.default_rng(0)
    for _ in range(50):
        rows = [generator.integers(0, 2, generator.integers(1, 30)).tolist() for _ in range(12)]
        (group,) = prompt_groups([sample(PROMPT + row) for row in rows])
        row = shared_row([group])
        assert tries([PROMPT + row for row in rows]) <= group.tokens <= sum(len(PROMPT) + len(row) for row in rows)
        inner = {ranges for branch in row.branches for ranges in branch.before}
        assert all(stop - start >= LEAST_COMMON_TOKENS for start, stop in inner)


def test_what_is_saved():
    groups = prompt_groups([sample(PROMPT + [n]) for n in range(4)] + [sample([1, 2, 3], prompt=1)])
    assert [group.tokens for group in groups] == [14, 3]
    assert saved(groups) == 1 - 17 / 47


def test_other_experts_are_another_token():
    experts = [np.zeros((12, 2, 2), dtype=np.int8) for _ in range(3)]
    experts[1][6:] = 3
    experts[2][-1] = -1  # nobody said where the last token went, which is the sample's own
    groups = prompt_groups([sample(PROMPT + [n, n], experts=e) for n, e in enumerate(experts)])
    assert groups[0].tokens == 36 - 10 - 6
    alike = prompt_groups([sample(PROMPT + [n, n], experts=experts[0]) for n in range(3)])
    assert alike[0].tokens == 36 - 20


def test_parts_have_their_own_prompt_and_stay_below_the_cap():
    (group,) = prompt_groups([sample(PROMPT + [n] * 5) for n in range(7)])
    parts = group.within(25)
    assert [part.tokens for part in parts] == [25, 25, 15]
    assert sorted(itertools.chain(*(part.samples for part in parts))) == list(range(7))
    assert [part.tokens for part in group.within(3)] == [15] * 7  # one alone each, above the cap
    assert group.within(1000) == [group]


def test_some_of_a_group_share_what_they_have_in_common():
    (group,) = prompt_groups([sample(tokens) for tokens in FORKS])
    for count in range(1, 5):
        for some in itertools.combinations(range(4), count):
            few = group.only(some)
            assert sorted(few.samples) == list(some) and few.tokens == tries([FORKS[i] for i in some])


def test_flops_are_those_of_the_pairs_that_are_computed():
    flops = TokenFlops(linear=100, quadratic=2)
    (group,) = prompt_groups([sample(tokens) for tokens in FORKS])
    row = shared_row([group])
    # quadratic counts T^2 for a sequence, which has T^2 / 2 pairs (the diagonal's halves)
    pairs = sum(len(seen_from(row.branches, place)) - 0.5 for place in range(group.tokens))
    assert group.flops(flops) == 100 * group.tokens + 2 * 2 * pairs
    (alone,) = prompt_groups([sample(PROMPT)])
    assert alone.flops(flops) == flops.of(len(PROMPT))
