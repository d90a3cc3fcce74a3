"""A job ends all that it started, in order, also where one part cannot end."""

from __future__ import annotations

import types

import pytest

from slime_like.job.running import Job, ResolvedRun


class Part:
    def __init__(self, name: str, ended: list[str], error: Exception | None = None):
        self.name, self.ended, self.error = name, ended, error

    def close(self) -> None:
        self.ended.append(self.name)
        if self.error:
            raise self.error


def job_of(*parts: Part) -> Job:
    resolved = ResolvedRun(
        config=types.SimpleNamespace(),
        plan=types.SimpleNamespace(),
        run=types.SimpleNamespace(),
        data=None,
        num_rollout=3,
    )
    return Job(resolved, closing=list(parts))


def test_parts_end_once_and_in_order():
    ended: list[str] = []
    job = job_of(*(Part(name, ended) for name in ("rollouts", "engines", "trainer")))
    job.close()
    job.close()
    assert ended == ["rollouts", "engines", "trainer"] and job.num_rollout == 3


def test_a_part_that_cannot_end_does_not_keep_the_others():
    ended: list[str] = []
    job = job_of(
        Part("rollouts", ended, ValueError("stuck")), Part("engines", ended, KeyError("second")), Part("trainer", ended)
    )
    with pytest.raises(ValueError, match="stuck"):
        job.close()
    assert ended == ["rollouts", "engines", "trainer"]


def test_a_part_that_is_started_anew_ends_where_the_one_before_would():
    ended: list[str] = []
    job = job_of()
    trainer, again = Part("trainer", ended), Part("trainer again", ended)
    job.closes(trainer)
    job.closes(Part("rollouts", ended))
    job.closes(again, in_place_of=trainer)
    job.close()
    assert ended == ["rollouts", "trainer again"]
