"""Weights between processes of one host, for engines that share the trainer's GPUs (--colocate).

Two files in shared memory, which only we can read, are kept between buckets and syncs: tensors are copied into one while engines load from
the other (shm_slots, shm_loader). A trainer on a GPU whose only engine sees that GPU sends CUDA IPC handles instead, so that the bytes
stay on the device (device_ipc); with several engines or pipeline stages the host's memory is in between.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable

import torch

from slime_like.errors import WeightSyncError
from slime_like.sglang_backend.client import EngineClient
from slime_like.sglang_backend.shared_memory import WEIGHT_LOADER, drop_shared_directory, make_shared_directory
from slime_like.utils.net import is_own_address, url_host
from slime_like.weight_sync import device_ipc
from slime_like.weight_sync.receipt import loader_request
from slime_like.weight_sync.shm_loader import SLOT_NAME
from slime_like.weight_sync.shm_slots import SharedFile, request
from slime_like.weight_sync.slots import SLACK_BYTES, Sending, Slot, send_in_slots, slot_bytes
from slime_like.weight_sync.stream import NamedTensor, PublisherOptions, SentReport
from slime_like.weight_sync.together import run_together

logger = logging.getLogger(__name__)

#: Larger slots gain nothing on the host: a request costs a few milliseconds, and smaller ones stay in the processor's cache.
_HOST_SLOT_BYTES = 32 << 20


class SharedSlot(Slot):
    """A slot whose bytes lie in a file in shared memory."""

    def __init__(self, path: str):
        super().__init__()
        self._file = SharedFile(path)

    def reserve(self, size: int) -> None:
        """As Slot.reserve. Raises WeightSyncError where shared memory is full."""
        if size <= self.memory.numel():
            return
        try:
            self.memory = torch.frombuffer(self._file.resize(size + SLACK_BYTES), dtype=torch.uint8)
        except OSError as error:
            folder = os.path.dirname(self._file.path)
            free = shutil.disk_usage(folder).free
            raise WeightSyncError(
                f"{folder}: no room for a bucket of {size} bytes, {free} are free ({error.strerror}). Fix: a smaller --update-weight-buffer-size, "
                "or more shared memory (a container's --shm-size)."
            ) from error

    def shrink(self) -> None:
        """Give the memory back."""
        super().shrink()
        # Another file instead of a shorter one: an engine that still reads after a failure would be ended by what is not there (SIGBUS).
        self._file.close()
        self._file = SharedFile(self._file.path)

    def with_table(self) -> bytes:
        """Write the table behind the tensors; what an engine is to be told."""
        table = json.dumps([[entry.name, entry.dtype, entry.shape, entry.start, entry.stop] for entry in self.entries]).encode()
        stop = self.used + len(table)
        self.reserve(stop)
        self.memory[self.used : stop] = torch.frombuffer(bytearray(table), dtype=torch.uint8)
        return request(self._file.path, self.used, stop)

    def close(self) -> None:
        """Remove the file."""
        self._file.close()


class IpcPublisher:
    """See the module."""

    def __init__(self, options: PublisherOptions):
        self._options = options
        self._clients = [EngineClient(endpoint, timeout_s=options.timeout_s) for endpoint in options.endpoints]
        self._on_device = device_ipc.is_possible(options)
        self._directory: str | None = None
        self._slots: list[Slot] = []

    def connect(self) -> None:
        """Make this source's private folder and files. Raises WeightSyncError if an engine is on another host."""
        if self._slots:
            return
        for endpoint in self._options.endpoints:
            if not is_own_address(url_host(endpoint.url)):
                raise WeightSyncError(
                    f"engine {endpoint.index} at {endpoint.url} is not on this host, so it cannot read our memory. Fix: --update-weight-transport disk."
                )
        if self._on_device:
            self._slots = [Slot("cuda"), Slot("cuda")]
            return
        root = make_shared_directory()
        _remove_dead(root)
        self._directory = tempfile.mkdtemp(prefix=f"{os.getpid()}-source-{self._options.source_index}-", dir=root)
        self._slots = [SharedSlot(f"{self._directory}/slot-{number}") for number in range(2)]

    def begin(self, version: int) -> None:
        """Nothing to do."""

    def send(self, tensors: Iterable[NamedTensor], version: int) -> SentReport:
        """Copy and load bucket by bucket, one while engines load the other."""
        self.connect()
        options, most = self._options, slot_bytes(self._options.buffer_bytes)
        load = self._load_on_device if self._on_device else self._load
        how = Sending(
            send=lambda slot, number: load(slot, f"load bucket {number} of version {version}"),
            max_bytes=most if self._on_device else min(most, _HOST_SLOT_BYTES),
            who=f"trainer source {options.source_index}",
            timeout_s=options.timeout_s,
        )
        try:
            return send_in_slots(tensors, self._slots, how)
        finally:
            if self._on_device:  # training needs the memory
                for slot in self._slots:
                    slot.shrink()

    def finish(self, version: int) -> None:
        """Nothing to do: engines have loaded what was sent."""

    def abandon(self, version: int) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Remove files and folder."""
        for slot in self._slots:
            if isinstance(slot, SharedSlot):
                slot.close()
        self._slots = []
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            drop_shared_directory()
            self._directory = None

    def _load(self, slot: Slot, phase: str) -> None:
        assert isinstance(slot, SharedSlot)
        told = slot.with_table()
        self._on_all(lambda client: loader_request(SLOT_NAME, [told] * client.endpoint.tp_size), WEIGHT_LOADER, phase)

    def _load_on_device(self, slot: Slot, phase: str) -> None:
        text = device_ipc.handle_of(slot)
        self._on_all(lambda client: [text] * client.endpoint.tp_size, device_ipc.LOAD_FORMAT, phase)

    def _on_all(self, body: Callable[[EngineClient], list[str]], load_format: str, phase: str) -> None:
        timeout_s = self._options.timeout_s
        tasks = {
            f"engine {client.endpoint.index} at {client.url}": functools.partial(
                client.update_weights_from_tensor, body(client), load_format=load_format, timeout_s=timeout_s
            )
            for client in self._clients
        }
        run_together(tasks, timeout_s=timeout_s, who=f"trainer source {self._options.source_index}", phase=phase)


def _remove_dead(root: str) -> None:
    """Remove the folders of processes that were killed: shared memory is memory until the machine restarts."""
    for name in os.listdir(root):
        pid = name.partition("-")[0]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            shutil.rmtree(os.path.join(root, name), ignore_errors=True)
