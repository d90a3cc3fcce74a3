"""Bundles in the order of machines and GPUs, whatever order Ray gave them in."""

import random

from slime_like.cluster.bundles import Slot, slot_sort_key


def ordered(*places):
    slots = [Slot(i, address, address, gpu) for i, (address, gpu) in enumerate(places)]
    random.Random(0).shuffle(slots)
    return [(s.address, s.gpu_id) for s in sorted(slots, key=slot_sort_key)]


def test_ipv4_addresses_sort_as_numbers():
    places = [("10.0.0.9", "0"), ("10.0.0.10", "0"), ("10.0.1.1", "0")]
    assert ordered(*places) == places


def test_gpu_ids_sort_as_numbers():
    places = [("10.0.0.1", "2"), ("10.0.0.1", "10"), ("10.0.0.2", "0")]
    assert ordered(*places) == places


def test_ipv6_after_ipv4_and_names_last():
    places = [("10.0.0.1", "0"), ("fd00::9", "0"), ("fd00::10", "0"), ("host-a", "0"), ("host-b", "0")]
    assert ordered(*places) == places


def test_gpu_names_sort_after_numbers():
    places = [("10.0.0.1", "1"), ("10.0.0.1", "MIG-a"), ("10.0.0.1", "MIG-b")]
    assert ordered(*places) == places
