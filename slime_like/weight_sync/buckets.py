"""What every transport has in common: the publisher protocol, which tensors may share a bucket, and the digest of what
was sent.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator
from typing import Protocol, runtime_checkable

import torch
import xxhash

from slime_like.records import DeltaCount, EngineEndpoint
from slime_like.weight_sync.in_engine.receipt import host_digest, read_digests, weighted_sum
from slime_like.weight_sync.transports.sources import Sources

NamedTensor = tuple[str, torch.Tensor]
#: One rank of one engine: (engine's index, rank).
Reader = tuple[int, int]

#: A tensor's alignment in a piece of memory of several: torch's own.
_ALIGNMENT_BYTES = 64
#: A bucket may have so many times as many bytes of what is not copied. An engine needs 2 ms for each bucket, whatever
#: is in it (SGLang 0.5.23 lists all its parameters anew), in which it could load 20 MB.
_MAPPED_PART = 4
_EXPERT = re.compile(r"\.experts\.\d+\.")
#: SGLang fuses these two while it loads, and forgets the first one if the second is not in the same request (0.5.23,
#: cached_a_proj).
_WAITING, _AWAITED = ".self_attn.q_a_proj.", ".self_attn.kv_a_proj_with_mqa."


class InSharedMemory(Protocol):
    """A file that engines map, in which tensors may lie (shared_weights.SharedWeights)."""

    @property
    def path(self) -> str:
        """Of the file."""

    def start_of(self, tensor: torch.Tensor) -> int | None:
        """Where in the file a tensor's bytes lie one behind the other; None if they do not."""


@dataclasses.dataclass(frozen=True)
class PublisherOptions:
    """Where one trainer source sends to. There is one source per pipeline stage; they send at the same time.

    With the disk transport a stage has `num_writers` of them, which all see the same tensors, and each writes its
    share. With `cards` (session.PublishOrder) there is one source per trainer rank, and each sends everything to the
    engine ranks on its own card.
    """

    transport: str  # ipc, broadcast or disk
    endpoints: tuple[EngineEndpoint, ...]
    source_index: int
    num_sources: int
    buffer_bytes: int  # of one bucket
    timeout_s: float
    directory: str | None  # root folder of the disk transport
    address: str  # of this process's host, as the engines see it
    interface: str | None = None  # whose connections the broadcast transport uses; None: the one that holds `address`
    sources: Sources | None = None  # of the ipc and broadcast transports with several sources
    writer_index: int = 0
    num_writers: int = 1
    keep_files: bool = False  # of the disk transport: older versions stay
    delta_encoding: str = "xor"  # of deltas: xor or overwrite
    adapter_config: dict | None = None  # of adapters: PEFT's
    shared: InSharedMemory | None = None  # of the ipc transport: where tensors lie that need not be copied
    cards: tuple[tuple[int, ...], ...] = ()  # of each endpoint, of each of its ranks: the source on its card

    @property
    def source_of(self) -> dict[Reader, int] | None:
        """Whom each rank of each engine gets everything from; None: from every source a share."""
        if not self.cards:
            return None
        return {
            (endpoint.index, rank): source
            for endpoint, sources in zip(self.endpoints, self.cards, strict=True)
            for rank, source in enumerate(sources)
        }

    @property
    def readers(self) -> tuple[Reader, ...]:
        """All that this source sends to."""
        source_of = self.source_of
        return tuple(
            (endpoint.index, rank)
            for endpoint in self.endpoints
            for rank in range(endpoint.tp_size)
            if source_of is None or source_of[endpoint.index, rank] == self.source_index
        )


@dataclasses.dataclass(frozen=True)
class SentReport:
    """What one source sent."""

    num_tensors: int
    num_bytes: int
    delta: DeltaCount | None = None


class Proof(Protocol):
    """What a publisher that streams asks engines to digest (receipt.Receipt)."""

    def layout_number(self, engine: int) -> int | None:
        """Which of the lists that `entries` gives is for this engine; None: none."""

    def entries(self, names: Iterable[str]) -> list[list[list[list]]]:
        """Of each layout, of each of its ranks: what to digest once these tensors are loaded."""

    def heard(self, engine: int, rank: int, digest: str) -> None:
        """What a rank of an engine said of all that it was asked."""


class WeightPublisher(Protocol):
    """Sends one source's tensors to all engines, between EngineSide.begin and finish (session)."""

    def connect(self) -> None:
        """Get ready; may be called again and then does nothing. Sources connect one after another."""

    def begin(self, version: int) -> None:
        """Before any source sends.

        Sources begin, send and finish at the same time, but none before all have done what comes before.
        """

    def send(self, tensors: Iterable[NamedTensor], version: int, proof: Proof | None = None) -> SentReport:
        """Send HF-named whole tensors; where the transport can, let engines digest what they load.

        Raises EngineError, WeightSyncError or WaitTimeout.
        """

    def finish(self, version: int) -> None:
        """After every source has sent."""

    def abandon(self, version: int) -> None:
        """After a failure of any source: remove what is left of the version."""

    def close(self) -> None:
        """Let go of everything; harmless when called twice."""


