"""Only what changed since the version that each engine's receiver holds (--update-weight-mode delta): for slow links.

    trainer source  --frames over HTTP-->  receiver beside the engine (receiver.py)  --folder-->  the engine's own
    /update_weights_from_disk

A source keeps the version that it sent last in files (not in memory), one for each bucket, and the digest of every
tensor. A receiver that holds exactly this version gets the difference; any other gets everything. What a receiver
refuses is sent once more, whole.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch

from slime_like.errors import WeightSyncError
from slime_like.records import DeltaCount, EngineEndpoint
from slime_like.weight_sync.buckets import (
    NamedTensor,
    Proof,
    PublisherOptions,
    SentReport,
    buckets,
    num_bytes,
    raw_bytes,
)
from slime_like.weight_sync.delta.codec import OVERWRITE, SAME, WHOLE, XOR, digest
from slime_like.weight_sync.delta.frame import (
    ITEM_BYTES,
    NO_DIGEST,
    Change,
    FramePlace,
    TensorKey,
    source_digest,
    write_frame,
)
from slime_like.weight_sync.delta.receiver_client import ReceiverClient, ReceiverError, receivers_of
from slime_like.weight_sync.together import run_together

logger = logging.getLogger(__name__)

#: torch's names of types in safetensors' words.
_DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip

Digests = list[tuple[TensorKey, bytes]]


@dataclasses.dataclass(frozen=True)
class _Base:
    """The version that was sent last, and is in the files."""

    version: int
    shards: list[Digests]

    def digest(self) -> str:
        return source_digest(enumerate(self.shards))


class _Files:
    """The bytes of the base: one file for each bucket, its tensors one after another."""

    def __init__(self, folder: str):
        self._folder = folder

    def clear(self) -> None:
        """Forget what an earlier run left."""
        shutil.rmtree(self._folder, ignore_errors=True)
        os.makedirs(self._folder)

    def read(self, number: int, tensors: Digests) -> Iterator[np.ndarray]:
        """The bytes of each tensor, mapped."""
        data = (
            np.memmap(self._path(number), dtype=np.uint8, mode="r")
            if sum(key.num_bytes for key, _ in tensors)
            else np.zeros(0, np.uint8)
        )
        at = 0
        for key, _ in tensors:
            yield data[at : at + key.num_bytes]
            at += key.num_bytes

    def write(
        self, number: int, bucket: list[tuple[TensorKey, np.ndarray]], before: Digests | None, after: Digests
    ) -> None:
        """Put a bucket in; tensors that `before` holds with the same digest at the same place are in already."""
        in_place = before is not None and [key for key, _ in before] == [key for key, _ in after]
        with open(self._path(number), "r+b" if in_place else "wb") as file:
            for place, (key, data) in enumerate(bucket):
                if in_place and before is not None and before[place] == after[place]:
                    file.seek(key.num_bytes, os.SEEK_CUR)
                else:
                    file.write(data.data)

    def remove(self) -> None:
        """Take no more room."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, number: int) -> str:
        return os.path.join(self._folder, f"bucket-{number:05d}.bin")


