"""Pairs of final answers, equal and unequal, as a person would judge them."""

from __future__ import annotations

import pytest

from slime_like.rollout.rewards.math_equality import same_answer

EQUAL = [
    # numbers
    ("42.", "42"),
    ("42.0", "42"),
    ("+42", "42"),
    ("-7", "−7"),
    (".5", "0.5"),
    ("4.2e1", "42"),
    ("4.2 \\times 10^{1}", "42"),
    ("1e-3", "0.001"),
    ("10^{-3}", "0.001"),
    ("6.02\\cdot 10^{23}", "6.02e23"),
    ("1,000,000", "1000000"),
    ("1{,}000", "1000"),
    ("10,\\!000", "10000"),
    ("1\\,000", "1,000"),
    ("1 000 000", "1000000"),
    # fractions
    ("0.5", "\\frac{1}{2}"),
    ("\\dfrac12", "\\frac{1}{2}"),
    ("\\tfrac{1}2", "1/2"),
    ("\\frac{2}{4}", "\\frac{1}{2}"),
    ("-\\frac{3}{4}", "\\frac{-3}{4}"),
    ("0.333333", "1/3"),
    ("3\\frac{1}{2}", "\\frac{7}{2}"),
    ("3 1/2", "3.5"),
    ("-2\\frac{1}{4}", "-2.25"),
    ("\\frac{\\sqrt{3}}{2}", "\\frac{1}{2}\\sqrt3"),
    # delimiters, styles and what stands around
    ("$\\frac{1}{2}$", "\\(\\frac12\\)"),
    ("\\left( 1, 2 \\right)", "(1,2)"),
    ("\\mathbf{7}", "7"),
    ("{7}", "7"),
    ("x = 5", "5"),
    ("x=5", "x = 5"),
    ("f(x) = x+1", "f(x)=1+x"),
    ("x \\in [1, 2)", "[1,2)"),
    # units, percent, degrees, currency
    ("12.34\\%", "12.34"),
    ("50\\%", "50 percent"),
    ("50\\%", "0.5"),
    ("\\$36", "36"),
    ("36", "\\$36"),
    ("36", "$36"),
    ("18.90", "\\$18.90"),
    ("18.9", "$18.90$"),
    ("36 dollars", "\\$36"),
    ("\\$1,200", "1200"),
    ("5 \\text{ cm}", "5"),
    ("5\\text{cm}", "5 centimeters"),
    ("5 \\mathrm{~cm}^2", "5 square centimeters"),
    ("6\\sqrt{3} \\text{ units}", "6\\sqrt{3}"),
    ("10\\pi \\text{ inches}", "10\\pi"),
    ("90^\\circ", "90"),
    ("90^{\\circ}", "90 degrees"),
    ("90°", "90\\degree"),
    # algebra
    ("1+x", "x+1"),
    ("(x+1)(x-1)", "x^2-1"),
    ("(x+1)", "x+1"),
    ("2a+b", "b+2a"),
    ("\\sqrt{8}", "2\\sqrt{2}"),
    ("\\frac{\\pi}{2}", "\\pi/2"),
    ("x^2+y^2=1", "y^2+x^2=1"),
    # lists, sets, intervals
    ("(1, 2)", "(1,2)"),
    ("(\\frac{1}{2}, 3)", "(0.5, 3.0)"),
    ("(1,000, 2,000)", "(1000, 2000)"),
    ("\\{1, 2\\}", "\\{2,1\\}"),
    ("1, 2", "2,1"),
    ("1 \\text{ and } 2", "2, 1"),
    ("x = 1, x = 2", "1, 2"),
    ("\\{5\\}", "5"),
    ("\\varnothing", "\\emptyset"),
    ("\\{\\}", "\\emptyset"),
    ("∅", "\\varnothing"),
    ("(-\\infty, 3]", "(-\\infty,3]"),
    ("(3,4) \\cup (1,2)", "(1,2)\\cup(3,4)"),
    ("A, B, C", "A,B,C"),
    ("x \\ge 2", "[2,\\infty)"),
    ("1 < x \\leq 2", "(1,2]"),
    ("1 \\pm \\sqrt{2}", "1+\\sqrt{2}, 1-\\sqrt{2}"),
    ("x=2, y=3", "(2,3)"),
    # matrices
    ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{bmatrix} 1 & 2 \\\\ 3 & 4 \\end{bmatrix}"),
    ("\\begin{pmatrix} 0.5 \\\\ x+1 \\end{pmatrix}", "\\begin{pmatrix} \\frac{1}{2} \\\\ 1+x \\end{pmatrix}"),
    ("\\left(\\begin{array}{cc}1&2\\\\3&4\\end{array}\\right)", "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}"),
    # text and bases
    ("\\text{Tuesday, May 3}", "\\text{Tuesday, May 3}"),
    ("Tuesday, May 3", "\\text{Tuesday, May 3}"),
    ("\\text{yes}", "Yes"),
    ("\\textbf{(C)}", "C"),
    ("\\text{even}", "\\mathrm{even}"),
    ("101_2", "101_{2}"),
    ("x_1", "x_{1}"),
]

