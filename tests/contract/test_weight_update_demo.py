"""scripts/weight_update_demo.py on the smallest model: every method's syncs are proven on a real engine, and what it
writes adds up.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

METHODS = ("ipc", "broadcast", "disk", "delta", "inline")
PARTS = ("begin_s", "send_s", "load_s", "verify_s", "finish_s")


def test_all_methods_side_by_side(repo_root: Path, tmp_path: Path, no_process_left: None):
    picture = tmp_path / "folder" / "demo.png"
    command = [
        sys.executable,
        str(repo_root / "scripts" / "weight_update_demo.py"),
        "--size-mb",
        "1",
        "--repeats",
        "2",
        "--output",
        str(picture),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    report = json.loads(picture.with_suffix(".json").read_text())
    rows = {row["method"]: row for row in report["methods"]}
    assert tuple(rows) == METHODS and all(method in result.stdout for method in METHODS)
    assert 0.8e6 < report["bytes"] < 1.2e6 and set(report["bounds_s"]) == {"memcpy", "socket", "disk"}
    for method, row in rows.items():
        assert row["total_s"] == pytest.approx(sum(row["times"][part] for part in PARTS))
        assert row["share_of_bound"] == pytest.approx(
            report["bounds_s"][row["bound"]] / (row["times"]["send_s"] + row["times"]["load_s"])
        )
        assert len(row["totals_s"]) == 2 and min(row["totals_s"]) > 0 and row["times"]["verify_s"] > 0
        assert (row["times"]["load_s"] > 0.001) == (method in ("disk", "delta"))
    # base64 makes 4 bytes of 3; the others' requests only say where the weights are
    assert 4 / 3 < rows["inline"]["moved_bytes"] / report["bytes"] < 1.6
    assert all(1 < rows[method]["moved_bytes"] / report["bytes"] < 1.1 for method in ("ipc", "broadcast", "disk"))
    # a value near 0.02 that moves by 1e-5 changes some 13 of its 32 bits, and no compression makes those fewer
    assert 13 / 32 < rows["delta"]["moved_bytes"] / report["bytes"] < 0.9
