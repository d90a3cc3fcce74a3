"""What the doctor makes of what it reads."""

from __future__ import annotations

import dataclasses

import pytest

from slime_like.observability.doctor.evidence import Disk, Evidence, LogEnd
from slime_like.observability.doctor.processes import RunProcess
from slime_like.observability.doctor.verdict import as_text, judge

NOW = 10_000.0
DRIVER = RunProcess(
    pid=7, role="driver", name="train.py", stopped=False, stack=("Phases.sync (slime_like/job/phases.py:9)",)
)
ENGINE = RunProcess(pid=9, role="engine-0", name="sglang::scheduler", stopped=False)
LOG = LogEnd(name="logs/engine-0.log", modified=NOW - 90, lines=("all is well",), telling=False, at_work=False)


def evidence(**changes) -> Evidence:
    """Of a run of 8 rollouts, 3 of them done, with a sign of life 5 s ago and 10 s between them at most."""
    plain = Evidence(
        path="/runs/mine", began=NOW - 300, num_rollout=8, num_done=3, last_progress=("train of step 3", NOW - 5),
        longest_gap_s=10.0, end=None, driver_pid=7, checkpoints=(2,), saves=True,
        logs=(LOG,),
        disks=(Disk(path="/runs/mine", free_bytes=50 << 30, total_bytes=100 << 30),),
        config={"engine": {"max_engine_restarts": 3, "engine_start_timeout_s": 100.0}},
    )  # fmt: skip
    return dataclasses.replace(plain, **changes)


def test_a_run_that_goes_on():
    verdict = judge(evidence(), [DRIVER, ENGINE], driver=7, now=NOW)
    assert (verdict.state, verdict.phase, verdict.step, verdict.seconds_ago) == ("running", "sync", 3, 5.0)
    assert verdict.advice == ()


@pytest.mark.parametrize(
    ("pause", "gap", "state"), [(59, 10, "running"), (61, 10, "hung"), (299, 100, "running"), (301, 100, "hung")]
)
def test_no_progress_for_three_of_its_longest_pauses_is_a_hang(pause, gap, state):
    silent = evidence(last_progress=("sync of step 2", NOW - pause), longest_gap_s=float(gap))
    assert judge(silent, [DRIVER], driver=7, now=NOW).state == state


def test_a_start_may_take_what_the_config_gives_it():
    silent = evidence(last_progress=None, longest_gap_s=0.0, began=NOW - 99)
    assert judge(silent, [DRIVER], driver=7, now=NOW).state == "running"
    assert judge(silent, [DRIVER], driver=7, now=NOW + 2).state == "hung"


def test_engines_that_work_are_slow_and_not_hung():
    log = LogEnd(name="logs/engine-0.log", modified=NOW - 3, lines=("Decode batch",), telling=False, at_work=True)
    slow = evidence(last_progress=("sync of step 2", NOW - 500), logs=(log,))
    verdict = judge(slow, [DRIVER], driver=7, now=NOW)
    assert (verdict.state, verdict.why) == ("running", "logs/engine-0.log is being written")
    idle = dataclasses.replace(log, at_work=False)
    assert judge(dataclasses.replace(slow, logs=(idle,)), [DRIVER], driver=7, now=NOW).state == "hung"


def test_whoever_is_stopped_is_named_at_once():
    stopped = dataclasses.replace(ENGINE, stopped=True, stack=("forward (model.py:1)",))
    verdict = judge(evidence(), [DRIVER, stopped], driver=7, now=NOW)
    assert (verdict.state, verdict.role, verdict.rank, verdict.pid) == ("hung", "engine", 0, 9)
    assert verdict.log_file == "logs/engine-0.log"
    text = as_text(verdict, "runs/mine", 8)
    for words in (
        "HUNG  runs/mine", "stopped, by SIGSTOP or a debugger: engine-0 (process 9, sglang::scheduler)",
        "engine rank 0, process 9", "step 3 of 8, sync", "train of step 3, 5 s ago", "forward (model.py:1)",
        "kill -CONT 9", "kill -KILL its process: engine-0 is replaced", "--resume auto goes on after 2 rollouts",
    ):  # fmt: skip
        assert words in text, text
    assert text.count("\n") < 40, "one screen"


def test_what_the_run_said_itself_when_it_failed():
    end = {
        "role": "actor", "rank": 1, "pid": 77, "phase": "train", "step": 3, "log_file": "logs/actor-1.log",
        "error": {"type": "RunError", "message": "trainer rank 1 died; token=abcdefgh1234"}, "exit_status": 1,
        "last_progress": {"what": "train of step 2", "time": NOW - 3700}, "time": NOW - 10,
    }  # fmt: skip
    verdict = judge(evidence(end=end), [], driver=None, now=NOW)
    assert (verdict.state, verdict.role, verdict.rank, verdict.phase) == ("failed", "actor", 1, "train")
    text = as_text(verdict, "runs/mine", 8)
    assert "RunError: trainer rank 1 died; token=*** (exit status 1)" in text
    assert "train of step 2, 1 h 1 min ago" in text and "logs/actor-1.log" in text


def test_a_driver_that_is_gone_without_a_word_was_killed():
    left = [dataclasses.replace(ENGINE, pid=pid) for pid in (9, 10)]
    verdict = judge(evidence(checkpoints=(), saves=False), left, driver=None, now=NOW)
    assert verdict.state == "killed" and "after 3 of 8 rollouts" in verdict.why
    assert any("starts anew; --save-interval N" in text for text in verdict.advice)
    assert "2 processes of it still run, without a driver: kill 9 10" in verdict.advice


def test_all_rollouts_done_is_done_and_says_little():
    verdict = judge(evidence(num_done=8), [], driver=None, now=NOW)
    assert (verdict.state, verdict.advice) == ("done", ())
    assert "all is well" not in as_text(verdict, "runs/mine", 8)


def test_a_full_disk_is_said_first():
    full = evidence(disks=(Disk(path="/data", free_bytes=2_000_000, total_bytes=100 << 30),))
    verdict = judge(full, [DRIVER], driver=7, now=NOW)
    assert verdict.advice[0].startswith("/data is full: 2 MB are free.")
