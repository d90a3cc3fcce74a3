"""Engines that load asleep: one at a time is paused where they roll, and a shared link takes turns."""

from __future__ import annotations

import pytest

from benchmarks import rolling_syncs
from benchmarks.rolling_syncs import OWN, SHARED, measure


@pytest.mark.slow
def test_what_each_way_costs(monkeypatch):
    monkeypatch.setattr(rolling_syncs, "LOAD_S", 0.25)
    monkeypatch.setattr(rolling_syncs, "REPEATS", 1)
    own = {way: measure(OWN, 2, way) for way in ("together", "rolling")}
    shared = {way: measure(SHARED, 2, way) for way in ("together", "rolling")}
    assert own["together"]["sync_s"] < 0.45 < own["rolling"]["sync_s"]  # 0.25 s, and 0.5 s
    assert 0.5 <= own["together"]["lost_engine_s"] and own["rolling"]["lost_engine_s"] < 0.8  # both twice 0.25 s
    assert shared["together"]["sync_s"] >= 0.45 and shared["together"]["lost_engine_s"] >= 0.9  # both 0.5 s
    assert shared["rolling"]["lost_engine_s"] < 0.8
