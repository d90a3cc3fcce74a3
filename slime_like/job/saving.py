"""Saves that fail: the run goes on without one, and ends where that would lose too much."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator

from slime_like.config.run import RunConfig
from slime_like.errors import SaveError
from slime_like.job.running import Job
from slime_like.observability.console import ProgressConsole
from slime_like.planning.memory.parameters import model_parameters

#: Of a parameter in a checkpoint: weights in 16 bits, and fp32 weights and two moments of the optimizer. A run in fp32
#: takes 16.
_WEIGHT_BYTES, _OPTIMIZER_BYTES = 2, 12


def room_at_start(config: RunConfig) -> tuple[str, ...]:
    """A note if the folder of --save, where this host sees it, has no room for the first checkpoint."""
    folder = config.checkpoint.save
    if not folder or config.adapters or not config.model.is_known:
        return ()
    while not os.path.isdir(folder):
        folder = os.path.dirname(os.path.abspath(folder))
    each = _WEIGHT_BYTES + (0 if config.checkpoint.no_save_optim else _OPTIMIZER_BYTES)
    needed = model_parameters(config.model) * each * (2 if config.needs_critic else 1)
    free = shutil.disk_usage(folder).free
    if needed <= free:
        return ()
    sizes = f"a checkpoint takes about {needed / 1e9:.1f} GB, {free / 1e9:.1f} are free"
    return (f"--save {config.checkpoint.save}: {sizes}",)


def room_for_another(path: str) -> str | None:
    """Why the disk will not take another checkpoint like this one; None: it will, or this host does not see it."""
    if not os.path.isdir(path):
        return None
    needed = sum(entry.stat().st_size for entry in os.scandir(path))
    free = shutil.disk_usage(path).free
    return f"it takes {needed} bytes, and {free} are free" if needed > free else None


class Saves:
    """What became of a run's saves, and what becomes of the run where one fails.

    A save that failed has left nothing, and the checkpoint before it stays the newest. The last rollout's must succeed,
    and --max-failed-saves in a row end the run. An HF folder that cannot be written costs no checkpoint.
    """

    def __init__(self, job: Job, console: ProgressConsole):
        self._job, self._console = job, console
        self._in_a_row = 0
        self._whole = job.num_rollouts_done  # rollouts that the newest whole checkpoint has
        self._hf_error: SaveError | None = None
        self.num_saved = job.num_rollouts_done  # as _whole, or what the one that is being written has
        self.saving: str | None = None  # the checkpoint that is being written in the background
        self.critic_saved: int | None = None  # the number that it has beyond the policy's, while a save is under way
        self.num_failed = 0

    def save_hf(self, num_done: int) -> None:
        """Write the HF folder that goes with a checkpoint, if one is asked for."""
        template, trainer = self._job.config.checkpoint.save_hf, self._job.trainer
        if not template or trainer is None:
            return
        folder = os.path.abspath(template.replace("{rollout_id}", str(num_done)))
        self._hf_error = None
        try:
            trainer.save_hf(folder)
        except SaveError as error:
            self._check_in_step(error)
            self.num_failed, self._hf_error = self.num_failed + 1, error
            self._console.note(f"{error}\n  the run goes on without that folder")
        else:
            self._console.note(f"saved {folder} (HF)")

    def begun(self, num_done: int, path: str) -> None:
        """A checkpoint is being written in the background."""
        self.num_saved, self.saving = num_done, path
        self._job.saved.add(num_done)
        self._console.note(f"saving {path} while the run goes on")

    @contextlib.contextmanager
    def may_fail(self, num_done: int) -> Iterator[None]:
        """Inside, a SaveError is said, and raised only if the run ends with it."""
        try:
            yield
        except SaveError as error:
            self.saving = None
            self._failed(error, num_done)
            self.num_saved = self._whole

    def check_saved(self, num_done: int, asked_by: str) -> None:
        """Raises SaveError if a preempted run ends without a checkpoint of all that it has done."""
        if num_done > self.num_saved:
            newest = f"the newest checkpoint is that after {self._whole}"
            raise SaveError(f"{asked_by}: preempted after {num_done} rollouts, which could not be saved; {newest}")

    def succeeded(self, num_done: int, path: str) -> None:
        """A checkpoint is whole; says so in time if the disk will not take another. Raises SaveError if it is the last
        rollout's, and an HF folder is missing.
        """
        self._console.note(f"saved {path}")
        self._in_a_row, self._whole, self.num_saved = 0, num_done, num_done
        self._job.saved.add(num_done)
        self.saving = self.critic_saved = None
        if self._hf_error is not None and num_done >= self._job.num_rollout:
            self._hf_error.add_note(f"The checkpoint is there: {path}. Fix: room, and megatron_backend.convert.")
            raise self._hf_error
        why = room_for_another(path) if num_done < self._job.num_rollout else None
        if why is not None:
            self._console.note(f"the next checkpoint will find no room beside {path}: {why}")

    def _failed(self, error: SaveError, num_done: int) -> None:
        if self._whole >= num_done:  # it is whole, and the error is another's
            raise error
        self._check_in_step(error)
        self._discard_critics()
        self._in_a_row += 1
        self.num_failed += 1
        most = self._job.config.checkpoint.max_failed_saves
        newest = f"the newest checkpoint is that after {self._whole} rollouts"
        if num_done >= self._job.num_rollout:
            error.add_note(f"It was the last rollout's: {newest}. Fix: room there; --load goes on from it.")
            raise error
        if self._in_a_row >= most:
            error.add_note(f"{self._in_a_row} saves in a row failed (--max-failed-saves {most}); {newest}.")
            raise error
        self._console.note(f"not saved after {num_done} rollouts ({self._in_a_row} of {most} in a row): {error}")
        self._console.note(f"  the run goes on; {newest}")

    def _check_in_step(self, error: SaveError) -> None:
        """Raises the error where not all ranks have it: the others wait in a collective that will not come."""
        roles = [role for role in (self._job.critic, self._job.trainer) if role is not None]
        if not all(role.in_step() for role in roles):
            raise error

    def _discard_critics(self) -> None:
        """Else those that it saves without the policy's would drive out the one beside the policy's newest."""
        critic, number, self.critic_saved = self._job.critic, self.critic_saved, None
        if critic is not None and number is not None:
            critic.finish_save(wait=True)
            critic.discard_save(number)
