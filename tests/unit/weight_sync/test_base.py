"""Choosing a transport."""

from __future__ import annotations

import pytest

from slime_like.config.system import TRANSPORTS
from slime_like.errors import ConfigError
from slime_like.weight_sync.base import PUBLISHERS, PublisherOptions, make_publisher


def options(transport: str) -> PublisherOptions:
    return PublisherOptions(transport, (), 0, 1, 1, 1.0, "/nowhere", "127.0.0.1")


def test_every_transport_of_the_flag_has_a_publisher():
    assert set(PUBLISHERS) == {*TRANSPORTS, "delta"}  # a mode of its own
    for transport in TRANSPORTS:
        assert type(make_publisher(options(transport))) is PUBLISHERS[transport]


def test_unknown_transport_lists_the_known_ones():
    with pytest.raises(ConfigError, match="carrier-pigeon is unknown. Known: ipc, broadcast, disk"):
        make_publisher(options("carrier-pigeon"))
