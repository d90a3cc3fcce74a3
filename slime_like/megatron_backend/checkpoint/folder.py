"""The folders of Megatron checkpoints: which one counts, whether it is whole, and how a finished one takes its place.

<folder>/latest_checkpointed_iteration.txt    "12", or "release" for converted weights: Megatron's tracker
<folder>/iter_0000012/ or <folder>/release/   torch_dist shards, and client_state.json with every file's size and digest
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
from collections.abc import Mapping

import xxhash

from slime_like.errors import CheckpointError
from slime_like.utils.files import write_atomic

TRACKER = "latest_checkpointed_iteration.txt"
STATE_FILE = "client_state.json"
#: Megatron's word for weights that belong to no training run: they count as zero rollouts done.
RELEASE = "release"
_READ_BYTES = 8 * 1024**2
#: Of the record: numbers of checkpoints that go when this one is there.
_OUTDATED = "outdated"
#: What the record's keys are.
_KINDS: dict[str, type | tuple[type, ...]] = {
    "num_rollouts_done": int,
    "client_state": dict,
    "architecture": dict,
    "layout": list,
    "dtype": str,
    "has_optimizer": bool,
    "weights_only": bool,
    "value_head": bool,
    "lora": (dict, type(None)),
    _OUTDATED: list,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draft:
    """A checkpoint that is being written into a hidden folder; publish() makes it the latest one.

    retain_interval: after it the checkpoint before is deleted, unless its number divides by this; None: nothing is.
    total_limit: most checkpoints that stay; the oldest go first. None: no limit.
    num_spared: how many earlier ones stay in any case. A critic's stays one longer: the policy's new one may not be
    there yet.
    """

    folder: str
    number: int | None  # rollouts done; None: converted weights
    record: dict  # client_state.json, without the files
    retain_interval: int | None = None
    total_limit: int | None = None
    num_spared: int = 0

    @property
    def name(self) -> str:
        """The final folder's name."""
        return RELEASE if self.number is None else _folder_name(self.number)

    @property
    def path(self) -> str:
        """Where it is written."""
        return os.path.join(self.folder, f".{self.name}.tmp")

    @property
    def final_path(self) -> str:
        """Where it will lie."""
        return os.path.join(self.folder, self.name)

    def make(self) -> None:
        """Make the hidden folder, empty, when what a killed run has left is gone. For one rank."""
        _tidy(self.folder, self.number)
        os.makedirs(self.path)

    def publish(self, digests: Mapping[str, str] | None = None) -> None:
        """Give what was written its name, and the tracker its number. For one rank, after all have written.

        digests: of files that their writers have digested; the others are digested here.
        """
        files = {entry.name: entry.stat().st_size for entry in os.scandir(self.path)}
        known = digests or {}
        record = self.record | {
            "files": files,
            "digests": {name: known.get(name) or file_digest(os.path.join(self.path, name)) for name in sorted(files)},
            _OUTDATED: self._outdated(),
        }
        record["digest"] = _record_digest(record)
        write_atomic(os.path.join(self.path, STATE_FILE), json.dumps(record, indent=1))
        swap_in(self.path, self.final_path)
        write_atomic(os.path.join(self.folder, TRACKER), RELEASE if self.number is None else str(self.number))
        for old in record[_OUTDATED]:
            _delete(self.folder, old)
        if self.total_limit is not None and self.number is not None:
            _delete_oldest(self.folder, self.number, num_kept=self.total_limit + self.num_spared)

    def _outdated(self) -> list[int]:
        """The checkpoint before, the newest that need not be spared, unless its number divides by the interval."""
        if not self.retain_interval or self.number is None:
            return []
        number = self.number
        earlier = sorted((n for n in iterations(self.folder) if n < number), reverse=True)[self.num_spared :]
        return earlier[:1] if earlier and earlier[0] % self.retain_interval else []


def file_digest(path: str) -> str:
    """xxh3-128 of a file's bytes, in hex: finds changes that happen to a file, not those that somebody means."""
    digest = xxhash.xxh3_128()
    with open(path, "rb", buffering=0) as file:
        buffer = memoryview(bytearray(_READ_BYTES))
        while size := file.readinto(buffer):
            digest.update(buffer[:size])
    return digest.hexdigest()


def shard_digests(path: str, rank: int) -> dict[str, str]:
    """Digests of the shards that a rank has written into a checkpoint's folder, by name."""
    names = (entry.name for entry in os.scandir(path) if entry.name.startswith(f"__{rank}_"))
    return {name: file_digest(os.path.join(path, name)) for name in names}


def damage(path: str, *, rank: int = 0, num_ranks: int = 1) -> list[str]:
    """Files of a checkpoint whose bytes are not those that were written, of this rank's share of them.

    A checkpoint from before there were digests has none that can be compared. Raises CheckpointError if one cannot be
    read.
    """
    digests = read_client_state(path).get("digests", {})
    try:
        return [
            name for name in sorted(digests)[rank::num_ranks] if file_digest(os.path.join(path, name)) != digests[name]
        ]
    except OSError as error:
        raise CheckpointError(f"{error.filename} cannot be read: {error.strerror}.") from None


def is_megatron_folder(folder: str) -> bool:
    """Whether anything in the folder claims to be a Megatron checkpoint."""
    return os.path.isdir(folder) and (os.path.isfile(os.path.join(folder, TRACKER)) or bool(iterations(folder)))


