"""The benchmark's arithmetic, by hand."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest


@pytest.fixture
def bench(repo_root: Path, monkeypatch: pytest.MonkeyPatch) -> dict:
    monkeypatch.setattr(sys, "path", list(sys.path))  # the script adds to it
    return runpy.run_path(str(repo_root / "benchmarks" / "weight_sync.py"))


def times(bench: dict, *, send: float, load: float, verify: float):
    return bench["SyncTimes"](
        begin_s=0.5,
        send_s=send,
        load_s=load,
        verify_s=verify,
        finish_s=0.5,
        source_s=0.25,
        hash_s=0.25,
        copy_s=0.25,
        receipt_s=0.0,
        engine_s=1.0,
        requests=9.0,
        http_bytes=10.0,
    )


def test_shares_are_of_the_paired_repeats(bench: dict):
    plain = [
        times(bench, send=2.0, load=2.0, verify=0.0),
        times(bench, send=4.0, load=4.0, verify=0.0),
        times(bench, send=1.0, load=1.0, verify=0.0),
    ]
    proven = [
        times(bench, send=2.0, load=2.0, verify=1.0),
        times(bench, send=4.0, load=5.0, verify=0.0),
        times(bench, send=1.0, load=1.0, verify=3.0),
    ]
    row = bench["summary"]("disk", 8_000_000, plain, proven, [3.0, 2.0, 1.0])
    assert row["share_of_bound"] == 0.5  # the median of 3/4, 2/8 and 1/2
    assert row["receipt_s"] == 1.0  # of 1, 1 and 3
    assert row["receipt_share"] == pytest.approx(1 / 6)  # of 1/6, 1/10 and 3/6
    assert row["bytes_per_second"] == 2_000_000
    assert row["without_receipt_s"]["total_s"] == 5.0 and row["with_receipt_s"]["total_s"] == 6.0


def test_the_table_says_where_a_goal_is_missed(bench: dict):
    plain, proven = [times(bench, send=2.0, load=2.0, verify=0.0)], [times(bench, send=2.0, load=2.0, verify=1.0)]
    rows = [bench["summary"](transport, 8_000_000, plain, proven, [2.4]) for transport in ("ipc", "broadcast", "disk")]
    result = {
        "bytes": 8_000_000,
        "tensors": 3,
        "bounds_s": {"memcpy": 2.4, "socket": 2.4, "disk": 2.4},
        "probe_s": 0.1,
        "empty_request_s": 0.01,
        "transports": rows,
    }
    cells = {line.split(" | ")[1]: line for line in bench["table"]([result])[2:5]}
    assert (
        "**60%** | 50% met" in cells["ipc"]
        and "**60%** | 50% met" in cells["broadcast"]
        and "**60%** | 70% MISSED" in cells["disk"]
    )
    assert "16.7% MISSED" in cells["ipc"]
