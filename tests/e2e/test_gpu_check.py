"""scripts/gpu_check.sh climbs its ladder on a host without a GPU, and says so."""

import json
import subprocess

import pytest

from tests.e2e.runs import ROOT, assert_nothing_left, environment, our_processes

pytestmark = pytest.mark.e2e


def climb(folder, *more: str, timeout_s: float) -> dict[str, dict]:
    """The rungs of a whole pretended check, name -> what the report says; none failed."""
    before = our_processes()
    command = ["bash", str(ROOT / "scripts/gpu_check.sh"), "--device", "pretend", "--output", str(folder), *more]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=timeout_s)
    page = (folder / "gpu_report.md").read_text()
    assert done.returncode == 0, page
    assert "**Not on a GPU**" in page
    assert_nothing_left(before)
    return {rung["name"]: rung for rung in json.loads((folder / "gpu_report.json").read_text())["rungs"]}


@pytest.mark.long_run  # train steps on the pretended device: tests/pretend_gpu; the report: tests/unit/scripts
def test_a_train_step_and_what_needs_a_gpu(tmp_path):
    rungs = climb(tmp_path, "--only", "driver,train_step", timeout_s=200)
    assert {name: rung["verdict"] for name, rung in rungs.items()} == {
        "driver": "skipped",
        "train_step": "passed, pretended",
    }
    assert rungs["train_step"]["where"] == "the CPU and a pretended device"


@pytest.mark.long_run
@pytest.mark.timeout(900)
def test_the_whole_ladder(tmp_path):
    rungs = climb(tmp_path, timeout_s=850)
    skipped = {name for name, rung in rungs.items() if rung["verdict"] == "skipped"}
    assert skipped <= {"driver", "transformer_engine"}
    assert {rung["verdict"] for name, rung in rungs.items() if name not in skipped} == {"passed, pretended"}
    assert all(check["ok"] for rung in rungs.values() for check in rung["checks"])
