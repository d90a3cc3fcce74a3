"""Which address of this machine the engines are told to connect to."""

from __future__ import annotations

import socket

from slime_like.utils.net import own_address
from slime_like.weight_sync.sender import source_address


def test_engines_here_are_told_the_runs_own_address():
    assert source_address(["http://127.0.0.1:1", "http://localhost:2"], "127.0.0.1") == "127.0.0.1"
    assert source_address(["http://[::1]:1"], "127.0.0.1") == "127.0.0.1"
    assert source_address([], "::1") == "::1"


def test_one_engine_elsewhere_is_told_an_address_that_it_can_reach():
    """A route is looked up, nothing is sent: 192.0.2.77 is an address of documentation (RFC 5737)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.77", 9))
            expected = probe.getsockname()[0]
        except OSError:  # a machine without any network
            expected = "127.0.0.1"
    assert source_address(["http://127.0.0.1:1", "https://192.0.2.77:2"], "127.0.0.1") == expected == own_address("192.0.2.77")
