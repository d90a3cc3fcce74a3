"""Distributions have the mean and the 95th percentile that they are written with, and keep their limit."""

from __future__ import annotations

import math

import numpy as np
import pytest

from slime_like.errors import UserError
from slime_like.planning.simulate.spread import Spread


def draws(spread: Spread, count: int = 200_000) -> np.ndarray:
    return spread.draw(np.random.default_rng(0), (count,))


def test_a_log_normal_has_its_mean_and_percentile():
    numbers = draws(Spread.parse("600~1800"))
    assert numbers.mean() == pytest.approx(600, rel=0.01)
    assert (numbers > 1800).mean() == pytest.approx(0.05, abs=0.002)


def test_constant_and_uniform():
    assert set(draws(Spread.parse("7"), 10)) == {7.0}
    numbers = draws(Spread.parse("16-64"))
    assert numbers.min() >= 16 and numbers.max() <= 64 and numbers.mean() == pytest.approx(40, rel=0.01)
    assert Spread.parse("16-64").mean == 40 and Spread.parse("5-5").is_constant and not Spread.parse("5-6").is_constant


def test_measured_values_are_drawn_as_often_as_they_were_seen():
    numbers = draws(Spread("measured", (1.0, 1.0, 1.0, 9.0)))
    assert set(numbers) == {1.0, 9.0} and (numbers == 9).mean() == pytest.approx(0.25, abs=0.01)


def test_the_limit_cuts():
    spread = Spread("lognormal", (600.0, 1800.0), limit=1000.0)
    assert draws(spread).max() == 1000 == spread.highest
    assert Spread("measured", (1.0, 9.0), limit=5.0).mean == 3


def test_what_is_written_is_read_again():
    for text in ("600", "16-64", "600~1800"):
        assert str(Spread.parse(text)) == text


@pytest.mark.parametrize("text", ["", "many", "5-", "9-3", "-4", "600~500", "600~3000", "inf", "1~2~3"])
def test_what_is_no_distribution(text: str):
    with pytest.raises(UserError, match="--turns"):
        Spread.parse(text, "--turns")


def test_bounds_of_each_kind():
    assert Spread.parse("600~1800").lowest == 0 and Spread.parse("600~1800").highest == math.inf
    assert Spread.constant(3).lowest == Spread.constant(3).highest == 3
