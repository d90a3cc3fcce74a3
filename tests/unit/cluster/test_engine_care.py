"""What is done about engines that die, over a fleet that a test holds in its hand."""

from __future__ import annotations

import pytest

from slime_like.cluster.engine_care import EngineCare
from slime_like.cluster.members import Membership, MemberState
from slime_like.config.engine import EngineConfig
from slime_like.errors import EngineError
from slime_like.records import EngineEndpoint, WeightsRef

PRESENT, TRAINER = WeightsRef(version=3), object()


class Router:
    """Runs until the test says how it ended; `restarts`: what becomes of each try."""

    def __init__(self, *restarts: float | EngineError):
        self.ended: EngineError | None = None
        self.restarts = list(restarts)

    @property
    def can_restart(self) -> bool:
        return bool(self.restarts)

    def failure(self):
        return self.ended

    def restart(self) -> float:
        outcome = self.restarts.pop(0)
        if isinstance(outcome, EngineError):
            raise outcome
        self.ended = None
        return outcome


class Fleet:
    """Engines that serve from the beginning; the test says who dies and whose successor is up."""

    def __init__(self, count: int):
        self.router = Router()
        endpoints = [EngineEndpoint(index=index, url=f"http://e{index}") for index in range(count)]
        self.membership = Membership.of_serving(endpoints).prove(range(count), PRESENT)
        self.dying: dict[int, EngineError] = {}
        self.up: set[int] = set()
        self.failing: set[int] = set()
        self.brought: list[tuple[int, object]] = []

    @property
    def num_members(self) -> int:
        return len(self.membership.serving)

    @property
    def members(self):
        return self.membership.members

    def note_deaths(self):
        deaths, self.dying = self.dying, {}
        for index, error in deaths.items():
            self.mark_dead(index, str(error))
        return deaths

    def mark_dead(self, index, why):
        self.membership = self.membership.die(index, why)

    def begin_replacement(self, index):
        successor = self.membership.next_index
        self.membership = self.membership.leave(index).start(successor)
        return successor

    def started(self, index):
        if index in self.failing:
            raise EngineError(f"engine {index} ended with status 1")
        if index not in self.up:
            return False
        self.membership = self.membership.healthy(EngineEndpoint(index=index, url=f"http://e{index}"))
        return True

    def bring_up(self, index, trainer):
        self.brought.append((index, trainer))
        self.membership = self.membership.prove([index], PRESENT).admit(index)


def killed(index: int) -> EngineError:
    return EngineError(f"engine {index} ended with status 137")


def test_nothing_happens_where_nobody_dies():
    fleet = Fleet(2)
    changes = EngineCare(fleet, EngineConfig()).tend(TRAINER)
    assert (changes.serving_changed, changes.enough, changes.notes) == (False, True, ())


def test_a_dead_engine_is_replaced_and_gets_the_present_weights():
    fleet = Fleet(2)
    care = EngineCare(fleet, EngineConfig())
    fleet.dying = {1: killed(1)}
    changes = care.tend(TRAINER)
    assert changes.serving_changed and changes.enough and fleet.num_members == 1
    assert "status 137" in changes.notes[0] and "engine 1 is being replaced by engine 2; 1 serve" in changes.notes[0]
    assert care.tend(TRAINER).notes == () and not fleet.brought, "it starts"
    fleet.up = {2}
    changes = care.tend(TRAINER)
    assert changes.serving_changed and fleet.brought == [(2, TRAINER)] and fleet.num_members == 2


def test_while_the_trainer_may_not_send_a_successor_waits():
    fleet = Fleet(2)
    care = EngineCare(fleet, EngineConfig())
    fleet.dying, fleet.up = {0: killed(0)}, {2}
    care.tend(None)
    changes = care.tend(None)
    assert not changes.serving_changed and not fleet.brought and fleet.membership[2].state is MemberState.STARTING
    assert care.tend(TRAINER).serving_changed and fleet.brought == [(2, TRAINER)]


def test_one_that_a_sync_took_in_is_not_sent_anything_again():
    fleet = Fleet(2)
    care = EngineCare(fleet, EngineConfig())
    fleet.dying, fleet.up = {0: killed(0)}, {2}
    care.tend(None)
    fleet.membership = fleet.membership.prove([1, 2], PRESENT).admit(2)
    assert care.tend(TRAINER).notes == () and not fleet.brought


