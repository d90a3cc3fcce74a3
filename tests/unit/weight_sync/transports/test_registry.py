"""Choosing a transport."""

from __future__ import annotations

import pytest

from slime_like.config.transports import TRANSPORTS
from slime_like.errors import ConfigError
from slime_like.weight_sync.transports.registry import PublisherOptions, make_publisher


def options(transport: str) -> PublisherOptions:
    return PublisherOptions(transport, (), 0, 1, 1, 1.0, "/nowhere", "127.0.0.1")


def test_every_transport_has_a_publisher():
    for name in TRANSPORTS:
        publisher = make_publisher(options(name))
        assert type(publisher).__name__.lower() == f"{name}publisher"
        publisher.close()


def test_unknown_transport_lists_the_known_ones():
    with pytest.raises(ConfigError, match="carrier-pigeon is unknown. Known: ipc, broadcast, disk, delta"):
        make_publisher(options("carrier-pigeon"))