def find(folder: str, step: int | None = None) -> str:
    """Path of the newest checkpoint, or of the one after `step` rollouts.

    Raises CheckpointError if there is none, or if it is torn.
    """
    tracker = os.path.join(folder, TRACKER)
    if step is not None:
        path = os.path.join(folder, _folder_name(step))
        if not os.path.isdir(path):
            there = ", ".join(map(str, sorted(iterations(folder)))) or "none"
            raise CheckpointError(f"{folder} has no checkpoint {step} ({_folder_name(step)}). There: {there}.")
    elif os.path.isfile(tracker):
        with open(tracker, encoding="utf-8", errors="replace") as file:
            text = file.read(100).strip()
        if text != RELEASE and not (text.isascii() and text.isdigit() and len(text) < 19):
            raise CheckpointError(f"{tracker} holds {text!r}, not the number of a checkpoint.")
        path = os.path.join(folder, RELEASE if text == RELEASE else _folder_name(int(text)))
    elif iterations(folder):
        # The rename happened and the tracker's writing did not: a folder with its final name is complete.
        path = os.path.join(folder, _folder_name(max(iterations(folder))))
    else:
        raise CheckpointError(f"{folder} holds no Megatron checkpoint: neither {TRACKER} nor an iter_ folder.")
    read_client_state(path)
    return path


def read_client_state(path: str) -> dict:
    """client_state.json of one checkpoint, after checking that every file it lists is there in full.

    Raises CheckpointError.
    """
    state_path = os.path.join(path, STATE_FILE)
    try:
        with open(state_path, encoding="utf-8") as file:
            state = json.load(file)
        sizes = dict(state["files"])
        if "digest" in state and state["digest"] != _record_digest(state):
            raise ValueError("its own digest is another")
        _check_plain(state, sizes)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is no complete checkpoint: {state_path} cannot be read ({error!r}). Fix: write an older number"
            f" into {TRACKER}, or remove the folder."
        ) from None
    for name, size in sizes.items():
        file_path = os.path.join(path, name)
        actual_size = os.path.getsize(file_path) if os.path.isfile(file_path) else None
        if actual_size != size:
            raise CheckpointError(
                f"{file_path} is {'missing' if actual_size is None else f'{actual_size} bytes long'}, but was written"
                f" with {size}: the checkpoint is torn. Fix: write an older number into {TRACKER}, or restore the file."
            )
    return state


def iterations(folder: str) -> list[int]:
    """Numbers of the checkpoints with their final name, in no order."""
    names = (entry.name for entry in os.scandir(folder) if entry.is_dir()) if os.path.isdir(folder) else ()
    return [int(name[5:]) for name in names if re.fullmatch(r"iter_[0-9]{1,18}", name)]


def swap_in(draft: str, final: str) -> None:
    """Give the finished folder its name; one of the same name (a step done again after a resume) makes way."""
    old = draft + ".old"
    shutil.rmtree(old, ignore_errors=True)
    if os.path.isdir(final):
        os.rename(final, old)
    os.rename(draft, final)
    shutil.rmtree(old, ignore_errors=True)


def refuse_existing(folder: str) -> None:
    """Raise CheckpointError if the folder holds anything: a conversion never overwrites."""
    if os.path.exists(folder) and (not os.path.isdir(folder) or os.listdir(folder)):
        raise CheckpointError(
            f"{folder} exists and is not empty; nothing is overwritten. Fix: another --output, or remove it."
        )


def _record_digest(record: dict) -> str:
    text = json.dumps({key: value for key, value in record.items() if key != "digest"}, sort_keys=True)
    return xxhash.xxh3_128_hexdigest(text.encode())


def _check_plain(state: dict, sizes: dict) -> None:
    """Raises ValueError for a record that this version cannot have written."""
    for name, size in sizes.items():
        if os.path.basename(name) != name or name in ("", ".", "..") or type(size) is not int:
            raise ValueError(f"{name!r} of {size!r} bytes is no file of the folder")
    digests = state.get("digests", {})
    if not isinstance(digests, dict) or not set(digests) <= set(sizes):
        raise ValueError("its digests are not of its files")
    for key, kind in _KINDS.items():
        if key in state and not isinstance(state[key], kind):
            raise ValueError(f"{key} is {state[key]!r}")


def _folder_name(number: int) -> str:
    return f"iter_{number:07d}"


def _tidy(folder: str, number: int | None) -> None:
    """End what a run that was killed in a save has begun: drafts, what makes way, and what the checkpoint before
    `number` says is outdated.
    """
    for entry in os.scandir(folder) if os.path.isdir(folder) else ():
        if entry.is_dir() and re.fullmatch(rf"\.(iter_[0-9]+|{RELEASE})\.(tmp|tmp\.old|deleted)", entry.name):
            shutil.rmtree(entry.path, ignore_errors=True)
        elif entry.name.startswith(f".{TRACKER}."):
            os.unlink(entry.path)
    before = max((one for one in iterations(folder) if number is not None and one < number), default=None)
    if before is None:
        return
    with contextlib.suppress(CheckpointError):  # a torn one says nothing
        for old in read_client_state(os.path.join(folder, _folder_name(before))).get(_OUTDATED, ()):
            if old in iterations(folder):
                _delete(folder, old)


def _delete_oldest(folder: str, number: int, *, num_kept: int) -> None:
    """Delete all but the newest `num_kept` checkpoints up to `number`."""
    for old in sorted((n for n in iterations(folder) if n <= number), reverse=True)[num_kept:]:
        _delete(folder, old)


def _delete(folder: str, number: int) -> None:
    hidden = os.path.join(folder, f".{_folder_name(number)}.deleted")
    shutil.rmtree(hidden, ignore_errors=True)  # what a run that was killed here has left
    os.rename(os.path.join(folder, _folder_name(number)), hidden)  # half deleted, it must not look like a checkpoint
    shutil.rmtree(hidden)
