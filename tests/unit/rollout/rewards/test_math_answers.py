"""What counts as the final answer, and as equal."""

from __future__ import annotations

import pytest

from slime_like.rollout.rewards.math_answers import SCORERS, deepscaler_score, marked_answer, math_score


@pytest.mark.parametrize(
    ("response", "label", "reward"),
    [
        ("The answer is \\boxed{34}.", "34", 1),
        ("First 12, then 34", "34", 1),
        ("\\boxed{12}, no: \\boxed{34}", "12", 0),
        ("\\boxed{41}. Wait, that is wrong. \\boxed{42}", "42", 1),
        ("\\boxed{41}. Wait, that is wrong. \\boxed{42}", "41", 0),
        ("\\boxed{41}, \\boxed{42}", "42", 1),
        ("\\boxed{34} and then \\boxed{3", "34", 0),  # the last box was cut off
        ("\\boxed{\\left\\{ 1, 2 \\right\\}}", "\\{2,1\\}", 1),
        ("\\fbox{34}", "34", 1),
        ("it costs \\boxed{36}", "\\$36", 1),
        ("it costs \\$36 in all", "36", 1),
        ("so $18.90", "\\$18.90", 1),
        ("so we get 1,000 apples", "1000", 1),
        ("\\boxed{\\text{Tuesday, May 3}}", "\\text{Tuesday, May 3}", 1),
        ("\\boxed{C,B,A}", "A,B,C", 0),
        ("\\boxed{101}", "101_2", 0),
        ("$101$", "101_2", 0),
        ("\\boxed{34}", "so \\boxed{34}", 1),  # a label may be a whole solution
        ("\\boxed{34}", "", 0),
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


@pytest.mark.parametrize(
    ("response", "lenient", "strict"),
    [
        ("so it is \\boxed{34}", {"math": 1, "deepscaler": 1}, {"math": 1, "deepscaler": 0}),
        ("so it is 34", {"math": 1, "deepscaler": 0}, {"math": 0, "deepscaler": 0}),
        ("The answer is 34.", {"math": 1, "deepscaler": 1}, {"math": 0, "deepscaler": 0}),
        ("<think>\\boxed{34}", {"math": 1, "deepscaler": 1}, {"math": 1, "deepscaler": 0}),
        ("<think>\\boxed{35}</think> \\boxed{34}", {"math": 1, "deepscaler": 1}, {"math": 1, "deepscaler": 1}),
        ("<think>\\boxed{34}</think> 34", {"math": 1, "deepscaler": 0}, {"math": 1, "deepscaler": 0}),
        ("thinking ###Response \\boxed{34}", {"math": 1, "deepscaler": 1}, {"math": 1, "deepscaler": 1}),
        ("</think> \\boxed{\\frac{68}{2}}", {"math": 1, "deepscaler": 1}, {"math": 0, "deepscaler": 0}),
    ],
)
def test_strict_is_stricter(response, lenient, strict):
    assert {name: SCORERS[name](response, "34") for name in lenient} == lenient
    assert {name: SCORERS[f"{name}_strict"](response, "34") for name in strict} == strict


def test_marked_answer_minds_nested_braces():
    assert marked_answer("\\boxed{\\frac{1}{\\sqrt{2}}} done") == "\\frac{1}{\\sqrt{2}}"
    assert marked_answer("nothing here") is None


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        ("so\nAnswer: 42", "42", 1.0),
        ("answer: 41\nAnswer: $42$", "42", 1.0),  # the last line
        ("Answer: 42\nAnswer: 41", "42", -1.0),
        ("\\boxed{42}", "42", -1.0),  # a box is no such line
        ("Answer: \\boxed{42}", "42", 1.0),
        ("Answer: **42**.", "42", 1.0),
        ("Answer: 42" + " " * 300, "42", -1.0),  # too far from the end
        ("Answer: 1/2", "\\frac{1}{2}", 1.0),
        ("", "42", -1.0),
    ],
)
def test_dapo_wants_an_answer_line_at_the_end(response: str, label: str, score: float):
    assert SCORERS["dapo"](response, label) == score
