"""Errors say what is wrong and survive the way through Ray, which pickles them."""

from __future__ import annotations

import pickle

import pytest

from slime_like import errors
from slime_like.errors import ConfigError, RunError, SlimeLikeError, UserError, WaitTimeout

PLAIN = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, SlimeLikeError) and kind not in (ConfigError, WaitTimeout)
]


def test_every_problem_is_listed_with_its_number():
    error = ConfigError(["--lr -1: must be positive.", "--seed is missing."])
    assert str(error) == "[1] --lr -1: must be positive.\n[2] --seed is missing."
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, ConfigError) and copy.problems == error.problems and str(copy) == str(error)


def test_a_timeout_names_who_waited_for_whom():
    error = WaitTimeout(who="the driver", whom="engine 2", phase="start", seconds=29.6, last="HTTP 503")
    assert str(error) == "the driver waited 30 s for engine 2 during start. Last heard: HTTP 503"
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, WaitTimeout) and copy.parts == error.parts and str(copy) == str(error)


@pytest.mark.parametrize("kind", PLAIN, ids=lambda kind: kind.__name__)
def test_the_others_keep_kind_and_message(kind):
    copy = pickle.loads(pickle.dumps(kind("engine 1 is gone")))
    assert type(copy) is kind and str(copy) == "engine 1 is gone"


def test_a_mistake_is_either_the_users_or_the_runs():
    """train.py gives the exit status 2 or 1 by it."""
    leaves = [kind for kind in [*PLAIN, ConfigError, WaitTimeout] if kind is not SlimeLikeError]
    assert all(issubclass(kind, UserError) != issubclass(kind, RunError) for kind in leaves)
