"""The calculator's rows and its environment fit: whoever does what the warm-up calls right is paid."""

# Covers scripts/examples/calculator/make_data.py.

from __future__ import annotations

import random

from scripts.examples.calculator import make_data
from scripts.examples.environments import Calculator
from slime_like.rollout.agents.environment import Task


def test_calls_carry_the_sum_along():
    assert make_data.calls("7+8+3") == [("<calc>7+8</calc>", "15"), ("<calc>15+3</calc>", "18")]


def test_what_the_warm_up_calls_right_is_paid_after_two_or_three_answers():
    rng, lengths = random.Random(0), set()
    for _ in range(100):
        row = make_data.row(rng)
        steps = make_data.calls(row["prompt"][0]["content"])
        environment = Calculator()
        environment.reset(0, Task(messages=row["prompt"], label=row["label"]))
        for call, result in steps:
            turn = environment.step({"role": "assistant", "content": call})
            assert [message["content"] for message in turn.messages] == [f"<result>{result}</result>"]
            assert not turn.done and turn.reward == 0
        turn = environment.step({"role": "assistant", "content": steps[-1][1]})
        assert turn.done and turn.reward == 1
        lengths.add(len(steps) + 1)
    assert lengths == {2, 3}


def test_the_warm_up_shows_a_wrong_way_too():
    rng = random.Random(0)
    rows = [make_data.demonstration(rng) for _ in range(2000)]
    right = wrong = 0
    for row in rows:
        question, *past = row["prompt"]
        steps = make_data.calls(question["content"])
        assert [message["role"] for message in past] == ["assistant", "tool"] * (len(past) // 2)
        answers = [call for call, _ in steps] + [row["label"]]
        first = question["content"].split("+")[0]
        assert row["response"] in (answers[len(past) // 2], first)
        right += row["response"] != first
        wrong += row["response"] == first
    assert 0.35 < wrong / (right + wrong) < 0.45
