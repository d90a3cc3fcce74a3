"""What is made ahead of the trainer when a checkpoint is written, kept beside it.

<save>/ahead/0000012.npz            of the checkpoint after 12 rollouts: with --async-mode one-step the groups of
                                    rollout 12 (from 0), which is trained on next; with full and --partial-rollout
                                    those that wait, and those that ended since the last rollout
<save>/ahead/0000012.answers.npz    of groups in the making: what engines have answered for them
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import xxhash

from slime_like.errors import CheckpointError, DataError
from slime_like.job.protocols import Rollout, Rollouts
from slime_like.records import SampleGroup
from slime_like.rollout.debug_data import load_rollout, save_rollout
from slime_like.rollout.stock import Stock, load_answers, save_answers

FOLDER = "ahead"
#: Of a checkpoint's client_state: with --async-mode one-step, and with full or --partial-rollout.
_ONE_STEP, _FLOW = "ahead", "stock"


def kept(save: str, num_done: int, rollout: Rollout | None, stock: Stock | None) -> tuple[dict, tuple[str, ...]]:
    """Write the files; (what a checkpoint's client_state says of them, as JSON; what to tell the user).

    Groups that no file can hold are left out: their prompts are asked again after a resume. Files of checkpoints that
    are gone go too.
    """
    _forget_others(Path(save))
    try:
        if rollout is not None:
            record = _groups(save, num_done, rollout.groups)
            return {_ONE_STEP: record | {"metrics": rollout.metrics}}, ()
        if stock is None:
            return {}, ()
        state: dict = {"record": stock.record, "groups": _groups(save, num_done, stock.groups)}
    except DataError as error:
        why = f"a label or metadata is no JSON value: {error.__cause__}"
        return {}, (f"what is generated ahead is not kept: {why}. After a resume its prompts are asked again",)
    if stock.answers:
        state["answers"] = _record(save_answers(_path(save, num_done, ".answers.npz"), stock.answers))
    return {_FLOW: state}, ()


def restore(rollouts: Rollouts, load: str, num_done: int, state: dict) -> None:
    """Give back what `kept` wrote, after the rollout side's own state. Raises CheckpointError if a file is missing or
    another.
    """
    if record := state.get(_ONE_STEP):
        rollouts.put_ahead(num_done, _read_groups(load, num_done, record), record["metrics"])
    if flow := state.get(_FLOW):
        answers = ()
        if "answers" in flow:
            path = _checked(_path(load, num_done, ".answers.npz"), flow["answers"], num_done)
            answers = _read(lambda: load_answers(path), num_done)
        groups = _read_groups(load, num_done, flow["groups"])
        rollouts.load_stock(Stock(groups=groups, answers=answers, record=flow["record"]), num_done)


def check(folder: str, num_done: int, state: dict) -> None:
    """Raises CheckpointError if a file that a checkpoint's client_state names is missing or another."""
    flow = state.get(_FLOW, {})
    for record, suffix in (
        (state.get(_ONE_STEP), ".npz"),
        (flow.get("groups"), ".npz"),
        (flow.get("answers"), ".answers.npz"),
    ):
        if record:
            _checked(_path(folder, num_done, suffix), record, num_done)


def _path(folder: str, num_done: int, suffix: str) -> Path:
    return Path(folder) / FOLDER / f"{num_done:07d}{suffix}"


def _groups(save: str, num_done: int, groups: tuple[SampleGroup, ...]) -> dict:
    return _record(save_rollout(str(_path(save, num_done, ".npz")), num_done, groups))


def _record(path: Path) -> dict:
    return {"bytes": path.stat().st_size, "digest": xxhash.xxh3_128_hexdigest(path.read_bytes())}


def _checked(path: Path, record: dict, num_done: int) -> Path:
    """The path, if the file is what was written. A checkpoint from before there were digests tells its size alone."""
    size = path.stat().st_size if path.is_file() else None
    if size != record["bytes"]:
        there = f"is {'missing' if size is None else f'{size} bytes long'}, but was written with {record['bytes']}"
    elif "digest" in record and xxhash.xxh3_128_hexdigest(path.read_bytes()) != record["digest"]:
        there = "is not what was written: its digest is another"
    else:
        return path
    raise CheckpointError(
        f"{path} {there}: the checkpoint after {num_done} rollouts needs it. Fix: an older --ckpt-step, or restore the"
        " file."
    )


def _read_groups(load: str, num_done: int, record: dict) -> tuple[SampleGroup, ...]:
    path = _checked(_path(load, num_done, ".npz"), record, num_done)
    return _read(lambda: load_rollout(str(path), num_done), num_done)


def _read(read: Callable[[], tuple], num_done: int) -> tuple:
    try:
        return read()
    except DataError as error:
        raise CheckpointError(f"the checkpoint after {num_done} rollouts: {error}") from error


def _forget_others(save: Path) -> None:
    numbers = {path.name.removeprefix("iter_") for path in save.glob("iter_*")}
    for path in (save / FOLDER).glob("*.npz"):
        if path.name.split(".")[0] not in numbers:
            path.unlink()