def test_below_the_least_number_requests_wait():
    fleet = Fleet(2)
    care = EngineCare(fleet, EngineConfig(min_engines=2))
    fleet.dying = {0: killed(0)}
    assert not care.tend(TRAINER).enough
    fleet.up = {2}
    assert care.tend(TRAINER).enough


def test_restarts_are_counted_and_then_the_others_go_on_alone():
    fleet = Fleet(3)
    care = EngineCare(fleet, EngineConfig(max_engine_restarts=1))
    fleet.dying, fleet.up = {0: killed(0)}, {3}
    care.tend(TRAINER)
    fleet.dying = {1: killed(1)}
    (note, *_) = care.tend(TRAINER).notes
    assert "engine 1 is not replaced (--max-engine-restarts is used up); 2 serve" in note
    fleet.dying = {2: killed(2)}
    care.tend(TRAINER)
    fleet.dying = {3: killed(3)}
    with pytest.raises(EngineError, match="engine 3 ended with status 137"):
        care.tend(TRAINER)


def test_a_successor_that_dies_while_it_starts_costs_a_restart_too():
    fleet = Fleet(1)
    care = EngineCare(fleet, EngineConfig(max_engine_restarts=2))
    fleet.dying, fleet.failing = {0: killed(0)}, {1, 2}
    with pytest.raises(EngineError, match="engine 2 ended with status 1"):
        for _ in range(5):
            care.tend(TRAINER)


def test_before_the_first_sync_no_trainer_is_needed():
    fleet = Fleet(1)
    fleet.membership = Membership.of_serving([EngineEndpoint(index=0, url="http://e0")])
    care = EngineCare(fleet, EngineConfig())
    fleet.dying, fleet.up = {0: killed(0)}, {1}
    care.tend(None)
    care.tend(None)
    assert fleet.brought == [(1, None)]


def test_with_no_restarts_a_dead_engine_ends_the_run_though_others_serve():
    fleet = Fleet(2)
    fleet.dying = {0: killed(0)}
    with pytest.raises(EngineError, match="status 137"):
        EngineCare(fleet, EngineConfig(max_engine_restarts=0)).tend(TRAINER)


def test_requests_wait_from_the_look_that_notices_the_routers_end_until_another_runs():
    fleet = Fleet(2)
    fleet.router = Router(2.5)
    care = EngineCare(fleet, EngineConfig())
    assert care.tend(TRAINER).enough
    fleet.router.ended = EngineError("the router ended with status 137")
    changes = care.tend(TRAINER)
    assert (changes.serving_changed, changes.enough, changes.num_coming) == (True, False, 1)
    assert "status 137" in changes.notes[0]
    changes = care.tend(TRAINER)
    assert (changes.serving_changed, changes.enough, changes.num_coming) == (True, True, 0)
    assert changes.notes == ("the router runs again after 2.5 s, with 2 engines",)
    assert care.tend(TRAINER).notes == ()


def test_requests_go_on_where_somebody_else_has_started_the_router_meanwhile():
    fleet = Fleet(1)
    fleet.router = Router(1.0)
    fleet.router.ended = EngineError("the router ended with status 137")
    care = EngineCare(fleet, EngineConfig())
    assert not care.tend(TRAINER).enough
    fleet.router.restart()
    changes = care.tend(TRAINER)
    assert (changes.serving_changed, changes.enough) == (True, True)


def test_a_router_that_does_not_start_again_is_tried_again_and_then_ends_the_run_by_name():
    fleet = Fleet(1)
    fleet.router = Router(EngineError("its port is taken"), EngineError("its port is taken still"))
    fleet.router.ended = EngineError("the router ended with status 137")
    care = EngineCare(fleet, EngineConfig())
    assert not care.tend(TRAINER).enough
    assert "could not be started again: its port is taken" in care.tend(TRAINER).notes[0]
    assert not care.tend(TRAINER).enough
    with pytest.raises(EngineError, match="(?s)status 137.*--max-router-restarts is 0, or used up"):
        care.tend(TRAINER)
