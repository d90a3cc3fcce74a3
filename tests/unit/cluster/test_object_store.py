"""What is put into Ray's store, and a store that takes nothing."""

from __future__ import annotations

import threading

import pytest

from slime_like.cluster import object_store
from slime_like.errors import WaitTimeout


def test_what_the_store_takes_is_given_back(monkeypatch):
    monkeypatch.setattr(object_store.ray, "put", lambda value: ("ref", value))
    assert object_store.put([1], seconds=5.0, phase="train") == ("ref", [1])


def test_a_store_that_takes_nothing_is_named_in_time(monkeypatch):
    stopped = threading.Event()
    monkeypatch.setattr(object_store.ray, "put", lambda value: stopped.wait())
    with pytest.raises(WaitTimeout, match="Ray's node process on this machine.*during sending samples.*took no object"):
        object_store.put([1], seconds=0.05, phase="sending samples")
    stopped.set()


def test_an_error_of_the_store_is_raised(monkeypatch):
    def full(value):
        raise MemoryError("no room")

    monkeypatch.setattr(object_store.ray, "put", full)
    with pytest.raises(MemoryError, match="no room"):
        object_store.put([1], seconds=5.0, phase="train")
