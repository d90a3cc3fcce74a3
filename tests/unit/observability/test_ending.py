"""The screen at the end of a run, and what it leaves."""

from __future__ import annotations

import json
import os

import pytest

from slime_like.errors import DataError, EngineError, ProcessLost, RunError, WaitTimeout, WeightSyncError
from slime_like.observability.ending import FILE, ending_of, tell_lost_driver
from slime_like.observability.progress import Progress
from slime_like.utils.files import RunDirectory

LATE = WaitTimeout(who="train.py", whom="the trainer", phase="train", seconds=9, last="missing: trainer rank 2")


@pytest.fixture
def run(tmp_path) -> RunDirectory:
    (tmp_path / "logs").mkdir()
    return RunDirectory(str(tmp_path))


def progress() -> Progress:
    return Progress(phase="train", step=3, version=4, last="generate, step 3", last_time=1000.0)


def test_a_lost_rank_is_told_with_all_that_is_known(run, tmp_path):
    (tmp_path / "logs/actor-1.log").write_text("".join(f"line {number}\n" for number in range(40)) + "\n" + "x" * 999)
    error = ProcessLost("trainer rank 1 died during train: The actor died unexpectedly")
    error.who, error.pid = "trainer rank 1", 4711
    os.umask(0o077)
    end = ending_of(error, 1, progress(), run)
    end.write(run)
    kept = json.loads((tmp_path / FILE).read_text())
    assert kept.pop("time") > 1000
    assert kept == {
        "role": "actor", "rank": 1, "pid": 4711, "phase": "train", "step": 3, "version": 4,
        "last_progress": {"what": "generate, step 3", "time": 1000.0},
        "log_file": str(tmp_path / "logs/actor-1.log"),
        "error": {"type": "ProcessLost", "message": "trainer rank 1 died during train: The actor died unexpectedly"},
        "exit_status": 1,
    }  # fmt: skip
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    lines = end.screen(10, "do this").splitlines()
    assert lines[0].split() == ["who", "actor,", "rank", "1,", "process", "4711"]
    assert "train, step 3 (from 0) of 10" in lines[1] and "version 4" in lines[2]
    assert "generate, step 3, " in lines[3] and lines[4].endswith("logs/actor-1.log")
    assert lines[5].endswith("| line 29") and lines[-2].endswith("| " + "x" * 160) and lines[-1].endswith("do this")
    assert len(lines) <= 24, "one screen"


@pytest.mark.parametrize(
    ("error", "role", "rank"),
    [
        (LATE, "actor", 2),
        (RunError("critic rank 0 failed during train: KeyError: 1"), "critic", 0),
        (RunError("reward model rank 3 died during score"), "reward", 3),
        (RunError("reference rank 1 died during score"), "ref", 1),
        (EngineError("engine 5 at http://h:1 ended with status 137"), "engine", 5),
        (EngineError("the router ended with status 1"), "router", 0),
        (WeightSyncError("weight version 3 was sent, but engine 2 at http://h reports 1"), "engine", 2),
        (RunError("no prompt is left"), "driver", 0),
        (DataError("line 3, which trainer rank 0 has read"), "driver", 0),
        (KeyError("bug"), "driver", 0),
        (None, "driver", 0),
    ],
)  # fmt: skip
def test_who_is_to_blame(run, error, role, rank):
    end = ending_of(error, 1, progress(), run)
    assert (end.role, end.rank) == (role, rank)
    assert (end.pid == os.getpid()) == (role == "driver") == (end.log_file is None)
    assert (end.error is None) == (error is None)


def test_a_note_names_the_rank_whose_error_it_is(run):
    error = WeightSyncError("sent no tensor")
    error.add_note("(from trainer rank 1 during weight sync)")
    assert (ending_of(error, 1, progress(), run).role, ending_of(error, 1, progress(), run).rank) == ("actor", 1)


def test_a_tail_that_the_message_has_is_not_printed_twice(run, tmp_path):
    (tmp_path / "logs/engine-0.log").write_text("why it died\n")
    twice = ending_of(EngineError("engine 0 ended with status 1:\nwhy it died"), 1, progress(), run).screen(None, "")
    once = ending_of(EngineError("engine 0 is silent"), 1, progress(), run).screen(None, "")
    assert "why it died" not in twice and "| why it died" in once


def test_a_log_on_another_machine_is_named_all_the_same(run):
    assert "logs/actor-7.log" in ending_of(ProcessLost("trainer rank 7 died"), 1, progress(), run).screen(9, "")


def test_a_driver_that_is_gone_is_told_from_what_it_kept(run, tmp_path):
    states = [progress().to_json()]
    screen = tell_lost_driver(states, [run.path], 99, "the driver was ended by SIGKILL", 137)
    kept = json.loads((tmp_path / FILE).read_text())
    assert (kept["role"], kept["pid"], kept["phase"], kept["exit_status"]) == ("driver", 99, "train", 137)
    assert kept["error"] == {"type": "RunError", "message": "the driver was ended by SIGKILL"}
    assert "train, step 3" in screen and "--resume auto" in screen
    assert tell_lost_driver([], [], 99, "", 137) == "" == tell_lost_driver(states, ["/nowhere/at/all"], 9, "", 1)
