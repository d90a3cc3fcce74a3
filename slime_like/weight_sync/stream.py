"""What every transport has in common: the publisher protocol, byte-bounded buckets, and the digest of what was sent."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
import xxhash

from slime_like.records import EngineEndpoint

NamedTensor = tuple[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class PublisherOptions:
    """Where one trainer source sends to. There is one source per pipeline stage; they send one after another, 0 first."""

    transport: str  # ipc, broadcast or disk
    endpoints: tuple[EngineEndpoint, ...]
    source_index: int
    num_sources: int
    buffer_bytes: int  # of one bucket
    timeout_s: float
    directory: str | None  # root folder of the disk transport
    address: str  # of this process's host, as the engines see it


@dataclasses.dataclass(frozen=True)
class SentReport:
    """What one source sent. digest: see `Digest`; digests of several sources add up modulo 2**64."""

    num_tensors: int
    num_bytes: int
    digest: int


class WeightPublisher(Protocol):
    """Sends one source's tensors to all engines, between WeightUpdate.begin and finish."""

    def connect(self) -> None:
        """Get ready; may be called again and then does nothing."""

    def send(self, tensors: Iterable[NamedTensor], version: int) -> SentReport:
        """Send HF-named whole tensors. Raises EngineError, WeightSyncError or WaitTimeout."""

    def close(self) -> None:
        """Let go of everything; harmless when called twice."""


def num_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def buckets(tensors: Iterable[NamedTensor], max_bytes: int) -> Iterator[list[NamedTensor]]:
    """Consecutive tensors in lists of at most `max_bytes`; a tensor that is larger alone gets a list of its own. Nothing is copied."""
    current: list[NamedTensor] = []
    size = 0
    for name, tensor in tensors:
        if current and size + num_bytes(tensor) > max_bytes:
            yield current
            current, size = [], 0
        current.append((name, tensor))
        size += num_bytes(tensor)
    if current:
        yield current


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """[bytes] uint8, a view where the tensor is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class Digest:
    """Counts tensors and hashes them: the sum modulo 2**64 of xxh3_64 over (name, dtype, shape, bytes), so the order does not matter.

    A tensor on a GPU is copied to the host for it.
    """

    def __init__(self) -> None:
        self._num_tensors = self._num_bytes = self._sum = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take one tensor in."""
        hasher = xxhash.xxh3_64()
        hasher.update(f"{name}|{str(tensor.dtype).removeprefix('torch.')}|{list(tensor.shape)}|".encode())
        hasher.update(raw_bytes(tensor).cpu().numpy())
        self._num_tensors += 1
        self._num_bytes += num_bytes(tensor)
        self._sum = (self._sum + hasher.intdigest()) % 2**64

    def report(self) -> SentReport:
        """What was taken in so far."""
        return SentReport(self._num_tensors, self._num_bytes, self._sum)
