"""What a run says of a failure when an engine is dying."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from slime_like.cluster import engine_fleet
from slime_like.cluster.engine_fleet import EngineFleet
from slime_like.cluster.members import Membership
from slime_like.config.engine import EngineConfig
from slime_like.config.run import RunConfig
from slime_like.errors import EngineError
from slime_like.planning.placement import make_plan
from slime_like.records import EngineEndpoint
from slime_like.testing.scripted_engine import ScriptedEngine
from slime_like.utils.net import free_port


class Fleet(EngineFleet):
    """One engine, whose process is seen to have ended when asked for the third time."""

    def __init__(self, url: str):
        super().__init__(
            RunConfig(), make_plan(RunConfig()), None, "", Membership.of_serving([EngineEndpoint(index=0, url=url)])
        )
        self.asked = 0

    def check(self) -> None:
        self.asked += 1
        if self.asked == 3:
            raise EngineError("engine 0 ended with status 137")


def silent_url() -> str:
    return f"http://127.0.0.1:{free_port('127.0.0.1')}"


def test_an_engine_that_does_not_answer_is_waited_for():
    with pytest.raises(EngineError, match="ended with status 137"):
        Fleet(silent_url()).check_after_failure()


def test_but_not_for_good(monkeypatch):
    monkeypatch.setattr(engine_fleet, "_DYING_S", 0.1)
    fleet = Fleet(silent_url())
    fleet.check_after_failure()  # whatever failed is told instead
    assert fleet.asked == 2


def test_one_that_answers_is_not():
    with ScriptedEngine(lambda request: []) as engine:
        fleet = Fleet(engine.url)
        fleet.check_after_failure()
    assert fleet.asked == 1


class Processes:
    """Two engines of ours, neither of which has ended; notes whom it is to end."""

    def __init__(self):
        self.stopped: list[int] = []

    def dead(self, known):
        return {}

    def stop(self, indices):
        self.stopped += indices


def hanging_fleet() -> tuple[EngineFleet, Processes, list[str]]:
    """Engine 0 answers nothing, engine 1 is not asked; whom the router is told to forget, and which are ended."""
    config = RunConfig(engine=EngineConfig(engine_hang_timeout_s=0.4))
    endpoints = [EngineEndpoint(index=index, url=silent_url()) for index in range(2)]
    processes, forgotten = Processes(), []
    fleet = EngineFleet(config, make_plan(config), processes, "", Membership.of_serving(endpoints))
    fleet.router = SimpleNamespace(deregister=lambda endpoint: forgotten.append((endpoint.index, processes.stopped[:])))
    fleet._vitals.watch(endpoints[0])
    return fleet, processes, forgotten


def until(ask, seconds: float = 10.0):
    deadline = time.monotonic() + seconds
    while not (answer := ask()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return answer


def test_an_engine_that_hangs_leaves_the_router_is_ended_and_counts_as_dead():
    fleet, processes, forgotten = hanging_fleet()
    deaths = until(fleet.note_deaths)
    assert list(deaths) == [0] and "hangs: no answer to /server_info" in str(deaths[0])
    assert processes.stopped == [0] and forgotten == [(0, [])], "first out of the router"
    assert [str(member.state) for member in fleet.members] == ["dead", "serving"] and fleet.num_deaths == 1
    assert fleet.note_deaths() == {}


def test_where_a_death_ends_the_run_so_does_a_hang():
    fleet, processes, _ = hanging_fleet()
    time.sleep(0.6)
    with pytest.raises(EngineError, match="engine 0 at .* hangs"):
        until(fleet.check_watch)
    assert processes.stopped == [0]


def test_in_a_sync_a_hang_is_the_syncs_matter():
    """An engine that loads weights may have to wait for the trainer."""
    fleet, processes, _ = hanging_fleet()
    time.sleep(1.0)
    fleet._check_silent()
    assert processes.stopped == []
    assert list(fleet.note_deaths()) == [0], "it is known all the same, and told when the sync has failed"
