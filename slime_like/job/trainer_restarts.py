"""A rank of the trainer (or of its critic, or its reference) is lost: all training ranks are started anew, in the same
places and from the newest checkpoint of this run, while engines, router and placement group stay.

Everything else is as after --resume auto: the data position and the ledger are the checkpoint's, lines of metrics of
steps that are done again are taken out, the version counts on from the checkpoint's, and before anything is asked of
engines they get the weights and prove them.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Sequence
from typing import Protocol

from slime_like.config.run import RunConfig
from slime_like.errors import RunError
from slime_like.job import resume
from slime_like.job.parts import Clock
from slime_like.job.running import Job

logger = logging.getLogger(__name__)


class Restartable(Protocol):
    """What a restart does with a run's processes (parts.Parts)."""

    def lost_ranks(self) -> dict[str, RunError]:
        """Ranks of training roles whose process has ended, by name."""

    def lost_machines(self) -> Sequence[str]:
        """Addresses of the run's machines that are gone."""

    def end_roles(self) -> None:
        """End the training roles, and all that was asked of engines."""

    def begin_roles(self, config: RunConfig) -> None:
        """Begin to start them again."""

    def wait_for_roles(self, clock: Clock) -> int | None:
        """Wait for them; the job then says how many rollouts are done."""

    def start_rollouts(self) -> None:
        """The rollout side anew."""

    def watch(self) -> None:
        """From now on the new ranks are watched."""


class TrainerRestarts:
    """Over a job that is up."""

    def __init__(self, job: Job, parts: Restartable):
        self._job, self._parts = job, parts
        self._first, self._num_done = job.config, 0
        checkpoint = job.config.checkpoint
        self._most = checkpoint.max_trainer_restarts
        if job.num_rollouts_done and _same_folder(checkpoint.load, checkpoint.save):
            job.saved.add(job.num_rollouts_done)

    def after(self, error: RunError) -> tuple[str, ...]:
        """Put the job back to its newest checkpoint, or its beginning, with new ranks; lines for the console.

        Raises `error` itself where no rank is lost, or where nothing can be started anew: its note then says why.
        """
        if self._most == 0:
            raise error
        lost = self._parts.lost_ranks()
        while True:
            if not lost:
                raise error
            if (why_not := self._why_not()) is not None:
                error.add_note(f"{', '.join(lost)} cannot be started anew: {why_not}")
                raise error
            self._num_done += 1
            names = ", ".join(lost)
            logger.error("%s: %s", names, error)
            started_at = time.monotonic()
            try:
                point = self._again()
            except RunError as another:
                lost, error = self._parts.lost_ranks(), another
                continue
            seconds = time.monotonic() - started_at
            where = "the start" if point is None else f"the checkpoint after {self._job.num_rollouts_done} rollouts"
            how_often = f"restart {self._num_done} of --max-trainer-restarts {self._most}"
            started = f"all training ranks were started anew from {where} in {seconds:.1f} s"
            return str(error), f"{names} lost: {started} ({how_often}); engines stayed"

    def _why_not(self) -> str | None:
        """Why a lost rank ends the run."""
        config = self._job.config
        if self._num_done >= self._most:
            return f"--max-trainer-restarts {self._most} is used up"
        if machines := self._parts.lost_machines():
            return f"the machine {', '.join(machines)} is gone, and with it a place that the run had reserved"
        if config.sync.sends_deltas:
            return "with --update-weight-mode delta nobody but the lost ranks knows what receivers hold"
        serving = config.serving
        if serving.serve_rollout and serving.agent_path is None and serving.serve_port is None:
            return "agents from outside know the endpoint by a port that is another one afterwards (--serve-port)"
        return None

    def _again(self) -> resume.ResumePoint | None:
        """What was there ends; what is new is up when it returns."""
        job, parts = self._job, self._parts
        with job.resolved.progress.phase_of("restart of the trainer"):
            parts.end_roles()
            point = resume.resume_point(self._first, among=job.saved) if self._first.checkpoint.save else None
            config = self._first if point is None else resume.going_on(self._first, point)
            job.resolved = dataclasses.replace(job.resolved, config=config)
            job.begins_anew()
            parts.begin_roles(config)
            parts.wait_for_roles(Clock(job.start_seconds, job.resolved.progress))
            ends_only = resume.take_over(job.run, job.num_rollouts_done, job.num_rollout)
            job.resolved = dataclasses.replace(job.resolved, ends_only=ends_only)
            if not job.client_state:  # else it is what a ledger hears that goes on
                job.run.dropped.unlink(missing_ok=True)
            parts.start_rollouts()
            parts.watch()
        return point


def _same_folder(one: str | None, other: str | None) -> bool:
    return bool(one and other) and os.path.realpath(str(one)) == os.path.realpath(str(other))
