"""A trainer rank's parameters in shared memory, which engines on its host map: what they load is copied once, by them.

Engines read only while the rank waits in a weight sync, and map the file so that what they write to it stays theirs
(in_engine/shm_slots.py).
"""

from __future__ import annotations

import os
import shutil

import torch

from slime_like.sglang_backend.shared_memory import drop_shared_directory, make_source_folder, remove_dead_sources
from slime_like.weight_sync.buckets import aligned_bytes, num_bytes
from slime_like.weight_sync.in_engine.shm_slots import SharedFile


class SharedWeights:
    """A file of this process's, filled tensor by tensor. Tensors in it are good for as long as they are used, also
    after close().
    """

    def __init__(self, size: int):
        """size: aligned_bytes() of all tensors. Raises OSError where they would take more than half of what is free:
        engines, Ray and buckets need shared memory, too.
        """
        remove_dead_sources()
        self._folder = make_source_folder(f"{os.getpid()}-weights-")
        free = shutil.disk_usage(self._folder).free
        self._file = SharedFile(f"{self._folder}/weights")
        try:
            if 2 * size > free:
                raise OSError(f"{size} bytes would be more than half of the {free} that are free in {self._folder}")
            self._memory = torch.frombuffer(self._file.resize(size), dtype=torch.uint8)
        except OSError:
            self.close()
            raise
        self._used = 0

    @property
    def path(self) -> str:
        """Of the file."""
        return self._file.path

    def take(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same numbers in the file, behind those that it has."""
        start, stop = self._used, self._used + num_bytes(tensor)
        self._used += aligned_bytes(tensor)
        moved = self._memory[start:stop].view(tensor.dtype).view(tensor.shape)
        return moved.copy_(tensor.detach())

    def start_of(self, tensor: torch.Tensor) -> int | None:
        """Where in the file a tensor's bytes lie one behind the other; None if they do not."""
        if tensor.device.type != "cpu" or not tensor.is_contiguous():
            return None
        start = tensor.data_ptr() - self._memory.data_ptr()
        return start if 0 <= start <= self._used - num_bytes(tensor) else None

    def close(self) -> None:
        """Remove the file. Harmless when called twice."""
        self._file.close()
        shutil.rmtree(self._folder, ignore_errors=True)
        drop_shared_directory()
