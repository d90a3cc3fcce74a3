"""The states of a fleet's members, and what an engine must have proven before it serves. No engine, no Ray."""

from __future__ import annotations

import pytest

from slime_like.cluster.members import Membership, MemberState
from slime_like.errors import EngineError
from slime_like.records import EngineEndpoint, WeightsRef

FIRST, SECOND = WeightsRef(version=1), WeightsRef(version=2)


def endpoint(index: int) -> EngineEndpoint:
    return EngineEndpoint(index=index, url=f"http://engine-{index}:1")


def states(fleet: Membership) -> dict[int, str]:
    return {member.index: str(member.state) for member in fleet.members}


def two_serving() -> Membership:
    return Membership.of_serving([endpoint(0), endpoint(1)])


def test_the_life_of_one():
    fleet = Membership().start(0)
    assert states(fleet) == {0: "starting"} and fleet.endpoints == () and fleet[0].name == "engine 0"
    fleet = fleet.healthy(endpoint(0))
    assert fleet.endpoints == () and fleet[0].name == "engine 0 at http://engine-0:1"
    fleet = fleet.admit(0)
    assert states(fleet) == {0: "serving"} and fleet.endpoints == (endpoint(0),)
    fleet = fleet.prove([0], FIRST)
    assert fleet[0].proven == fleet.present == FIRST
    fleet = fleet.drain(0)
    assert states(fleet) == {0: "draining"} and fleet.endpoints == ()
    assert fleet.leave(0).members == ()


def test_a_change_leaves_what_was():
    fleet = two_serving()
    fleet.drain(0)
    assert states(fleet) == {0: "serving", 1: "serving"}


def test_before_the_first_sync_one_serves_when_it_is_healthy_and_not_before():
    fleet = Membership().start(0)
    with pytest.raises(EngineError, match="engine 0 cannot serve: it has not started"):
        fleet.admit(0)
    assert fleet.healthy(endpoint(0)).admit(0).serving[0].proven is None


def test_after_a_sync_only_who_has_proven_the_same_weights_serves():
    fleet = two_serving().prove([0, 1], SECOND).start(2).healthy(endpoint(2))
    with pytest.raises(
        EngineError, match="engine 2 at http://engine-2:1 cannot serve: it has proven nothing, the fleet holds base@2"
    ):
        fleet.admit(2)
    with pytest.raises(EngineError, match="it has proven base@1, the fleet holds base@2"):
        fleet.prove([2], FIRST).admit(2)
    joined = fleet.prove([2], SECOND)
    assert joined.present == SECOND and joined.admit(2).endpoints == tuple(endpoint(index) for index in range(3))


def test_weights_are_the_fleets_when_no_serving_one_was_left_out():
    fleet = two_serving().prove([0, 1], FIRST).start(2).healthy(endpoint(2))
    assert fleet.prove([2], SECOND).present == FIRST
    assert fleet.prove([0, 1, 2], SECOND).present == SECOND
    assert fleet.prove([0, 1], SECOND).present == SECOND


def test_a_dead_one_has_proven_nothing_and_its_first_reason_stays():
    fleet = two_serving().prove([0, 1], FIRST).die(1, "status 137\nkilled").die(1, "an echo")
    assert states(fleet) == {0: "serving", 1: "dead"} and fleet.endpoints == (endpoint(0),)
    assert fleet[1].proven is None and fleet[1].why == "status 137\nkilled" and fleet.present == FIRST
    with pytest.raises(EngineError, match="(?s)engine 1 at .* is dead; only one that is serving can drain. status 137"):
        fleet.drain(1)
    with pytest.raises(EngineError, match="is dead; only one that is starting or serving can prove base@2"):
        fleet.prove([0, 1], SECOND)


def test_one_started_again_holds_nothing():
    """In the place of a dead one, under another index: what the first had proven does not count."""
    fleet = two_serving().prove([0, 1], FIRST).die(1, "killed")
    assert fleet.next_index == 2
    fleet = fleet.start(2).healthy(endpoint(2))
    assert fleet[2].proven is None
    assert fleet.leave(1).next_index == 3, "no index is used twice"
    assert fleet.die(2, "killed too").leave(2).next_index == 3


def test_two_cannot_live_at_one_address():
    fleet = two_serving().start(2)
    there = EngineEndpoint(index=2, url=endpoint(1).url)
    with pytest.raises(EngineError, match="engine 2 cannot join at http://engine-1:1: engine 1 is serving there"):
        fleet.healthy(there)
    assert fleet.die(1, "killed").healthy(there)[2].endpoint == there, "one that was started again may"


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda fleet: fleet.start(0), "engine 0 is in the fleet already: serving"),
        (lambda fleet: fleet.healthy(endpoint(0)), "is serving; only one that is starting can become healthy"),
        (lambda fleet: fleet.admit(0), "is serving; only one that is starting can serve"),
        (lambda fleet: fleet.drain(0).drain(0), "is draining; only one that is serving can drain"),
        (
            lambda fleet: fleet.drain(0).prove([0], FIRST),
            "is draining; only one that is starting or serving can prove base@1",
        ),
        (lambda fleet: fleet.leave(0), "is serving; only one that is starting or draining or dead can leave"),
        (lambda fleet: fleet.drain(7), "there is no engine 7. The fleet has 0, 1"),
    ],
)
def test_what_cannot_be(change, problem):
    with pytest.raises(EngineError, match=problem):
        change(two_serving())


def test_members_come_in_the_order_of_their_index():
    fleet = Membership.of_serving([endpoint(3), endpoint(1)])
    assert [member.index for member in fleet.serving] == [1, 3] and fleet.next_index == 4
    assert fleet.in_state(MemberState.DEAD, MemberState.STARTING) == ()


def test_who_evaluates_keeps_its_weights_and_serves_again_only_with_the_fleets():
    fleet = two_serving().prove([0, 1], FIRST).set_aside([1])
    assert states(fleet) == {0: "serving", 1: "evaluating"} and fleet.endpoints == (endpoint(0),)
    with pytest.raises(
        EngineError, match="engine 1 at .* is evaluating; only one that is starting or serving can prove"
    ):
        fleet.prove([0, 1], SECOND)
    ahead = fleet.prove([0], SECOND)
    assert (ahead.present, ahead[1].proven) == (SECOND, FIRST)
    back = ahead.take_back(1)
    with pytest.raises(EngineError, match="it has proven base@1, the fleet holds base@2"):
        back.admit(1)
    assert back.prove([0, 1], SECOND).admit(1).endpoints == (endpoint(0), endpoint(1))
    assert states(fleet.take_back(1).admit(1)) == {0: "serving", 1: "serving"}, "nothing has changed meanwhile"


def test_somebody_goes_on_serving():
    fleet = two_serving().prove([0, 1], FIRST)
    for indices in ([], [0, 1]):
        with pytest.raises(EngineError, match="engines cannot be set aside for an evaluation: 2 serve, and at least"):
            fleet.set_aside(indices)
    with pytest.raises(EngineError, match="1 engines cannot be set aside for an evaluation: 1 serve"):
        fleet.set_aside([1]).set_aside([0])
    with pytest.raises(EngineError, match="is serving; only one that is evaluating can be taken back"):
        fleet.take_back(0)
