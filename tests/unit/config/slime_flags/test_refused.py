"""Refused flags are taken out of the command line with their values, one problem each, and the rest stays as it was."""

from __future__ import annotations

import pytest

from slime_like.config.slime_flags.refused import REFUSED, REFUSED_VALUES, take_refused


@pytest.mark.parametrize(
    ("argv", "rest", "flags"),
    [
        (["--lr", "1e-6", "--seed", "3"], ["--lr", "1e-6", "--seed", "3"], []),
        (["--lr", "1e-6", "--spec", "a.b", "c", "--seed", "3"], ["--lr", "1e-6", "--seed", "3"], ["--spec"]),
        (["--spec=a.b", "--seed", "3"], ["--seed", "3"], ["--spec"]),
        (["--allgather-cp", "--mtp-num-layers", "1"], [], ["--allgather-cp", "--mtp-num-layers"]),
        (["--optimizer", "sgd", "--lr", "1"], ["--lr", "1"], ["--optimizer sgd"]),
        (["--optimizer=sgd", "--lr", "1"], ["--lr", "1"], ["--optimizer sgd"]),
        (["--optimizer", "adam"], ["--optimizer", "adam"], []),
        (["--name", "sgd"], ["--name", "sgd"], []),  # another flag's value
    ],
)
def test_what_stays_and_what_is_told(argv: list[str], rest: list[str], flags: list[str]):
    kept, problems = take_refused(argv)
    assert kept == rest
    assert [problem.split(" is refused: ")[0] for problem in problems] == flags


def test_each_refusal_says_what_to_do():
    assert all("Fix: " in reason for reason in [*REFUSED.values(), *REFUSED_VALUES.values()])
