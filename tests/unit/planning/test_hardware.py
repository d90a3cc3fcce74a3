"""Cards and rates: what is given, else what the data sheets say."""

from __future__ import annotations

from slime_like.config.placement import PlacementConfig
from slime_like.planning.hardware import CARDS, GIB, bandwidths, card_bytes


def test_memory_of_a_card():
    assert card_bytes(PlacementConfig(gpu_memory_gib=1.5)) == 3 * 2**29
    assert card_bytes(PlacementConfig()) == CARDS["H100"].memory_bytes
    assert 79 * GIB < CARDS["H100"].memory_bytes < 80 * GIB and 140 * GIB < CARDS["H200"].memory_bytes < 141 * GIB


def test_given_rates_replace_the_defaults():
    rates = bandwidths(PlacementConfig(plan_bandwidth=["network=12.5"]))
    assert rates["network"] == 12.5e9
    assert rates["nvlink"] == bandwidths(PlacementConfig())["nvlink"] == 450e9
