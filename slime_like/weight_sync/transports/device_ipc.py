"""Buckets that stay on the GPU: each trainer rank gives the engine ranks on its own card CUDA IPC handles of its two
slots, once a sync, and tells them of each bucket where the tensors lie (in_engine/intake.py).
"""

from __future__ import annotations

import torch

from slime_like.weight_sync.buckets import PublisherOptions, Reader
from slime_like.weight_sync.in_engine.devices import handle_of
from slime_like.weight_sync.transports.slots import BucketSlot


def is_possible(options: PublisherOptions) -> bool:
    """Whether engines can open memory of this process's GPU: they are on the same card.

    Other engines see other GPUs only, on which nobody has gathered the weights.
    """
    return bool(options.cards) and torch.cuda.is_available()


class DeviceBucketSlot(BucketSlot):
    """A slot whose bytes lie on this process's GPU, where engines read them in place."""

    def __init__(self, number: int):
        super().__init__(torch.device("cuda", torch.cuda.current_device()))
        self._number = number
        self._opened_by: set[Reader] = set()  # whom this memory was told to

    def reserve(self, size: int) -> None:
        """See BucketSlot; other memory has another handle."""
        before = self.memory
        super().reserve(size)
        if self.memory is not before:
            self._opened_by.clear()

    def shrink(self) -> None:
        """See BucketSlot."""
        super().shrink()
        self._opened_by.clear()

    def where(self, reader: Reader) -> dict:
        """How a reader finds the tensors. The bytes are there, and stay until every reader has answered."""
        self.wait_filled()
        table = [entry.row() for entry in self.entries]
        message: dict = {"slot": self._number, "table": table, "stop": self.used}
        if reader not in self._opened_by:
            message["handle"] = handle_of(self.memory)
            self._opened_by.add(reader)
        return message
