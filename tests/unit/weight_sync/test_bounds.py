"""What a receipt's share of the bound refers to."""

from __future__ import annotations

import pytest

from slime_like.records import EngineEndpoint
from slime_like.weight_sync.bounds import best_rate
from slime_like.weight_sync.transports.registry import PublisherOptions


def options(transport: str, url: str = "http://127.0.0.1:30000", directory: str | None = None) -> PublisherOptions:
    return PublisherOptions(transport, (EngineEndpoint(index=0, url=url),), 0, 1, 1, 1.0, directory, "127.0.0.1")


@pytest.mark.parametrize("transport", ["ipc", "broadcast", "disk"])
def test_rates_are_those_of_a_machine_and_nothing_is_left(transport, tmp_path):
    rate = best_rate(options(transport, directory=str(tmp_path)))
    assert 1e6 < rate < 1e12
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_known_from_here():
    assert best_rate(options("broadcast", url="http://192.0.2.7:30000")) is None
    assert best_rate(options("delta")) is None
