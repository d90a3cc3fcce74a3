"""The trainer's side of a weight sync starts here: `make_publisher(PublisherOptions(...))` gives the transport that was
asked for.
"""

from __future__ import annotations

import importlib

from slime_like.config.transports import transport_of
from slime_like.weight_sync.buckets import PublisherOptions, SentReport, WeightPublisher, buckets

__all__ = ["PublisherOptions", "SentReport", "WeightPublisher", "buckets", "make_publisher"]


def make_publisher(options: PublisherOptions) -> WeightPublisher:
    """The publisher of `options.transport`. Raises ConfigError listing the known ones."""
    module, _, name = transport_of(options.transport).publisher.partition(":")
    return getattr(importlib.import_module(f"slime_like.weight_sync.{module}"), name)(options)
