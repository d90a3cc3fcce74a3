"""How an answer is read before it is compared."""

from __future__ import annotations

from fractions import Fraction

import pytest

from slime_like.rollout.rewards.math_notation import clean, is_words, number, split_unit


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("$\\dfrac12.$", "\\frac{1}{2}"),
        ("\\(\\left( 1,\\, 2 \\right)\\)", "( 1, 2 )"),
        ("\\$36", "36 dollars"),
        ("-$1.50", "-1.50 dollars"),
        ("\\text{Yes}", "Yes"),
        ("\\textbf{\\text{ (A) }}", "(A)"),
        ("{{7}}", "7"),
        ("{1}{2}", "{1}{2}"),
        ("90^{\\circ}", "90"),
        ("\\left.5\\right.", "5"),
        ("\\displaystyle.5", ".5"),
        ("\\leftarrow", "\\leftarrow"),
    ],
)
def test_clean(text, cleaned):
    assert clean(text) == cleaned


@pytest.mark.parametrize(
    ("text", "value", "form"),
    [
        ("-12", Fraction(-12), "integer"),
        ("12.50", Fraction(25, 2), "decimal"),
        ("1,234,567", Fraction(1234567), "integer"),
        ("1.5e3", Fraction(1500), "integer"),
        ("2 \\times 10^{-2}", Fraction(1, 50), "decimal"),
        ("-10^3", Fraction(-1000), "decimal"),
        ("\\frac{-3}{6}", Fraction(-1, 2), "ratio"),
        ("-1 \\frac{1}{2}", Fraction(-3, 2), "ratio"),
        ("7/2", Fraction(7, 2), "ratio"),
    ],
)
def test_number(text, value, form):
    assert (number(text).value, number(text).form) == (value, form)


@pytest.mark.parametrize(
    "text",
    ["", "x", "1,23", "1 2", "1/0", "\\frac{1}{0}", "1e99999", "1e500", "3\\frac{-1}{2}", "0x10", "1_000", "5 cm"],
)
def test_no_number(text):
    assert number(text) is None


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("5 centimeters", ("5", "cm")),
        ("5cm^2", ("5", "cm^2")),
        ("3 square feet", ("3", "ft^2")),
        ("2\\sqrt{3} units", ("2\\sqrt{3}", "unit")),
        ("50%", ("50", "%")),
        ("60 miles per hour", ("60", "milesperhour")),
        ("3x", ("3x", "")),
        ("3 x", ("3 x", "")),
        ("2 sin x", ("2 sin x", "")),
        ("Tuesday 3 pm", ("Tuesday 3 pm", "")),
    ],
)
def test_split_unit(text, parts):
    assert split_unit(text) == parts


def test_words_are_no_formulas():
    assert all(map(is_words, ("Tuesday, May 3", "no solution", "Yes")))
    assert not any(map(is_words, ("2ab", "sin x", "x", "\\infty", "12", "a+b", "A, B")))
