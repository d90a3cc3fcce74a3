"""The copy of the weights beside an engine: whole versions as folders of safetensors shards, the next one built beside
the last. No torch.

    <directory>/.lock                      held as long as a receiver uses the folder
    <directory>/.staging/                  the version that is being received; removed when the next one begins
    <directory>/version-00000007-000012/   complete (version_folder.py)

A shard in which nothing changed is a hard link to the last version's, so files are never written to once they are
named. A version counts when its folder has its final name. What a crash leaves torn is found at the next start, where
every digest is checked.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import shutil
import threading
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np
import xxhash

from slime_like.errors import WeightSyncError
from slime_like.weight_sync.delta.codec import SAME, WHOLE, DeltaError, decode, digest
from slime_like.weight_sync.delta.frame import (
    ITEM_BYTES,
    Frame,
    FramePlace,
    FrameTensor,
    read_frame,
    source_digest,
)
from slime_like.weight_sync.delta.version_folder import (
    ShardFile,
    ShardFiles,
    Version,
    check_version,
    read_version,
    safetensors_header,
    write_index,
    write_manifest,
)

logger = logging.getLogger(__name__)

_VERSION_FOLDER = re.compile(r"version-\d{8}-(\d{6})")
#: Versions have eight digits in a folder's name.
MAX_VERSION = 10**8 - 1
#: Pipeline stages that may send: more than any run has, and three digits in a file's name.
MAX_SOURCES = 1000
#: Shards of one source: five digits in a file's name.
MAX_SHARDS = 100_000
_CHUNK_BYTES = 8 << 20


class NotInStepError(WeightSyncError):
    """What was sent does not follow what is here: another sync has begun, or an earlier version is missing."""


class VersionStore:
    """See the module. Threads may share one; one of them works at a time.

    Raises WeightSyncError if another process uses the folder.
    """

    def __init__(self, directory: str, *, max_shard_bytes: int):
        self.directory = os.path.abspath(directory)
        os.makedirs(self.directory, exist_ok=True)
        self._lock_file = open(os.path.join(self.directory, ".lock"), "a")
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock_file.close()
            raise WeightSyncError(f"{self.directory} is used by another receiver. Fix: another --directory.") from None
        self._max_shard_bytes = max_shard_bytes
        self._staging = os.path.join(self.directory, ".staging")
        self._lock = threading.Lock()
        self._next: int | None = None  # the version that is being received
        self._shards: ShardFiles = {}
        self._finished: dict[int, str] = {}
        self._num_sources = 0
        self.current = self._newest()

    def close(self) -> None:
        """Let others use the folder."""
        self._lock_file.close()

    def state(self) -> dict:
        """What is here: version (None: nothing) and the digest of each source's share."""
        with self._lock:
            if self.current is None:
                return {"version": None, "folder": None, "sources": {}}
            return {
                "version": self.current.version,
                "folder": self.current.folder,
                "sources": {str(k): v for k, v in self.current.sources.items()},
            }

    def begin(self, version: int) -> None:
        """Get ready for `version`; what an earlier attempt left is removed."""
        with self._lock:
            if version > MAX_VERSION:
                raise NotInStepError(f"version {version}: at most {MAX_VERSION} are counted")
            shutil.rmtree(self._staging, ignore_errors=True)
            os.mkdir(self._staging)
            self._next, self._shards, self._finished, self._num_sources = version, {}, {}, 0

    def apply(self, data: bytes | bytearray) -> None:
        """Make one shard of the new version from a frame.

        Raises DeltaError or NotInStepError; then nothing of it is kept.
        """
        frame = read_frame(data)
        place = frame.place
        with self._lock:
            self._check_place(place)
            if place.source >= MAX_SOURCES or place.shard >= MAX_SHARDS:
                raise DeltaError(
                    f"{_where(place)}: at most {MAX_SOURCES} sources with {MAX_SHARDS} shards each are taken"
                )
            total = sum(entry.key.num_bytes for entry in frame.entries)
            if total > self._max_shard_bytes:
                raise DeltaError(
                    f"{_where(place)}: {total} bytes of tensors, at most {self._max_shard_bytes} are taken"
                )
            base = (
                None
                if place.base is None or self.current is None
                else self.current.shards.get((place.source, place.shard))
            )
            name = f"model-{place.source:03d}-{place.shard:05d}.safetensors"
            path = os.path.join(self._staging, name)
            unchanged = (
                base is not None and all(e.encoding == SAME for e in frame.entries) and self._as_before(frame, base)
            )
            try:
                if unchanged and base is not None and self.current is not None:
                    os.link(os.path.join(self.current.folder, base.file), path + ".new")
                    start = base.start
                else:
                    start = self._write(path + ".new", frame, base)
                if frame.damage is not None:
                    raise DeltaError(f"{_where(place)}: {frame.damage}")
                os.replace(path + ".new", path)
            except BaseException:
                if os.path.exists(path + ".new"):
                    os.unlink(path + ".new")
                raise
            self._shards[place.source, place.shard] = ShardFile(
                name, start, tuple((entry.key, entry.after) for entry in frame.entries)
            )

    def finish(self, version: int, source: int, *, num_sources: int, num_shards: int, expected: str) -> None:
        """One source has sent all. Raises DeltaError unless what is here is what it sent.

        Nothing is made as large as these numbers say: they are compared with what has arrived.
        """
        with self._lock:
            self._check_place(FramePlace(version, None, source, 0))
            if not source < num_sources <= MAX_SOURCES:
                raise DeltaError(
                    f"source {source} of {num_sources} of version {version}: at most {MAX_SOURCES} are taken, counted"
                    " from 0"
                )
            if self._finished and num_sources != self._num_sources:
                raise DeltaError(
                    f"source {source} of version {version} knows {num_sources} sources, the one before knew"
                    f" {self._num_sources}"
                )
            mine = sorted((number, shard.tensors) for (of, number), shard in self._shards.items() if of == source)
            actual = source_digest(mine)
            if (
                len(mine) != num_shards
                or any(number != place for place, (number, _) in enumerate(mine))
                or actual != expected
            ):
                raise DeltaError(
                    f"source {source} of version {version}: {len(mine)} of {num_shards} shards with digest {actual}, it"
                    f" must be {expected}"
                )
            self._finished[source], self._num_sources = expected, num_sources

    def commit(self, version: int) -> Version:
        """Make the new version the current one, all at once, and remove older ones.

        Raises NotInStepError if a source is missing.
        """
        with self._lock:
            if self._next != version or len(self._finished) != self._num_sources or not self._finished:
                raise NotInStepError(
                    f"version {version} is not complete: sources {sorted(self._finished)} of"
                    f" {self._num_sources or 'some'} have sent all"
                )
            write_index(self._staging, self._shards.values())
            sequence = 1 if self.current is None else self.current.sequence + 1
            final = os.path.join(self.directory, f"version-{version:08d}-{sequence:06d}")
            done = Version(final, sequence, version, dict(self._finished), dict(self._shards))
            write_manifest(self._staging, done)
            shutil.rmtree(final, ignore_errors=True)  # a torn one
            os.rename(self._staging, final)
            self.current, self._next = done, None
            self._remove_others(final)
            return done

    def _check_place(self, place: FramePlace) -> None:
        if self._next != place.version:
            what = "no sync has begun" if self._next is None else f"version {self._next} is being received"
            raise NotInStepError(f"{_where(place)}: {what}")
        if place.base is not None and (self.current is None or self.current.version != place.base):
            raise NotInStepError(
                f"{_where(place)} starts from version {place.base}, here is"
                f" {None if self.current is None else self.current.version}"
            )

    def _as_before(self, frame: Frame, base: ShardFile) -> bool:
        return tuple((entry.key, entry.after) for entry in frame.entries) == base.tensors

    def _write(self, path: str, frame: Frame, base: ShardFile | None) -> int:
        """Write a shard tensor by tensor; where its tensors begin."""
        old_places = {} if base is None else {key: at for key, _, at in base.places()}
        old_file = (
            None
            if base is None or self.current is None
            else np.memmap(os.path.join(self.current.folder, base.file), dtype=np.uint8, mode="r")
        )
        header = safetensors_header([entry.key for entry in frame.entries])
        with open(path, "xb") as file:
            file.write(header)
            for entry, payload in zip(frame.entries, frame.payloads, strict=True):
                old = None
                if entry.encoding != WHOLE:
                    if old_file is None or entry.key not in old_places:
                        raise NotInStepError(
                            f"{_where(frame.place)}, {entry.key.name}: the version before has no such tensor"
                        )
                    at = old_places[entry.key]
                    old = old_file[at : at + entry.key.num_bytes]
                try:
                    _write_tensor(file, entry, payload, old)
                except DeltaError as error:
                    raise DeltaError(f"{_where(frame.place)}, {entry.key.name}: {error}") from None
        return len(header)

    def _newest(self) -> Version | None:
        """The newest version whose bytes are what its manifest says; everything else is removed."""
        shutil.rmtree(self._staging, ignore_errors=True)
        folders = []
        for name in os.listdir(self.directory):
            match = _VERSION_FOLDER.fullmatch(name)
            if match:
                folders.append((int(match[1]), os.path.join(self.directory, name)))
        for _, folder in sorted(folders, reverse=True):
            try:
                version = read_version(folder)
                check_version(version)
            except (OSError, ValueError, KeyError, TypeError, DeltaError) as error:
                logger.warning("%s is not used: %s: %s", folder, type(error).__name__, error)
                shutil.rmtree(folder, ignore_errors=True)
                continue
            self._remove_others(folder)
            return version
        return None

    def _remove_others(self, keep: str) -> None:
        for name in os.listdir(self.directory):
            path = os.path.join(self.directory, name)
            if _VERSION_FOLDER.fullmatch(name) and path != keep:
                shutil.rmtree(path, ignore_errors=True)