UNEQUAL = [
    ("41", "42"),
    ("4.2e2", "42"),
    ("1e-7", "2e-7"),
    ("0.33", "1/3"),
    ("1000001", "1000000"),
    ("1,00", "100"),
    ("1 2", "12"),
    ("1 " * 5000, "5"),
    ("(1," * 5000, "5"),
    ("\\frac{1}{2}", "\\frac{2}{1}"),
    ("3\\frac{1}{2}", "\\frac{3}{2}"),
    ("31/2", "3 1/2"),
    ("x = 5", "y = 5"),
    ("5 \\text{ cm}", "5 \\text{ m}"),
    ("5 \\text{ cm}", "5 \\text{ cm}^2"),
    ("\\$36", "36 cents"),
    ("12.34\\%", "1.234"),
    ("3 \\text{ p.m.}", "3 \\text{ a.m.}"),
    ("101", "101_2"),
    ("101_2", "101_3"),
    ("5", "101_2"),
    ("A,B,C", "C,B,A"),
    ("A, B, C", "A, B"),
    ("(1,2)", "(2,1)"),
    ("(1,2)", "[1,2]"),
    ("(1,2]", "(1,2)"),
    ("[1,2]", "1,2"),
    ("(1,2)", "\\{1,2\\}"),
    ("1, 2", "1"),
    ("1, 2", "1, 2, 2"),
    ("\\{1,2\\}", "\\{1,3\\}"),
    ("\\{5\\}", "\\emptyset"),
    ("(1,2)\\cup(3,4)", "(1,2)\\cup(3,5)"),
    ("(-\\infty,3)", "(-\\infty,3]"),
    ("\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}", "\\begin{pmatrix}1&3\\\\2&4\\end{pmatrix}"),
    ("\\begin{pmatrix}1&2\\end{pmatrix}", "\\begin{pmatrix}1\\\\2\\end{pmatrix}"),
    ("\\begin{vmatrix}1&2\\\\3&4\\end{vmatrix}", "\\begin{pmatrix}1&2\\\\3&4\\end{pmatrix}"),
    ("\\text{Tuesday, May 3}", "\\text{Tuesday, May 4}"),
    ("\\text{May 3, Tuesday}", "\\text{Tuesday, May 3}"),
    ("\\text{no}", "\\text{on}"),
    ("Yes", "No"),
    ("A", "B"),
    ("a", "A"),
    ("x+1", "x-1"),
    ("x > 2", "[2,\\infty)"),
    ("\\infty", "-\\infty"),
    ("\\text{none}", "0"),
    ("x_1", "x_2"),
    ("", "5"),
    ("5", ""),
]


@pytest.mark.parametrize(("answer", "label"), EQUAL)
def test_equal(answer, label):
    assert same_answer(answer, label)
    assert same_answer(label, answer)


@pytest.mark.parametrize(("answer", "label"), UNEQUAL)
def test_unequal(answer, label):
    assert not same_answer(answer, label)
    assert not same_answer(label, answer)


@pytest.mark.parametrize(
    ("answer", "label", "equal"),
    [
        ("1/2", "\\frac{1}{2}", True),
        ("\\frac{2}{4}", "\\frac{1}{2}", False),
        ("0.25", "\\frac{1}{4}", True),
        ("42.0", "42", True),
        ("\\sqrt{4}", "2", False),
        ("\\frac{4}{2}", "2", False),
        ("2, 1", "1, 2", False),
        ("\\$36", "36", True),
        ("1+x", "x+1", True),
    ],
)
def test_as_written(answer, label, equal):
    assert same_answer(answer, label, as_written=True) == equal
