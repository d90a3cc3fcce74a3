"""What the doctor reads in a run directory."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from slime_like.errors import DataError
from slime_like.observability.doctor.evidence import gather, without_secrets


def run_directory(folder: Path, *, began: float, done: int = 2, num_rollout: int = 5) -> Path:
    """A run of `num_rollout` rollouts that began then: a second for each step."""
    (folder / "logs").mkdir(parents=True)
    config = {"data": {"num_rollout": num_rollout}, "checkpoint": {"save": None}, "engine": {"max_engine_restarts": 3}}
    (folder / "config.json").write_text(json.dumps(config))
    os.utime(folder / "config.json", (began, began))
    lines = [{"kind": "step", "step": step, "time": began + step + 1.0} for step in range(done)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"kind": "st')
    return folder


def test_a_run_of_which_two_steps_are_done(tmp_path):
    began = time.time() - 100
    evidence = gather(str(run_directory(tmp_path / "run", began=began)))
    assert (evidence.num_rollout, evidence.num_done, evidence.checkpoints) == (5, 2, ())
    what, when = evidence.last_progress or ("", 0.0)
    assert what == "the step line of step 1 in metrics.jsonl" and when == pytest.approx(began + 2, abs=1e-3)
    assert evidence.longest_gap_s == pytest.approx(1.0, abs=1e-3)
    assert evidence.driver_pid is None and evidence.end is None


def test_the_trace_is_progress_too_and_a_line_cut_short_is_left_out(tmp_path):
    began = time.time() - 100
    run = run_directory(tmp_path / "run", began=began)
    event = {"name": "train", "dur": 3_000_000, "args": {"step": 2, "time": began + 10}}
    (run / "trace.json").write_text(f'[\n{json.dumps(event)},\n{{"name": "sy')
    evidence = gather(str(run))
    assert evidence.last_progress == ("train of step 2", pytest.approx(began + 13, abs=1e-3))
    assert evidence.longest_gap_s == pytest.approx(11.0, abs=1e-3)


def test_what_an_earlier_start_left_is_no_progress_of_this_one(tmp_path):
    run, now = run_directory(tmp_path / "run", began=time.time() - 100), time.time()
    (run / "end.json").write_text(json.dumps({"exit_status": 1, "time": now - 50}))
    os.utime(run / "config.json", (now, now))
    evidence = gather(str(run))
    assert (evidence.num_done, evidence.last_progress, evidence.end) == (2, None, None)


def test_checkpoints_where_the_run_saves_them(tmp_path):
    run = run_directory(tmp_path / "run", began=time.time())
    for name in ("iter_0000002", "iter_0000004", ".iter_0000005.writing", "iter_x"):
        (run / "checkpoints" / name).mkdir(parents=True)
    assert gather(str(run)).checkpoints == (2, 4)


def test_of_a_log_the_lines_that_tell_something_and_each_kind_once(tmp_path):
    run = run_directory(tmp_path / "run", began=time.time())
    said = [
        "all is well",
        "ValueError: 17 is odd",
        *[f"12:00:{n} Error: request {n} is gone" for n in range(30)],
        "bye",
    ]
    (run / "logs/engine-0.log").write_text("\n".join(said) + "\n")
    (run / "logs/actor-0.log").write_text("one\ntwo\nthree\nfour\n")
    (run / "logs/engine-1.log").write_text('"GET /health HTTP/1.1" 200 OK\n' * 12)
    logs = {log.name: log for log in gather(str(run)).logs}
    assert logs["logs/engine-0.log"].lines == ("ValueError: 17 is odd", "12:00:29 Error: request 29 is gone")
    assert logs["logs/actor-0.log"].lines == ("two", "three", "four") and not logs["logs/actor-0.log"].telling
    assert [logs[f"logs/{name}.log"].at_work for name in ("engine-0", "actor-0", "engine-1")] == [True, True, False]


@pytest.mark.parametrize(
    "line",
    [
        "Authorization: Bearer abc-123.def",
        "api_key='abc-123.def'",
        "--api-key abc-123.def",
        "token=abc-123.def",
        "a " + "0f" * 24,
    ],
)
def test_no_key_is_shown(line):
    shown = without_secrets(line)
    assert "***" in shown and "abc-123.def" not in shown and "0f0f" not in shown


def test_an_ordinary_line_stays():
    line = "WeightSyncError: engine 0 at http://127.0.0.1:3000: 12 tokens of model.layers.1 are not what was sent"
    assert without_secrets(line) == line


def test_what_is_no_run_is_refused(tmp_path):
    with pytest.raises(DataError, match="no config.json"):
        gather(str(tmp_path))


def test_files_of_another_shape_are_left_out(tmp_path):
    run = run_directory(tmp_path / "run", began=time.time())
    (run / "config.json").write_text("[1, 2")
    (run / "metrics.jsonl").write_text('[]\n{"step": "x"}\n\xff\n')
    (run / "trace.json").write_text('[\n{"name": 3},\nnull,\n')
    (run / ".lock").write_text("none")
    evidence = gather(str(run))
    assert (evidence.num_rollout, evidence.num_done, evidence.last_progress, evidence.driver_pid) == (
        None,
        0,
        None,
        None,
    )
