"""Weights through a folder that trainer and engines both see: any placement, no connection between them.

    <root>/.version-00000007.partial/    while sources and writers write, at the same time
    <root>/version-00000007/   complete: model-<source>-<writer>-<number>.safetensors and model.safetensors.index.json

The engines load it in session.EngineSide.load. Older versions are removed when a new one is complete. Nothing is forced
onto the medium (fsync): a version is for engines that run now, and one that a power failure tore is never loaded, since
the next run writes its own.
"""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterable, Iterator

from safetensors import safe_open

from slime_like.errors import WaitTimeout, WeightSyncError
from slime_like.weight_sync.buckets import NamedTensor, Proof, PublisherOptions, SentReport, num_bytes
from slime_like.weight_sync.session import version_directory
from slime_like.weight_sync.transports.slots import BucketSlot, Sending, send_in_slots, slot_bytes

#: torch's name of a type -> the format's.
TYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


#: Of one file: while it is written the next one is filled, and what is filled still lies in the processor's cache.
_FILE_BYTES = 32 << 20


class DiskPublisher:
    """See the module."""

    def __init__(self, options: PublisherOptions):
        if not options.directory:
            raise WeightSyncError("the disk transport needs a folder. Fix: --update-weight-disk-dir.")
        self._options = options
        self._root = os.path.abspath(options.directory)
        self._is_first = options.source_index == options.writer_index == 0
        self._is_alone = options.num_sources * options.num_writers == 1
        self._slots = [BucketSlot(), BucketSlot()]
        self._removal: threading.Thread | None = None  # of older versions, while engines load the new one

    def connect(self) -> None:
        """Make the root folder. Raises WeightSyncError."""
        with self._explaining("cannot be made"):
            os.makedirs(self._root, exist_ok=True)

    def begin(self, version: int) -> None:
        """The first writer makes the folder."""
        self._wait_for_removal()
        self.connect()
        if self._is_first:
            partial = self._partial(version)
            shutil.rmtree(partial, ignore_errors=True)  # of an attempt that failed
            with self._explaining("cannot be written to"):
                os.mkdir(partial)

    def send(self, tensors: Iterable[NamedTensor], version: int, proof: Proof | None = None) -> SentReport:
        """Write this writer's share. One that is alone also begins and finishes."""
        options, partial = self._options, self._partial(version)
        if self._is_alone:
            self.begin(version)
        elif not os.path.isdir(partial):
            who = f"source {options.source_index} of {options.num_sources}"
            raise WeightSyncError(f"{who}: {partial} is missing. Is {self._root} shared between the trainer's nodes?")
        stem = f"{partial}/model-{options.source_index:03d}-{options.writer_index:03d}"
        how = Sending(
            send=lambda slot, number: self._write(slot, f"{stem}-{number:05d}.safetensors"),
            max_bytes=min(slot_bytes(options.buffer_bytes), _FILE_BYTES),
            who=f"trainer source {options.source_index}",
            timeout_s=options.timeout_s,
        )
        report = send_in_slots(_share(tensors, options.writer_index, options.num_writers), self._slots, how)
        if self._is_alone:
            self.finish(version)
        return report

    def finish(self, version: int) -> None:
        """The first writer makes the version visible under its final name at once."""
        partial, final = self._partial(version), version_directory(self._root, version)
        if not self._is_first or (self._is_alone and not os.path.isdir(partial)):
            return
        with self._explaining("cannot be written to"):
            self._complete(partial)
            shutil.rmtree(final, ignore_errors=True)
            os.rename(partial, final)
        if not self._options.keep_files:
            self._removal = threading.Thread(
                target=_remove_older, args=(self._root, final), name=f"remove versions before {version}", daemon=True
            )
            self._removal.start()

    def _complete(self, folder: str) -> None:
        """The last step before a version is visible, when all have written."""
        _write_index(folder)

    def abandon(self, version: int) -> None:
        """Remove what was written of this version."""
        if self._is_first:
            shutil.rmtree(self._partial(version), ignore_errors=True)

    def close(self) -> None:
        """Nothing is held but memory; the last version stays, as the engines' copy of what they serve."""
        self._wait_for_removal()
        for slot in self._slots:
            slot.shrink()

    def _wait_for_removal(self) -> None:
        """Before more is written: there is never more on the disk than one version and the one that
        is being written.
        """
        if self._removal is None:
            return
        self._removal.join(self._options.timeout_s)
        if self._removal.is_alive():
            seconds = self._options.timeout_s
            raise WaitTimeout(
                who=f"trainer source {self._options.source_index}",
                whom=self._root,
                phase="remove older weights",
                seconds=seconds,
                last="",
            )
        self._removal = None

    def _partial(self, version: int) -> str:
        return os.path.join(self._root, f".{os.path.basename(version_directory(self._root, version))}.partial")

    def _write(self, slot: BucketSlot, path: str) -> None:
        with self._explaining("cannot be written to"), open(path, "wb", buffering=0) as file:
            for part in (_header(slot), slot.filled().numpy()):
                rest = memoryview(part)
                while rest:
                    rest = rest[file.write(rest) :]

    def _explaining(self, what: str) -> _Explaining:
        return _Explaining(self._root, what)


class _Explaining:
    """Turns an OSError into a WeightSyncError that says how much room there is."""

    def __init__(self, folder: str, what: str):
        self._folder, self._what = folder, what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind, error, trace) -> None:
        if not isinstance(error, OSError):
            return
        folder = self._folder
        while not os.path.isdir(folder):
            folder = os.path.dirname(folder)
        free = shutil.disk_usage(folder).free
        raise WeightSyncError(
            f"{self._folder} {self._what}: {error.strerror} ({error.filename or folder}); {free} bytes are free."
            " Engines keep the weights that they have. Fix: room there, or another --update-weight-disk-dir."
        ) from error


def _share(tensors: Iterable[NamedTensor], writer: int, num_writers: int) -> Iterator[NamedTensor]:
    """The tensors that one of several writers writes: each goes to the one with the fewest bytes so far.

    All see the same tensors.
    """
    written = [0] * num_writers
    for name, tensor in tensors:
        least = written.index(min(written))
        written[least] += num_bytes(tensor)
        if least == writer:
            yield name, tensor


def _header(slot: BucketSlot) -> bytes:
    """The beginning of a safetensors file: 8 bytes with the length of the JSON that follows, which is padded so that
    the tensors are aligned.
    """
    table: dict = {"__metadata__": {"format": "pt"}}
    for entry in slot.entries:
        table[entry.name] = {
            "dtype": TYPES[entry.dtype],
            "shape": entry.shape,
            "data_offsets": [entry.start, entry.stop],
        }
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _write_index(folder: str) -> None:
    """model.safetensors.index.json: which file holds which tensor.

    Raises WeightSyncError if two sources sent the same one.
    """
    weight_map: dict[str, str] = {}
    total = 0
    for file_name in sorted(name for name in os.listdir(folder) if name.endswith(".safetensors")):
        path = os.path.join(folder, file_name)
        total += os.path.getsize(path)
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - no dict: it cannot be iterated
                if name in weight_map:
                    raise WeightSyncError(f"{name} was sent twice: {weight_map[name]} and {file_name} in {folder}")
                weight_map[name] = file_name
    with open(os.path.join(folder, "model.safetensors.index.json"), "w") as file:
        json.dump({"metadata": {"total_size": total}, "weight_map": weight_map}, file, indent=1)


def _remove_older(root: str, keep: str) -> None:
    for name in os.listdir(root):
        if name.startswith("version-") and name < os.path.basename(keep):
            shutil.rmtree(os.path.join(root, name), ignore_errors=True)
