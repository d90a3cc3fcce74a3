"""--resume auto: a run goes on in its own run directory, from the newest checkpoint that is whole, as if it had never
stopped; where there is none yet it starts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os

from slime_like.config.run import RunConfig
from slime_like.errors import CheckpointError, UserError
from slime_like.job import ahead
from slime_like.megatron_backend.checkpoint.folder import find, iterations, read_client_state
from slime_like.observability.metrics import ends_with_step, forget_from
from slime_like.utils.files import RunDirectory

#: Below --save: Megatron checkpoints of the critic.
CRITIC = "critic"
#: In a run directory; whoever drives the run has it locked.
_LOCK = ".lock"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """What --resume auto goes on from."""

    num_rollouts_done: int
    skipped: tuple[str, ...] = ()  # newer checkpoints, and why each is not taken

    def notes(self) -> tuple[str, ...]:
        """What to tell the user."""
        skipped = tuple(f"--resume auto: left out a newer checkpoint: {why}" for why in self.skipped)
        return (*skipped, f"--resume auto: going on after {self.num_rollouts_done} rollouts")


def resume_point(config: RunConfig) -> ResumePoint | None:
    """The newest checkpoint in --save that is whole, of the policy and of its critic; None: there is none.

    Raises CheckpointError if there are checkpoints and none is whole.
    """
    folder = config.checkpoint.save or ""
    numbers = set(iterations(folder))
    if config.needs_critic:
        numbers &= set(iterations(os.path.join(folder, CRITIC)))
    skipped: list[str] = []
    for number in sorted(numbers, reverse=True):
        try:
            ahead.check(folder, number, read_client_state(find(folder, number)).get("client_state", {}))
            if config.needs_critic:
                find(os.path.join(folder, CRITIC), number)
        except CheckpointError as error:
            skipped.append(str(error))
            continue
        return ResumePoint(num_rollouts_done=number, skipped=tuple(skipped))
    if skipped:
        raise CheckpointError(f"--resume auto: no checkpoint in {folder} is whole. The newest: {skipped[0]}")
    return None


def going_on(config: RunConfig, point: ResumePoint) -> RunConfig:
    """The config of a run that continues itself: --load and what goes with it were for its beginning."""
    checkpoint = dataclasses.replace(
        config.checkpoint,
        resume=None,  # as it is resolved: config.json must say the one or the other
        load=config.checkpoint.save,
        ckpt_step=point.num_rollouts_done,
        finetune=False,
        no_load_optim=config.checkpoint.no_save_optim,
        no_load_rng=False,
    )
    return dataclasses.replace(config, checkpoint=checkpoint)


def take_over(run: RunDirectory, num_done: int, num_rollout: int) -> bool:
    """Leave in the run's metrics what the first `num_done` rollouts gave; the rest is done again.

    Returns whether all rollouts are done, but not what comes after the last.
    """
    if num_done == num_rollout and ends_with_step(run.metrics, num_rollout - 1):
        return False
    forget_from(run.metrics, num_done)
    return num_done == num_rollout


def lock(run: RunDirectory) -> None:
    """Keep the run directory for this process, as long as it lives.

    Raises UserError if another process drives this run.
    """
    handle = os.open(os.path.join(run.path, _LOCK), os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        other = ""
        with contextlib.suppress(OSError):
            other = os.read(handle, 64).decode(errors="replace")
        os.close(handle)
        raise UserError(
            f"--run-dir {run.path}: process {other or 'of another host'} drives this run. Fix: wait until it has ended."
        ) from None
    os.truncate(handle, 0)
    os.write(handle, str(os.getpid()).encode())  # and never closed
