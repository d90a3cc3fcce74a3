"""The collector's thresholds are raised, never lowered, and garbage is still collected."""

from __future__ import annotations

import gc
import weakref

import pytest

from slime_like.utils.garbage import collect_seldom


@pytest.fixture(autouse=True)
def thresholds_as_before():
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


def test_thresholds_are_raised_and_longer_ones_stay():
    gc.set_threshold(700, 10, 10)
    collect_seldom()
    assert gc.get_threshold() == (10_000, 20, 20)
    gc.set_threshold(50_000, 10, 100)
    collect_seldom()
    assert gc.get_threshold() == (50_000, 20, 100)


def test_what_refers_to_itself_is_still_freed():
    class Node:
        pass

    collect_seldom()
    node = Node()
    node.itself = node
    gone = weakref.ref(node)
    del node
    kept = [[] for _ in range(25_000)]
    assert gone() is None and len(kept) == 25_000
