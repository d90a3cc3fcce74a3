"""Weights between processes of one host, for engines that share the trainer's GPUs (--colocate).

Where every engine rank shares its card with a trainer rank (session.PublishOrder.cards), each trainer rank gathers the
whole model and serves the engine ranks on its own card; otherwise the first rank of each pipeline stage sends its share
to all. Two buckets are kept: tensors are copied into one while engines load from the other. One request to each engine
lasts as long (in_engine/intake.py); buckets are announced through a socket. On the host a bucket is a file in shared
memory, which only we can read and which is kept between syncs; to engine ranks on our own GPU it is memory of that GPU,
which they open by its handle (device_ipc), so that no byte leaves the card.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable, Iterable

import torch

from slime_like.errors import WeightSyncError
from slime_like.sglang_backend.client import EngineClient
from slime_like.sglang_backend.shared_memory import drop_shared_directory, make_source_folder, remove_dead_sources
from slime_like.utils.net import is_own_address, url_host
from slime_like.weight_sync.buckets import InSharedMemory, NamedTensor, Proof, PublisherOptions, Reader, SentReport
from slime_like.weight_sync.in_engine.shm_slots import SharedFile
from slime_like.weight_sync.transports import device_ipc
from slime_like.weight_sync.transports.channel import SocketChannel
from slime_like.weight_sync.transports.slots import SLACK_BYTES, BucketSlot, Sending, send_in_slots, slot_bytes

logger = logging.getLogger(__name__)

#: Larger slots gain nothing on the host: a request costs a few milliseconds, and smaller ones stay in the processor's
#: cache.
_HOST_SLOT_BYTES = 64 << 20


class SharedBucketSlot(BucketSlot):
    """A slot whose bytes lie in a file in shared memory."""

    def __init__(self, path: str, shared: InSharedMemory | None = None):
        """shared: what lies in it is not copied."""
        super().__init__()
        self._file, self._shared = SharedFile(path), shared

    def copies(self, tensor: torch.Tensor) -> bool:
        """As BucketSlot.copies: no tensor that engines can map."""
        return self._shared is None or self._shared.start_of(tensor) is None

    def put(self, name: str, tensor: torch.Tensor) -> None:
        """As BucketSlot.put, or a note of where the tensor lies anyway."""
        start = None if self._shared is None else self._shared.start_of(tensor)
        if self._shared is None or start is None:
            super().put(name, tensor)
        else:
            self._enter(name, tensor, start, self._shared.path)

    def reserve(self, size: int) -> None:
        """As BucketSlot.reserve. Raises WeightSyncError where shared memory is full."""
        if size <= self.memory.numel():
            return
        try:
            self.memory = torch.frombuffer(self._file.resize(size + SLACK_BYTES), dtype=torch.uint8)
        except OSError as error:
            folder = os.path.dirname(self._file.path)
            free = shutil.disk_usage(folder).free
            raise WeightSyncError(
                f"{folder}: no room for a bucket of {size} bytes, {free} are free ({error.strerror}). Fix: a smaller"
                " --update-weight-buffer-size, or more shared memory (a container's --shm-size)."
            ) from error

    def shrink(self) -> None:
        """Give the memory back."""
        super().shrink()
        # Another file instead of a shorter one: an engine that still reads after a failure would be ended by what is
        # not there (SIGBUS).
        self._file.close()
        self._file = SharedFile(self._file.path)

    def with_table(self) -> list:
        """Write the table behind the tensors; for the engine: [path, where the table begins, and ends]."""
        start = self.used
        return [self._file.path, start, self.append(json.dumps([entry.row() for entry in self.entries]).encode())]

    def close(self) -> None:
        """Remove the file."""
        self._file.close()


class IpcPublisher:
    """See the module."""

    def __init__(self, options: PublisherOptions):
        self._options = options
        self._clients = [EngineClient(endpoint, timeout_s=options.timeout_s) for endpoint in options.endpoints]
        self._on_device = device_ipc.is_possible(options)
        self._who = f"trainer source {options.source_index}"
        self._directory: str | None = None
        self._slots: list[BucketSlot] = []

    def connect(self) -> None:
        """Make this source's private folder and files. Raises WeightSyncError if an engine is on another host."""
        if self._slots:
            return
        served = {engine for engine, _ in self._options.readers}
        for endpoint in (endpoint for endpoint in self._options.endpoints if endpoint.index in served):
            if not is_own_address(url_host(endpoint.url)):
                raise WeightSyncError(
                    f"engine {endpoint.index} at {endpoint.url} is not on this host, so it cannot read our memory. Fix:"
                    " --update-weight-transport disk."
                )
        remove_dead_sources()
        self._directory = make_source_folder(f"{os.getpid()}-source-{self._options.source_index}-")
        self._slots = [
            device_ipc.DeviceBucketSlot(number)
            if self._on_device
            else SharedBucketSlot(f"{self._directory}/slot-{number}", self._options.shared)
            for number in range(2)
        ]

    def begin(self, version: int) -> None:
        """Nothing to do."""

    def send(self, tensors: Iterable[NamedTensor], version: int, proof: Proof | None = None) -> SentReport:
        """Copy and load bucket by bucket, one while engines load the other."""
        self.connect()
        try:
            return self._send_over_channel(tensors, version, proof)
        finally:
            if self._on_device:  # training needs the memory
                for slot in self._slots:
                    slot.shrink()
                torch.cuda.ipc_collect()  # of what engines have let go of

    def finish(self, version: int) -> None:
        """Nothing to do: engines have loaded what was sent."""

    def abandon(self, version: int) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Remove files and folder."""
        for slot in self._slots:
            if isinstance(slot, SharedBucketSlot):
                slot.close()
        self._slots = []
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            remove_dead_sources()  # of a source of the same run that was killed
            drop_shared_directory()
            self._directory = None

    def _send_over_channel(self, tensors: Iterable[NamedTensor], version: int, proof: Proof | None) -> SentReport:
        options, most = self._options, slot_bytes(self._options.buffer_bytes)
        with SocketChannel(options, self._clients, proof, f"{self._directory}/channel") as channel:

            def send(slot: BucketSlot, number: int) -> None:
                names = [entry.name for entry in slot.entries]
                channel.load(_where(slot), names, f"load bucket {number} of version {version}")

            how = Sending(
                send=send,
                max_bytes=most if self._on_device else min(most, _HOST_SLOT_BYTES),
                who=self._who,
                timeout_s=options.timeout_s,
            )
            report = send_in_slots(tensors, self._slots, how)
            channel.end()
        return report


def _where(slot: BucketSlot) -> Callable[[Reader], dict]:
    """How each reader finds the bucket."""
    if isinstance(slot, device_ipc.DeviceBucketSlot):
        return slot.where
    assert isinstance(slot, SharedBucketSlot), "connect() makes no others"
    where = slot.with_table()
    return lambda _: {"load": where}
