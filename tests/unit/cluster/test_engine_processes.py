"""Who of our engines' actors is asked whether its server has ended."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from slime_like.cluster import engine_processes
from slime_like.cluster.engine_processes import EngineProcesses
from slime_like.errors import WaitTimeout


class Actor:
    """Does one thing after the other, as Ray's do: while it starts an engine it answers no question."""

    def __init__(self, *, starts: bool):
        self.check = SimpleNamespace(remote=lambda: "busy" if starts else "well")


class Wait:
    """Raises where a real one would wait for its whole deadline."""

    def __init__(self, seconds, **names):
        pass

    def gather(self, refs):
        if "busy" in refs.values():
            raise WaitTimeout(who="train.py", whom="the engines", phase="health check", seconds=60.0, last="nothing")


@pytest.fixture
def processes(monkeypatch) -> EngineProcesses:
    monkeypatch.setattr(engine_processes, "Wait", Wait)
    monkeypatch.setattr(engine_processes, "_failure", lambda refs: None)
    config = SimpleNamespace(engine=SimpleNamespace(engine_start_timeout_s=600.0))
    processes = EngineProcesses(config, None, None, "")
    processes._actors = {0: {"engine 0": Actor(starts=False)}, 2: {"engine 2": Actor(starts=True)}}
    processes._starting = {2: {"engine 2": "its endpoint, once it has started"}}
    return processes


def test_an_engine_that_starts_is_not_asked_whether_it_has_ended(processes):
    assert processes.dead() == {}, "its start, of minutes, would hold up the run, and after one end it"


def test_one_that_has_started_is_asked(processes):
    processes._starting.clear()
    with pytest.raises(WaitTimeout):
        processes.dead()
