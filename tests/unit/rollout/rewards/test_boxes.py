"""The last box of a text; test_math_answers.py has what rewards make of it."""

from __future__ import annotations

import pytest

from slime_like.rollout.rewards.boxes import has_box, last_boxed


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("\\boxed{1} and \\boxed{2}", "2"),
        ("\\fbox{ a{b}c }", "a{b}c"),
        ("\\boxed{\\{1\\}", "\\{1\\}"),  # printed braces need not come in pairs
        ("\\boxed{1} \\boxed{2", None),  # the last was cut off
        ("boxed{1}", None),
    ],
)
def test_the_last_box(text: str, content: str | None):
    assert last_boxed(text) == content and has_box(text) == ("\\" in text)
