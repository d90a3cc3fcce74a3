"""Publishers that broadcast to the engines of fake_engines, weights for them, and what has arrived."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from weight_sync.fake_engines import FakeEngine, bits

from slime_like.weight_sync.transports.broadcast import BroadcastPublisher
from slime_like.weight_sync.transports.registry import PublisherOptions
from slime_like.weight_sync.transports.sources import Sources

#: Bytes of --update-weight-buffer-size, of which a slot is half.
BUCKET = 400_000
DEADLINE_S = 30.0
#: What ends by itself ends in a second or two; this leaves a loaded host room and is far from the deadline.
SOON_S = DEADLINE_S / 2


def publisher(
    engines: Iterable[FakeEngine],
    source: int = 0,
    sources: Sources | None = None,
    buffer_bytes: int = BUCKET,
    timeout_s: float = DEADLINE_S,
) -> BroadcastPublisher:
    endpoints = tuple(engine.endpoint for engine in engines)
    options = PublisherOptions(
        "broadcast",
        endpoints,
        source,
        1 if sources is None else 2,
        buffer_bytes,
        timeout_s,
        None,
        "127.0.0.1",
        sources=sources,
    )
    connected = BroadcastPublisher(options)
    connected.connect()
    return connected


def two_publishers(engines: list[FakeEngine], timeout_s: float = DEADLINE_S) -> list[BroadcastPublisher]:
    host = Sources("127.0.0.1", 0, is_host=True, who="trainer source 0", timeout_s=timeout_s)
    other = Sources("127.0.0.1", host.port, is_host=False, who="trainer source 1", timeout_s=timeout_s)
    return [publisher(engines, number, sources, timeout_s=timeout_s) for number, sources in enumerate((host, other))]


def weights(count: int, seed: int = 0, elements: int = 40_000) -> list[tuple[str, torch.Tensor]]:
    """By default each has 160 kB, and is a bucket."""
    generator = torch.Generator().manual_seed(seed)
    return [(f"t{number}", torch.randn(elements, generator=generator)) for number in range(count)]


def ranks_of(engines: Iterable[FakeEngine]) -> list[dict]:
    return [rank for engine in engines for rank in engine.report()["ranks"]]


def assert_all_hold(engines: Iterable[FakeEngine], tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
    expected = {name: bits(tensor) for name, tensor in tensors}
    for rank in ranks_of(engines):
        assert rank["held"] == expected
