"""With --async-mode one-step: the rollout that was generated beside the last train step, kept with the checkpoint.

<save>/ahead/0000012.npz      the groups of rollout 12 (from 0), which a run that goes on after 12 trains on next
"""

from __future__ import annotations

import os
from pathlib import Path

from slime_like.errors import CheckpointError, DataError, SaveError
from slime_like.job.protocols import Rollout
from slime_like.records import SampleGroup
from slime_like.rollout.debug_data import load_rollout, save_rollout

FOLDER = "ahead"


def keep(save: str, num_done: int, rollout: Rollout) -> dict:
    """Write the groups; what a checkpoint's client_state says of them, as JSON. Files of checkpoints that are gone go
    too. Raises SaveError.
    """
    folder = Path(save) / FOLDER
    kept = {path.name.removeprefix("iter_") for path in Path(save).glob("iter_*")}
    for path in folder.glob("*.npz"):
        if path.stem not in kept:
            path.unlink()
    target = str(folder / f"{num_done:07d}.npz")
    try:
        path = save_rollout(target, num_done, rollout.groups)
    except OSError as error:
        raise SaveError(f"the rollout ahead, {target}, could not be written: {error.strerror}") from error
    return {"bytes": path.stat().st_size, "metrics": rollout.metrics}


def read(load: str, num_done: int, record: dict) -> tuple[SampleGroup, ...]:
    """The groups that `keep` has written. Raises CheckpointError if the file is missing or of another size."""
    path = os.path.join(load, FOLDER, f"{num_done:07d}.npz")
    size = os.path.getsize(path) if os.path.isfile(path) else None
    if size != record["bytes"]:
        there = "missing" if size is None else f"{size} bytes long"
        raise CheckpointError(
            f"{path} is {there}, but was written with {record['bytes']}: the checkpoint after {num_done} rollouts needs"
            " it. Fix: an older --ckpt-step, or restore the file."
        )
    try:
        return load_rollout(path, num_done)
    except DataError as error:
        raise CheckpointError(f"the checkpoint after {num_done} rollouts: {error}") from error
