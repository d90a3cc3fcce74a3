"""Stores listen at one address and nowhere else, or not at all."""

from __future__ import annotations

import socket

import psutil
import pytest

from slime_like.utils.net import listen_at
from slime_like.weight_sync.stores import join_store, meet_in_file, serve_store


def addresses() -> set[tuple[str, int]]:
    return {
        (at.laddr.ip, at.laddr.port)
        for at in psutil.Process().net_connections("tcp")
        if at.status == psutil.CONN_LISTEN
    }


def test_a_served_store_is_reached_where_it_listens_only():
    before, listener = addresses(), listen_at("127.0.0.1")
    store = serve_store(listener, timeout_s=5)
    assert addresses() - before == {("127.0.0.1", store.port)}
    other = join_store("127.0.0.1", store.port, timeout_s=5)
    other.set("key", "value")
    assert store.get("key") == b"value"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", store.port), timeout=5)
    del store, other
    assert addresses() == before


def test_a_file_listens_nowhere(tmp_path):
    before = addresses()
    stores = [meet_in_file(str(tmp_path / "store"), world_size=2, timeout_s=0.2) for _ in range(2)]
    stores[0].set("key", "value")
    assert stores[1].get("key") == b"value" and addresses() == before
    with pytest.raises(RuntimeError, match="[Tt]imeout"):
        stores[1].get("none")
    meet_in_file("", world_size=1, timeout_s=1).set("key", "value")  # alone: in memory


def test_an_address_of_another_machine_is_refused():
    with pytest.raises(OSError, match="[Cc]annot assign"):
        listen_at("192.0.2.1")