class DeltaPublisher:
    """See the module."""

    def __init__(self, options: PublisherOptions):
        if not options.directory:
            raise WeightSyncError("weight deltas need a folder for the version before. Fix: --update-weight-disk-dir.")
        self._options = options
        self._receivers = receivers_of(options.endpoints, options.timeout_s)
        self._files = _Files(os.path.join(os.path.abspath(options.directory), f"source-{options.source_index:03d}"))
        self._base: _Base | None = None
        self._connected = False

    @property
    def _who(self) -> str:
        return f"trainer source {self._options.source_index}"

    def connect(self) -> None:
        """See that every receiver answers and takes our key. Raises ReceiverError or WaitTimeout naming it."""
        if not self._connected:
            self._on_all(list(self._receivers), lambda client: client.state(), "connect for weight sync")
            self._files.clear()
            self._connected = True

    def redirect(self, endpoints: tuple[EngineEndpoint, ...]) -> None:
        """Send to the receivers of these engines from now on. One that has missed versions gets everything."""
        self._options = dataclasses.replace(self._options, endpoints=endpoints)
        self._receivers = receivers_of(endpoints, self._options.timeout_s)

    def begin(self, version: int) -> None:
        """Get every receiver ready for a version."""
        if self._options.source_index == 0:
            self._on_all(list(self._receivers), lambda client: client.begin(version), f"begin version {version}")

    def send(self, tensors: Iterable[NamedTensor], version: int, proof: Proof | None = None) -> SentReport:
        """Send each bucket: the difference to those that have the base, everything to others."""
        self.connect()
        base, self._base = self._base, None  # until all went well the files are neither the old version nor the new
        source = self._options.source_index
        held = self._on_all(list(self._receivers), lambda client: client.state(), "ask for the versions held")
        follow = [
            c
            for c in self._receivers
            if base and held[c.name].version == base.version and held[c.name].sources.get(source) == base.digest()
        ]
        behind = [c for c in self._receivers if c not in follow]
        full, count = set(behind), DeltaCount()
        shards: list[Digests] = []
        num_tensors = total_bytes = 0
        for number, bucket in enumerate(buckets(tensors, self._options.buffer_bytes)):
            num_tensors, total_bytes = (
                num_tensors + len(bucket),
                total_bytes + sum(num_bytes(tensor) for _, tensor in bucket),
            )
            data = [
                (_key(name, tensor), raw_bytes(tensor).cpu().numpy())
                for name, tensor in sorted(bucket, key=lambda item: -item[1].element_size())
            ]
            after: Digests = [(key, digest(content)) for key, content in data]
            before = base.shards[number] if base is not None and number < len(base.shards) else None
            place = FramePlace(version, None if base is None else base.version, source, number)
            whole_to = behind
            if follow:
                counted, refused = self._send_delta(place, data, after, before, follow)
                count, whole_to = count + counted, behind + refused
            if whole_to:
                sent = self._send_whole(place, data, after, whole_to)
                count, full = count if follow else count + DeltaCount(num_bytes=sent), full | set(whole_to)
            self._files.write(number, data, before, after)
            shards.append(after)
        self._base = _Base(version, shards)
        self._on_all(list(self._receivers), functools.partial(self._sent_all, self._base), f"end version {version}")
        engines = frozenset(index for client in full for index in self._receivers[client])
        return SentReport(num_tensors, total_bytes, dataclasses.replace(count, full_engines=engines))

    def finish(self, version: int) -> None:
        """Every source has sent: each receiver makes the version the one that counts."""
        if self._options.source_index == 0:
            self._on_all(list(self._receivers), lambda client: client.commit(version), f"complete version {version}")

    def abandon(self, version: int) -> None:
        """The next version is sent whole; what receivers have of this one they remove when it begins."""
        self._base = None

    def close(self) -> None:
        """Remove the files; receivers keep what they have."""
        self._files.remove()
        self._connected, self._base = False, None

    def _send_delta(
        self,
        place: FramePlace,
        data: list[tuple[TensorKey, np.ndarray]],
        after: Digests,
        before: Digests | None,
        to: list[ReceiverClient],
    ) -> tuple[DeltaCount, list[ReceiverClient]]:
        """Send the difference of one bucket; who refused it, and must get the bucket whole."""
        frame, changed = write_frame(place, self._changes(place.shard, data, after, before))

        def send(client: ReceiverClient) -> str | None:
            try:
                client.send_shard(frame)
            except ReceiverError as error:
                if not error.mendable:
                    raise
                return str(error)
            return None

        answers = self._on_all(to, send, f"send bucket {place.shard} of version {place.version}")
        for why in filter(None, answers.values()):
            logger.warning("%s: %s. The bucket is sent again, whole.", self._who, why)
        num_elements = sum(content.nbytes // ITEM_BYTES[key.dtype] for key, content in data)
        return DeltaCount(num_bytes=len(frame), num_changed=changed, num_elements=num_elements), [
            client for client in to if answers[client.name]
        ]

    def _send_whole(
        self, place: FramePlace, data: list[tuple[TensorKey, np.ndarray]], after: Digests, to: list[ReceiverClient]
    ) -> int:
        """Send all of one bucket; the bytes of it."""
        place = dataclasses.replace(place, base=None)
        changes = (
            Change(key, WHOLE, NO_DIGEST, now, content) for (key, content), (_, now) in zip(data, after, strict=True)
        )
        frame, _ = write_frame(place, changes)
        self._on_all(
            to, lambda client: client.send_shard(frame), f"send bucket {place.shard} of version {place.version} whole"
        )
        return len(frame)

    def _changes(
        self, number: int, data: list[tuple[TensorKey, np.ndarray]], after: Digests, before: Digests | None
    ) -> Iterator[Change]:
        """What became of each tensor since the base.

        Whole where the base has no such tensor, or its file is damaged.
        """
        if before is None or [key for key, _ in before] != [key for key, _ in after]:
            for (key, content), (_, now) in zip(data, after, strict=True):
                yield Change(key, WHOLE, NO_DIGEST, now, content)
            return
        encoding = {"xor": XOR, "overwrite": OVERWRITE}[self._options.delta_encoding]
        for (key, content), (_, now), (_, then), old in zip(
            data, after, before, self._files.read(number, before), strict=True
        ):
            if now == then:
                yield Change(key, SAME, then, now, content)
            elif digest(old) != then:
                logger.warning("%s: the kept copy of %s is damaged; it is sent whole", self._who, key.name)
                yield Change(key, WHOLE, NO_DIGEST, now, content)
            else:
                yield Change(key, encoding, then, now, content, old)

    def _sent_all(self, base: _Base, client: ReceiverClient) -> None:
        options = self._options
        client.finish(
            base.version,
            options.source_index,
            num_sources=options.num_sources,
            num_shards=len(base.shards),
            digest=base.digest(),
        )

    def _on_all(self, clients: Sequence[ReceiverClient], action, phase: str) -> dict:
        tasks = {client.name: functools.partial(action, client) for client in clients}
        return run_together(tasks, timeout_s=self._options.timeout_s, who=self._who, phase=phase)


def _key(name: str, tensor: torch.Tensor) -> TensorKey:
    if tensor.dtype not in _DTYPES:
        raise WeightSyncError(f"{name}: weights of type {tensor.dtype} cannot be sent as deltas")
    return TensorKey(name, _DTYPES[tensor.dtype], tuple(tensor.shape))
