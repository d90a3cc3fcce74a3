"""scripts/gpu_check.sh climbs its whole ladder on a host without a GPU, and says so."""

import json
import subprocess

import pytest

from tests.e2e.runs import ROOT, assert_nothing_left, environment, our_processes

pytestmark = [pytest.mark.e2e, pytest.mark.long_run, pytest.mark.timeout(900)]


def test_the_whole_ladder_on_a_pretended_gpu(tmp_path):
    before = our_processes()
    command = ["bash", str(ROOT / "scripts/gpu_check.sh"), "--device", "pretend", "--output", str(tmp_path)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=850)
    rungs = {rung["name"]: rung for rung in json.loads((tmp_path / "gpu_report.json").read_text())["rungs"]}
    assert done.returncode == 0, (tmp_path / "gpu_report.md").read_text()
    skipped = {name for name, rung in rungs.items() if rung["verdict"] == "skipped"}
    assert skipped <= {"driver", "transformer_engine"}
    assert {rung["verdict"] for name, rung in rungs.items() if name not in skipped} == {"passed, pretended"}
    assert all(check["ok"] for rung in rungs.values() for check in rung["checks"])
    assert "**Not on a GPU**" in (tmp_path / "gpu_report.md").read_text()
    assert_nothing_left(before)
