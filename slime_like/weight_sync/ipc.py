"""Weights between processes of one host, for engines that share the trainer's GPUs (--colocate).

Each bucket is written once into shared memory as a safetensors file that only we can read; every engine gets its path and loads it in
place (shm_loader), then the file is removed. On a GPU host this is correct too, but goes through the host's memory: CUDA IPC handles,
which would leave the bytes on the device, come later.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import os
import pickle
import shutil
import tempfile
from collections.abc import Iterable

import torch
from safetensors.torch import save_file

from slime_like.errors import WeightSyncError
from slime_like.records import EngineEndpoint
from slime_like.sglang_backend.client import EngineClient
from slime_like.sglang_backend.shared_memory import WEIGHT_LOADER, drop_shared_directory, make_shared_directory
from slime_like.utils.net import is_own_address, url_host
from slime_like.weight_sync.shm_loader import PATH_NAME
from slime_like.weight_sync.stream import Digest, NamedTensor, PublisherOptions, SentReport, buckets
from slime_like.weight_sync.together import run_together


class IpcPublisher:
    """See the module."""

    def __init__(self, options: PublisherOptions):
        self._options = options
        self._clients = [EngineClient(endpoint, timeout_s=options.timeout_s) for endpoint in options.endpoints]
        self._directory: str | None = None

    def connect(self) -> None:
        """Make this source's private folder. Raises WeightSyncError if an engine is on another host."""
        if self._directory is not None:
            return
        for endpoint in self._options.endpoints:
            if not is_own_address(url_host(endpoint.url)):
                raise WeightSyncError(
                    f"engine {endpoint.index} at {endpoint.url} is not on this host, so it cannot read our shared memory. Fix: --update-weight-transport disk."
                )
        root = make_shared_directory()
        _remove_dead(root)
        self._directory = tempfile.mkdtemp(prefix=f"{os.getpid()}-source-{self._options.source_index}-", dir=root)

    def send(self, tensors: Iterable[NamedTensor], version: int) -> SentReport:
        """Write and load bucket by bucket; at most one lies in shared memory at a time."""
        self.connect()
        digest = Digest()
        for number, bucket in enumerate(buckets(tensors, self._options.buffer_bytes)):
            path = f"{self._directory}/version-{version}-{number}.safetensors"
            try:
                # clone: safetensors refuses tensors that share memory, as views of one flat buffer do.
                save_file({name: tensor.detach().cpu().clone(memory_format=torch.contiguous_format) for name, tensor in bucket}, path)
                for name, tensor in bucket:
                    digest.add(name, tensor)
                self._load(path, f"bucket {number} of version {version}")
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
        return digest.report()

    def close(self) -> None:
        """Remove the folder."""
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            drop_shared_directory()
            self._directory = None

    def _load(self, path: str, what: str) -> None:
        timeout_s = self._options.timeout_s

        def load_on(client: EngineClient) -> None:
            client.update_weights_from_tensor(_request(path, client.endpoint), load_format=WEIGHT_LOADER, timeout_s=timeout_s)

        tasks = {f"engine {client.endpoint.index} at {client.url}": functools.partial(load_on, client) for client in self._clients}
        run_together(tasks, timeout_s=timeout_s, who=f"trainer source {self._options.source_index}", phase=f"load {what}")


def _remove_dead(root: str) -> None:
    """Remove the folders of processes that were killed: shared memory is memory until the machine restarts."""
    for name in os.listdir(root):
        pid = name.partition("-")[0]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            shutil.rmtree(os.path.join(root, name), ignore_errors=True)


def _request(path: str, endpoint: EngineEndpoint) -> list[str]:
    """The path in the form of SGLang's update_weights_from_tensor: one pickled list of named tensors per rank, base64."""
    named = [(PATH_NAME, torch.tensor(list(path.encode()), dtype=torch.uint8))]
    return [base64.b64encode(pickle.dumps(named)).decode()] * endpoint.tp_size