def _where(place: FramePlace) -> str:
    return f"version {place.version}, source {place.source}, shard {place.shard}"


def _write_tensor(file: BinaryIO, entry: FrameTensor, payload: memoryview, old: np.ndarray | None) -> None:
    if old is not None:
        actual = digest(old)
        if actual != entry.before:
            raise DeltaError(f"before the change its digest is {actual.hex()}, it must be {entry.before.hex()}")
    hasher = xxhash.xxh3_128()
    for chunk in _new_chunks(entry, payload, old):
        hasher.update(chunk.data)
        file.write(chunk.data)
    if hasher.digest() != entry.after:
        raise DeltaError(f"after the change its digest is {hasher.hexdigest()}, it must be {entry.after.hex()}")


def _new_chunks(entry: FrameTensor, payload: memoryview, old: np.ndarray | None) -> Iterator[np.ndarray]:
    if entry.encoding != SAME:
        yield from decode(
            payload, old, num_bytes=entry.key.num_bytes, itemsize=ITEM_BYTES[entry.key.dtype], encoding=entry.encoding
        )
        return
    assert old is not None, "only a whole tensor needs no earlier one"
    if len(payload):
        raise DeltaError(f"{len(payload)} bytes of a change, though nothing changed")
    for start in range(0, len(old), _CHUNK_BYTES):
        yield np.asarray(old[start : start + _CHUNK_BYTES])
