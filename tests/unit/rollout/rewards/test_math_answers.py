"""What counts as the final answer, and as equal."""

from __future__ import annotations

import pytest

from slime_like.rollout.rewards.math_answers import deepscaler_score, marked_answer, math_score


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        ("The answer is \\boxed{34}.", "34", 1),
        ("First 12, then 34", "34", 1),
        ("\\boxed{12}, no: \\boxed{34}", "12", 0),
        ("so $x = \\frac{1}{2}$", "0.5", 1),
        ("\\boxed{0.5}", "\\frac{1}{2}", 1),
        ("\\boxed{\\frac{1}{2}}", "$\\frac{1}{2}$", 1),
        ("\\boxed{1+x}", "x+1", 1),
        ("\\boxed{35}", "34", 0),
        ("I do not know", "34", 0),
        ("", "34", 0),
    ],
)
def test_math(response, label, reward):
    assert math_score(response, label) == reward


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        ("<think>maybe \\boxed{5}</think> It is \\boxed{34}", "34", 1),
        ("<think>\\boxed{34}</think> I give up", "34", 0),
        ("<think>\\boxed{34} and so on", "34", 1),  # no </think>: all of it counts
        ("it must be 34", "34", 0),  # not marked
        ("The answer is 34.", "34", 1),
        ("<answer>34</answer>", "34", 1),
        ("\\boxed{34", "34", 0),
    ],
)
def test_deepscaler(response, label, reward):
    assert deepscaler_score(response, label) == reward


def test_marked_answer_minds_nested_braces():
    assert marked_answer("\\boxed{\\frac{1}{\\sqrt{2}}} done") == "\\frac{1}{\\sqrt{2}}"
    assert marked_answer("nothing here") is None
