"""Ports, addresses, waiting."""

from __future__ import annotations

import os
import socket

import pytest

from slime_like.errors import ConfigError, EngineError, WaitTimeout
from slime_like.utils.net import (
    address_of_interface,
    free_port,
    host_port,
    http_url,
    interface_of,
    is_loopback,
    is_own_address,
    listener_uids,
    own_address,
    port_is_free,
    url_host,
    wait_until,
    with_another_port,
)
from tests.helpers.other_user import UID, needs_root, stranger_listening


def test_free_and_taken_ports():
    port = free_port()
    assert port_is_free("127.0.0.1", port)
    with socket.socket() as server:
        server.bind(("127.0.0.1", port))
        server.listen()
        assert not port_is_free("127.0.0.1", port)


def test_addresses_are_written_with_brackets_where_needed():
    assert host_port("10.0.0.1", 80) == "10.0.0.1:80"
    assert http_url("fd00::1", 80) == "http://[fd00::1]:80"
    assert url_host("http://[fd00::1]:80") == "fd00::1"


def test_own_addresses():
    assert is_loopback("127.0.0.1") and is_loopback("::1") and is_loopback("localhost") and not is_loopback("192.0.2.1")
    assert is_own_address("127.0.0.1") and is_own_address(own_address())
    assert not is_own_address("192.0.2.77")
    assert interface_of("127.0.0.1") == "lo"
    assert interface_of("192.0.2.77") is None


def test_own_address_towards_a_name_and_an_ipv6_peer():
    assert own_address("localhost") in ("127.0.0.1", "::1")
    assert own_address("::1") == "::1"
    assert own_address("no-such-host.invalid") == "127.0.0.1"
    assert interface_of("::1") == "lo" and interface_of("2001:db8::77") is None


def test_wait_until():
    answers = ["not yet", "soon", None]
    wait_until(lambda: answers.pop(0), deadline_s=5, who="a", whom="b", phase="c", interval_s=0.001)
    assert answers == []
    with pytest.raises(WaitTimeout, match="a waited 0 s for b during c. Last heard: never"):
        wait_until(lambda: "never", deadline_s=0.05, who="a", whom="b", phase="c", interval_s=0.01)


def test_a_port_taken_in_between_is_replaced_but_a_chosen_one_is_not():
    failures = ["engine 0 ended with status 3", "router: Address already in use (os error 98)"]

    def launch():
        if failures:
            raise EngineError(failures.pop())
        return "up"

    assert with_another_port(launch, port_given=False) == "up"
    failures = ["Address already in use"]
    with pytest.raises(EngineError, match="in use"):
        with_another_port(launch, port_given=True)
    failures = ["ended with status 1"]
    with pytest.raises(EngineError, match="status 1"):
        with_another_port(launch, port_given=False)


def test_an_interface_and_its_address():
    assert address_of_interface("lo") == "127.0.0.1"
    with pytest.raises(ConfigError, match=r"--update-weight-interface ib7: .* It has: .*lo \(127.0.0.1\)"):
        address_of_interface("ib7")


@needs_root
def test_who_listens_on_a_port():
    with socket.create_server(("127.0.0.1", 0)) as ours, stranger_listening() as (theirs, _):
        assert listener_uids(ours.getsockname()[1]) == {os.geteuid()}
        assert listener_uids(theirs) == {UID}
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as ours:
        assert listener_uids(ours.getsockname()[1]) == {os.geteuid()}
    assert listener_uids(free_port()) == set()
