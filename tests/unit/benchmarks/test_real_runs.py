"""Processor seconds by side, read off between samples and of processes that there are."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from benchmarks.real_runs import CASES, ProcessorMeter, run_folder, used_between


def test_what_was_used_between_two_moments():
    samples = [{"time": 0.0, "engine": 0.0}, {"time": 10.0, "engine": 5.0, "trainer": 2.0}]
    samples += [{"time": 20.0, "engine": 5.0, "trainer": 8.0}]
    assert used_between(samples, 2.0, 4.0) == pytest.approx({"engine": 1.0, "trainer": 0.4})
    assert used_between(samples, 5.0, 15.0) == pytest.approx({"engine": 2.5, "trainer": 4.0})
    assert used_between(samples, 0.0, 99.0) == pytest.approx({"engine": 5.0, "trainer": 8.0})


@pytest.mark.slow
def test_a_process_that_works_is_counted_with_its_side():
    work = "import time\nwhile time.process_time() < 1: pass\ntime.sleep(60)  # train.py"
    process = subprocess.Popen([sys.executable, "-c", work])
    try:
        meter, deadline = ProcessorMeter(process.pid), time.monotonic() + 30
        while time.monotonic() < deadline and not (meter._samples and meter._samples[-1].get("driver", 0.0) >= 0.9):
            time.sleep(0.1)
        samples = meter.stop()
    finally:
        process.kill()
        process.wait()
    assert 0.9 <= samples[-1]["driver"] < 2.0 and set(samples[-1]) == {"time", "host", "driver"}
    assert samples[-1]["host"] - samples[0]["host"] >= samples[-1]["driver"] - samples[0]["driver"] - 0.1


def test_each_run_has_a_folder_of_its_own(tmp_path):
    assert run_folder(CASES["engine longer"], "full, 1", tmp_path) == tmp_path / "engine-longer-full-1"
