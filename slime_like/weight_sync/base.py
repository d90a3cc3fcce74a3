"""The trainer's side of a weight sync starts here: `make_publisher(PublisherOptions(...))` gives the transport that was asked for."""

from __future__ import annotations

from collections.abc import Callable

from slime_like.errors import ConfigError
from slime_like.weight_sync.broadcast import BroadcastPublisher
from slime_like.weight_sync.delta import DeltaPublisher
from slime_like.weight_sync.disk import DiskPublisher
from slime_like.weight_sync.ipc import IpcPublisher
from slime_like.weight_sync.stream import PublisherOptions, SentReport, WeightPublisher, buckets

__all__ = ["PUBLISHERS", "PublisherOptions", "SentReport", "WeightPublisher", "buckets", "make_publisher"]

#: --update-weight-transport -> its publisher; delta is --update-weight-mode delta.
PUBLISHERS: dict[str, Callable[[PublisherOptions], WeightPublisher]] = {
    "ipc": IpcPublisher,
    "broadcast": BroadcastPublisher,
    "disk": DiskPublisher,
    "delta": DeltaPublisher,
}


def make_publisher(options: PublisherOptions) -> WeightPublisher:
    """The publisher of `options.transport`. Raises ConfigError listing the known ones."""
    if options.transport not in PUBLISHERS:
        raise ConfigError([f"--update-weight-transport {options.transport} is unknown. Known: {', '.join(PUBLISHERS)}."])
    return PUBLISHERS[options.transport](options)