@runtime_checkable
class Redirects(Protocol):
    """A publisher of a transport whose row says `redirects`."""

    def redirect(self, endpoints: tuple[EngineEndpoint, ...]) -> None:
        """Send to these engines from now on."""


def num_bytes(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's elements."""
    return tensor.numel() * tensor.element_size()


def aligned_bytes(tensor: torch.Tensor) -> int:
    """The same, up to where the next tensor may begin."""
    return -(-num_bytes(tensor) // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def is_expert(name: str) -> bool:
    """Whether an HF tensor belongs to one of the routed experts."""
    return _EXPERT.search(name) is not None


class Cutter:
    """Decides where one bucket ends and the next begins.

    A bucket holds at most `max_bytes`, or one tensor that is larger alone. Tensors of experts have buckets of their
    own: an engine with expert parallelism keeps only some of them, and finds in them no other tensor that it must not
    skip. Each tensor begins at a multiple of its element size, since receivers look at the bytes in place, and there
    are no gaps. What need not be copied, since receivers can look at it where it is, takes no room, and counts for
    a part, since they have to be told of each bucket.
    """

    def __init__(self, max_bytes: int):
        self.max_bytes = max_bytes
        self._size = self._copied = 0
        self._kind: bool | None = None  # of the tensors in the bucket; None: it is empty
        self._awaited = ""

    def cuts_before(self, name: str, tensor: torch.Tensor, *, is_copied: bool = True) -> bool:
        """Whether this tensor begins a new bucket; counts it as part of the bucket that it is in."""
        kind, room = is_expert(name), num_bytes(tensor) if is_copied else 0
        size = room if is_copied else num_bytes(tensor) // _MAPPED_PART
        if not name.startswith(self._awaited.partition(".self_attn.")[0]):
            self._awaited = ""  # it never came: a transform renamed it, and SGLang has nothing to fuse either
        cuts = self._kind is not None and not self._awaited
        cuts = cuts and (
            kind is not self._kind
            or self._size + size > self.max_bytes
            or (is_copied and self._copied % tensor.element_size() != 0)
        )
        self._size, self._copied = (size, room) if cuts else (self._size + size, self._copied + room)
        self._kind = kind
        if name == self._awaited:
            self._awaited = ""
        elif _WAITING in name:
            self._awaited = name.replace(_WAITING, _AWAITED)
        return cuts


def buckets(tensors: Iterable[NamedTensor], max_bytes: int) -> Iterator[list[NamedTensor]]:
    """Consecutive tensors in lists, cut as `Cutter` says. Nothing is copied."""
    cutter = Cutter(max_bytes)
    current: list[NamedTensor] = []
    for name, tensor in tensors:
        if cutter.cuts_before(name, tensor):
            yield current
            current = []
        current.append((name, tensor))
    if current:
        yield current


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """[bytes] uint8, a view where the tensor is contiguous."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def content_digest(tensor: torch.Tensor) -> bytes | torch.Tensor:
    """Of a tensor's elements, computed where they are: 8 bytes, xxh3_64, on the host; on a GPU a weighted sum of its
    words, which stays there until in_engine.receipt.read_digests.
    """
    flat = raw_bytes(tensor)
    return weighted_sum(flat) if flat.is_cuda else host_digest(flat)


class Digest:
    """Counts tensors and hashes them: the sum modulo 2**64 of xxh3_64 over (name, dtype, shape, digest of the
    elements), so the order does not matter.
    """

    def __init__(self) -> None:
        self._num_tensors = self._num_bytes = 0
        self._heads: list[str] = []
        self._contents: list[bytes | torch.Tensor] = []

    def add(self, name: str, tensor: torch.Tensor, content: bytes | torch.Tensor | None = None) -> None:
        """Take one tensor in. content: its content_digest, where that is known already."""
        self._heads.append(f"{name}|{str(tensor.dtype).removeprefix('torch.')}|{list(tensor.shape)}|")
        self._contents.append(content_digest(tensor) if content is None else content)
        self._num_tensors += 1
        self._num_bytes += num_bytes(tensor)

    @property
    def value(self) -> int:
        """Of all that was taken in; digests that are on a device are read from it, all at once."""
        total, self._contents = 0, list(read_digests(self._contents))
        for head, content in zip(self._heads, self._contents, strict=True):
            hasher = xxhash.xxh3_64(head.encode())
            hasher.update(content)
            total = (total + hasher.intdigest()) % 2**64
        return total

    def report(self) -> SentReport:
        """What was taken in so far."""
        return SentReport(self._num_tensors, self._num_bytes)
