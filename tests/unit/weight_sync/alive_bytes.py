"""Counts the bytes of a weight stream that somebody still holds."""

from __future__ import annotations

import weakref

import torch


class Alive:
    """Bytes of the tensors that a stream has given and that somebody still holds, and the most there ever were, slots
    included.
    """

    def __init__(self, slots):
        self.slots, self.now, self.most = slots, 0, 0

    def stream(self, sizes):
        for number, size in enumerate(sizes):
            tensor = torch.full((size,), number % 251, dtype=torch.uint8)
            self.now += size
            weakref.finalize(tensor, self.gone, size)
            self.count()
            yield f"t{number}", tensor
            self.count()
            del tensor

    def gone(self, size):
        self.now -= size

    def count(self):
        self.most = max(self.most, self.now + sum(slot.memory.numel() for slot in self.slots))
