"""Engines that die while a run generates or syncs: looked after between two looks at everything else."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from slime_like.errors import EngineError, RunError
from slime_like.job.protocols import Changes, Trainer, Watch
from slime_like.job.running import Job
from slime_like.observability.console import ProgressConsole

#: How often engines that start are looked at before a sync, in seconds.
_LOOK_S = 0.5
_T = TypeVar("_T")


class Tending:
    """Over a job's `tend`; without one nothing is done, and an engine that dies ends the run.

    after_sending: called when the trainer has sent its weights to an engine that came.
    """

    def __init__(self, job: Job, console: ProgressConsole, after_sending: Callable[[], None]):
        self._job, self._console, self._after_sending = job, console, after_sending

    def watch(
        self, phase: str, sender: Callable[[], Trainer | None], sync_early: Callable[[], bool] = lambda: False
    ) -> Watch:
        """What to ask each second while engines generate. sender: the trainer, if it may send what engines serve.
        sync_early: sends engines what the trainer holds by now, though answers are awaited; False: that cannot be.
        """
        look = self._job.watch(phase)

        def check() -> None:
            look()
            trainer = sender()
            changes = self._look(trainer)
            if changes and changes.num_waiting and not (changes.enough or changes.num_coming or trainer):
                # Requests wait for engines, these for a sync, and the sync for the requests.
                if sync_early():
                    return
                raise EngineError(
                    f"{changes.num_waiting} engines are up in the places of dead ones and need weights, which the"
                    " trainer cannot send while answers are awaited: it shares the cards of engines that serve, or has"
                    " trained since the last sync and an evaluation needs the weights before. Fewer than --min-engines"
                    " serve meanwhile. Fix: --resume auto goes on from the last checkpoint; more engines, or a smaller"
                    " --min-engines, outlive this."
                )

        return check

    def look(self, trainer: Trainer | None = None) -> bool:
        """Once; whether a sync can begin: enough serve, or all that will have come. Raises EngineError."""
        changes = self._look(trainer)
        return changes is None or changes.enough or not changes.num_coming

    def _look(self, trainer: Trainer | None) -> Changes | None:
        job = self._job
        if job.tend is None or job.engines is None or job.rollouts is None:
            return None
        changes = job.tend(trainer)
        for note in changes.notes:
            self._console.note(note)
        if changes.serving_changed:
            if trainer is not None:
                self._after_sending()
            job.rollouts.engines_changed(job.engines.endpoints, enough=changes.enough)
        job.rollouts.engines_looked_at()
        return changes

    def retried(self, sync: Callable[[], _T]) -> _T:
        """What the sync gives; it is begun again without an engine that died in it, and with those that came."""
        engines = self._job.engines
        if self._job.tend is None or engines is None:
            return sync()
        while True:
            while not self.look():
                time.sleep(_LOOK_S)
            before = engines.num_deaths
            try:
                return sync()
            except RunError:
                if engines.num_deaths == before:
                    raise
