"""Metrics land in metrics.jsonl as valid JSON and in TensorBoard, without torch and without delay at start."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time

import numpy as np
import pytest

from slime_like.observability.metrics import MetricsLog, PhaseTimers, covered_seconds, json_metrics, timed
from slime_like.utils.files import RunDirectory, read_json_lines
from slime_like.utils.full_disk import LOST_WRITES
from tests.helpers.full_disks import largest_file


def test_one_line_each_time(tmp_path):
    with MetricsLog(RunDirectory(str(tmp_path)), tensorboard=False) as log:
        log.log("rollout", 3, {"rollout/reward_mean": np.float64(0.5), "rollout/prompts": 4})
        log.log("sync", 3, {"sync/digest": "ab12", "sync/bytes": 10})
    first, second = read_json_lines(tmp_path / "metrics.jsonl")
    assert abs(first.pop("time") - time.time()) < 60
    assert first == {"kind": "rollout", "step": 3, "rollout/reward_mean": 0.5, "rollout/prompts": 4}
    assert second["sync/digest"] == "ab12"
    assert not (tmp_path / "tensorboard").exists()


def test_nan_and_infinity_become_null_and_are_told():
    line = json_metrics({"a": math.nan, "b": -math.inf, "c": 1.0})
    assert line == {"a": None, "b": None, "c": 1.0, "non_finite": {"a": "nan", "b": "-inf"}}
    json.dumps(line, allow_nan=False)


def test_what_is_no_number_is_refused(tmp_path):
    log = MetricsLog(RunDirectory(str(tmp_path)), tensorboard=False)
    with pytest.raises(TypeError, match="metric 'x' is a list"):
        log.log("train", 0, {"x": [1]})
    with pytest.raises(ValueError, match="kind 'trian' is unknown. Known: "):
        log.log("trian", 0, {"x": 1})
    assert not (tmp_path / "metrics.jsonl").exists()


def test_tensorboard_gets_the_numbers(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    with MetricsLog(RunDirectory(str(tmp_path)), tensorboard=True) as log:
        for step in range(3):
            log.log("train", step, {"train/loss": 0.5 * step, "train/note": "text"})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert events.Tags()["scalars"] == ["train/loss"]
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(0, 0.0), (1, 0.5), (2, 1.0)]


def test_neither_torch_nor_matplotlib_is_imported(tmp_path):
    script = (
        "import sys; from slime_like.observability import console, curve, metrics; from slime_like.utils.files import"
        " RunDirectory\nassert not {'tensorboard', 'matplotlib', 'torch'} & set(sys.modules)\nlog ="
        " metrics.MetricsLog(RunDirectory(sys.argv[1]), True); log.log('train', 0, {'x': 1.0}); log.close()\nassert"
        " 'tensorboard' in sys.modules and 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_time_in_which_phases_overlap_is_counted_once_as_work():
    now = [0.0]
    timers = PhaseTimers(clock=lambda: now[0])
    generating, training = timers.phase("generate"), timers.phase("train")
    for at, act in ((1.0, generating.__enter__), (2.0, training.__enter__)):
        now[0] = at
        act()
    for at, phase in ((5.0, generating), (6.0, training)):
        now[0] = at
        phase.__exit__(None, None, None)
    now[0] = 10.0
    metrics = timers.finish_step()
    assert (metrics["step/generate_seconds"], metrics["step/train_seconds"], metrics["step/seconds"]) == (
        4.0,
        4.0,
        10.0,
    )
    assert metrics["step/overhead_seconds"] == 5.0  # 0 to 1 and 6 to 10


@pytest.mark.parametrize(
    ("spans", "seconds"), [([], 0), ([(0, 2), (1, 3), (5, 6)], 4), ([(0, 9), (1, 2)], 9), ([(3, 4), (1, 3)], 3)]
)
def test_covered_seconds(spans, seconds):
    assert covered_seconds(spans) == seconds


def test_phase_timers_add_up():
    timers = PhaseTimers()
    for name in ("generate", "train", "generate"):
        with timers.phase(name):
            time.sleep(0.02)
    with pytest.raises(ZeroDivisionError), timers.phase("save"):
        time.sleep(0.02)
        raise ZeroDivisionError
    assert timers.seconds("generate") >= 0.04 and timers.seconds("sync") == 0
    metrics = timers.finish_step()
    assert set(metrics) == {
        "step/generate_seconds",
        "step/train_seconds",
        "step/save_seconds",
        "step/seconds",
        "step/overhead_seconds",
    }
    expected = metrics["step/seconds"] - metrics["step/generate_seconds"] - metrics["step/train_seconds"]
    assert metrics["step/overhead_seconds"] == pytest.approx(expected) and metrics["step/overhead_seconds"] >= 0.02
    assert timers.finish_step().keys() == {"step/seconds", "step/overhead_seconds"}


def test_a_part_is_timed_also_when_it_fails():
    seconds: dict[str, float] = {}
    with timed(seconds, "short"):
        pass
    with pytest.raises(ValueError, match="inside"), timed(seconds, "failed"):
        time.sleep(0.02)
        raise ValueError("inside")
    assert seconds["short"] < 0.02 <= seconds["failed"]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's own thread
def test_a_full_disk_costs_lines_and_not_the_run(tmp_path):
    run, before = RunDirectory(str(tmp_path)), LOST_WRITES.total
    with MetricsLog(run, tensorboard=True) as log:
        log.log("train", 0, {"train/loss": 0.5})
        with largest_file(run.metrics.stat().st_size + 5):
            log.log("train", 1, {"train/loss": 0.4})
        log.log("train", 2, {"train/loss": 0.3})
    assert [line["step"] for line in read_json_lines(run.metrics)] == [0, 2]
    assert LOST_WRITES.total == before + 2  # metrics.jsonl and TensorBoard's file
