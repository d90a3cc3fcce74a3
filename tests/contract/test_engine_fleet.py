"""Engines that join and leave a fleet while it is up: the real router before scripted engines, and a trainer that
steers them as a real one does.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator

import pytest

from slime_like.config.placement import PlacementConfig
from slime_like.errors import EngineError, WaitTimeout, WeightSyncError
from slime_like.utils.net import wait_until
from tests.contract.fleet_world import FIRST, SECOND, SLOW, World, fleet_world


@pytest.fixture
def world(tmp_path) -> Iterator[World]:
    with fleet_world(tmp_path) as world:
        yield world


def test_before_the_first_sync_one_more_serves_when_it_is_healthy(world):
    assert world.states() == {0: "serving", 1: "serving"} and world.routed() == [0, 1]
    member = world.fleet.add(world.third())
    assert (member.index, str(member.state), member.proven) == (2, "serving", None)
    assert world.routed() == [0, 1, 2] and world.trainer.orders == []


def test_after_a_sync_one_more_proves_the_same_weights_before_it_serves(world):
    receipt = world.fleet.sync(FIRST, world.trainer)
    assert (receipt.weights, receipt.engines_proven) == (FIRST, 2)
    assert [member.proven for member in world.fleet.members] == [FIRST, FIRST]
    seen: list = []
    world.trainer.during_send = lambda: seen.append((world.states()[2], world.routed()))
    member = world.fleet.add(world.third(), world.trainer)
    assert seen == [("starting", [0, 1])], "while it gets its weights nobody is sent to it"
    assert [endpoint.url for endpoint in world.trainer.orders[-1].endpoints] == [world.engines[2].url]
    assert (str(member.state), member.proven, world.routed()) == ("serving", FIRST, [0, 1, 2])
    assert world.engines[2].weight_version == "1"
    paths = [path for path, _ in world.engines[2].calls]
    assert paths.index("/update_weight_version") < paths.index("/continue_generation")
    assert world.fleet.sync(SECOND, world.trainer).engines_proven == 3


def test_weights_that_are_not_the_fleets_any_more_let_nobody_in(world):
    """The trainer has trained since the last sync: what it would send under that version is something else."""
    world.fleet.sync(FIRST, world.trainer)
    world.trainer.digest = "b"
    with pytest.raises(
        WeightSyncError,
        match="engine 2 at .* got weights with digest b, but base@1 of the fleet has a: the trainer has gone on since",
    ):
        world.fleet.add(world.third(), world.trainer)
    assert world.states() == {0: "serving", 1: "serving"} and world.routed() == [0, 1]


def test_without_a_trainer_the_next_sync_brings_it_in(world):
    world.fleet.sync(FIRST, world.trainer)
    assert str(world.fleet.add(world.third()).state) == "starting" and world.routed() == [0, 1]
    assert world.fleet.sync(SECOND, world.trainer).engines_proven == 3
    assert world.routed() == [0, 1, 2] and {member.proven for member in world.fleet.members} == {SECOND}


def test_one_that_does_not_hold_what_was_sent_never_serves(world):
    world.fleet.sync(FIRST, world.trainer)
    world.trainer.proves = False
    with pytest.raises(WeightSyncError, match="is not what was sent"):
        world.fleet.add(world.third(), world.trainer)
    assert world.states() == {0: "serving", 1: "serving"} and world.routed() == [0, 1]
    assert "/continue_generation" not in [path for path, _ in world.engines[2].calls]
    assert world.engines[2].calls[-1][0] == "/end_weight_update", "its session is closed"


def test_a_failed_sync_closes_sessions_and_leaves_the_proof_as_it_was(world):
    world.fleet.sync(FIRST, world.trainer)
    world.trainer.proves = False
    with pytest.raises(WeightSyncError, match="is not what was sent"):
        world.fleet.sync(SECOND, world.trainer)
    assert world.fleet.membership.present == FIRST
    assert all(
        engine.calls[-1][0] == "/end_weight_update" and engine.weight_version == "1" for engine in world.engines[:2]
    )


def test_drained_is_who_has_ended_what_it_began(world):
    answers: list = []
    # in turn: one to each
    threads = [threading.Thread(target=lambda: answers.append(world.ask(SLOW))) for _ in range(2)]
    for thread in threads:
        thread.start()
    busy = world.fleet.clients[0]
    wait_until(
        lambda: None if busy.num_requests() else "idle",
        deadline_s=10,
        who="test",
        whom="engine 0",
        phase="start",
        interval_s=0.02,
    )
    with pytest.raises(
        WaitTimeout, match="waited 0 s for engine 0 at .* during drain. Last heard: 1 requests are left"
    ):
        world.fleet.drain(0, timeout_s=0.2)
    assert world.states() == {0: "draining", 1: "serving"} and world.routed() == [1]
    wait_until(
        lambda: "busy" if busy.num_requests() else None, deadline_s=10, who="test", whom="engine 0", phase="drain"
    )
    before = len(world.engines[0].requests)
    assert [world.ask([1, 2]).status_code for _ in range(4)] == [200] * 4 and len(world.engines[0].requests) == before
    for thread in threads:
        thread.join()
    assert [answer.status_code for answer in answers] == [200, 200], "nothing that it had begun was lost"
    world.fleet.remove(0)
    assert world.states() == {1: "serving"}
    world.fleet.drain(1, timeout_s=5.0)
    assert world.states() == {1: "draining"} and world.routed() == []


def test_who_evaluates_is_out_of_the_router_and_of_syncs_until_it_has_proven_the_present_weights(world):
    fleet, trainer = world.fleet, world.trainer
    fleet.sync(FIRST, trainer)
    watch = fleet._vitals._watches[1]
    (chosen,) = fleet.set_aside(1)
    assert (
        chosen.url == world.engines[1].url
        and world.routed() == [0]
        and world.states() == {0: "serving", 1: "evaluating"}
    )
    before = len(world.engines[1].calls)
    assert fleet.sync(SECOND, trainer).engines_proven == 1
    assert [world.engines[0].weight_version, world.engines[1].weight_version] == ["2", "1"]
    assert len(world.engines[1].calls) == before, "the sync did not touch it"
    fleet.take_back()
    assert world.states() == {0: "serving", 1: "starting"} and world.routed() == [0], "it waits for weights"
    trainer.during_send = lambda: seen.append(world.routed())
    seen: list = []
    third = SECOND.next()
    assert fleet.sync(third, trainer).engines_proven == 2 and seen == [[0]]
    assert world.routed() == [0, 1] and {member.proven for member in fleet.members} == {third}
    fleet.set_aside(1)
    fleet.take_back()
    assert world.routed() == [0, 1], "no sync came between: at once"
    assert fleet._vitals._watches[1] is watch, "one watch, however often it is admitted"


def test_one_that_dies_while_it_evaluates_is_named(world):
    world.fleet.sync(FIRST, world.trainer)
    world.fleet.set_aside(1)
    world.engines[1].close()
    with pytest.raises(EngineError, match="external engine 1 at .* does not answer"):
        world.fleet.take_back()
    assert world.states() == {0: "serving", 1: "dead"} and world.routed() == [0]


def test_one_that_is_gone_is_dead_and_named(world):
    world.fleet.sync(FIRST, world.trainer)
    world.engines[1].close()
    with pytest.raises(EngineError, match="external engine 1 at .* does not answer"):
        world.fleet.check()
    assert world.states() == {0: "serving", 1: "dead"} and world.routed() == [0] and world.fleet.num_deaths == 1
    assert world.fleet.membership[1].proven is None and "does not answer" in world.fleet.membership[1].why
    assert world.fleet.sync(SECOND, world.trainer).engines_proven == 1


def test_what_cannot_join_leaves_the_others_alone(world):
    with pytest.raises(EngineError, match="engine 1 cannot join under this number: the next one is 2"):
        world.fleet.add(dataclasses.replace(world.third(), index=1))
    with pytest.raises(EngineError, match="engine 2 cannot join at .*: engine 0 is serving there"):
        world.fleet.add(dataclasses.replace(world.third(), external_url=world.engines[0].url))
    assert world.states() == {0: "serving", 1: "serving"} and world.routed() == [0, 1]


def test_one_cannot_join_while_the_others_have_no_memory(world):
    placement = PlacementConfig(offload_rollout=True)  # of engines of ours, as external ones give nothing back
    world.fleet._config = dataclasses.replace(world.fleet._config, placement=placement)
    world.fleet.release_memory()
    with pytest.raises(EngineError, match="engine 2: no engine can join while the others have given their memory back"):
        world.fleet.add(world.third())
