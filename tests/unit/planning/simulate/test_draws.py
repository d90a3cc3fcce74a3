"""A prompt's draws depend on its place and the seed alone, and arrays hold the same numbers."""

from __future__ import annotations

import dataclasses

from slime_like.planning.simulate.draws import Draws
from slime_like.planning.simulate.scenario import Scenario, Workload
from slime_like.planning.simulate.spread import Spread

WORK = Workload(
    batch=4, group_size=3, response_tokens=Spread.parse("100~300"), turns=Spread.parse("1-4"),
    environment_s=Spread.parse("1-2"), reward_s=Spread.parse("0-1"), filtered_share=0.3,
)  # fmt: skip
SCENARIO = Scenario(work=WORK)


def test_the_order_of_asking_changes_nothing():
    forward, backward = Draws(SCENARIO), Draws(SCENARIO)
    first = [forward[prompt] for prompt in range(0, 1000, 37)]
    assert first == [backward[prompt] for prompt in reversed(range(0, 1000, 37))][::-1]
    assert first[0] != Draws(dataclasses.replace(SCENARIO, seed=1))[0]


def test_engines_rules_and_batch_change_no_draw():
    other = SCENARIO.with_engines(num_engines=9).with_rules(mode="full").with_work(batch=77)
    assert [Draws(SCENARIO)[i] for i in range(20)] == [Draws(other)[i] for i in range(20)]


def test_rewards_move_no_length():
    other = SCENARIO.with_work(reward_s=Spread.constant(5))
    assert [Draws(SCENARIO)[i].tokens for i in range(9)] == [Draws(other)[i].tokens for i in range(9)]


def test_a_call_of_the_environment_stands_between_two_turns():
    draws = Draws(SCENARIO)
    for prompt in range(50):
        draw = draws[prompt]
        assert [len(calls) for calls in draw.environment_s] == [turns - 1 for turns in draw.turns]
        assert all(1 <= call <= 2 for calls in draw.environment_s for call in calls)
    assert {turns for prompt in range(50) for turns in draws[prompt].turns} == {1, 2, 3, 4}


def test_arrays_are_the_prompts_in_a_row_across_blocks():
    draws = Draws(SCENARIO)
    tokens, reward_s = draws.arrays(250, 300)
    assert tokens.shape == (300, 3)
    assert tokens.tolist() == [draws[prompt].tokens for prompt in range(250, 550)]
    assert reward_s.tolist() == [draws[prompt].reward_s for prompt in range(250, 550)]


def test_many_more_prompts_than_are_remembered():
    draws = Draws(SCENARIO)
    first = draws[0]
    for prompt in range(0, 256 * 200, 256):
        draws[prompt]
    assert draws[0] == first


def test_sync_seconds_by_number():
    scenario = SCENARIO.with_trainer(sync_s=Spread.parse("1-2"))
    assert Draws(scenario).sync_s(300) == Draws(scenario).sync_s(300) != Draws(scenario).sync_s(301)
