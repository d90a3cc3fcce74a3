"""trace.json can be read at any moment."""

import json

import pytest

from slime_like.observability.metrics import PhaseTimers
from slime_like.observability.tracing import PhaseTrace
from tests.helpers.full_disks import largest_file


def read(path):
    return json.loads(path.read_text().rstrip(",\n") + "]")


def test_each_phase_is_one_event_with_its_step(tmp_path):
    timers = PhaseTimers(PhaseTrace(tmp_path / "trace.json"), 7)
    with timers.phase("generate"):
        pass
    with pytest.raises(RuntimeError), timers.phase("train"):
        raise RuntimeError("also traced")
    events = read(tmp_path / "trace.json")
    assert [(e["name"], e["ph"], e["args"]["step"]) for e in events] == [("generate", "X", 7), ("train", "X", 7)]
    assert events[0]["ts"] + events[0]["dur"] <= events[1]["ts"] + 1


def test_empty_trace_is_readable(tmp_path):
    PhaseTrace(tmp_path / "trace.json")
    assert read(tmp_path / "trace.json") == []


def test_a_full_disk_costs_events_and_leaves_the_rest_readable(tmp_path):
    trace = PhaseTrace(tmp_path / "trace.json")
    with largest_file(20):
        trace.add("generate", 0.0, 1.0, 0)
    trace.add("train", 1.0, 2.0, 0)
    assert [event["name"] for event in read(tmp_path / "trace.json")] == ["train"]
