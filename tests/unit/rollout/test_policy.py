"""A request that our own change of weights ended is told apart from one that failed."""

from __future__ import annotations

import asyncio

import pytest

from slime_like.errors import WaitTimeout
from slime_like.records import WeightsRef
from slime_like.rollout.policy import Policy
from tests.unit.rollout.virtual_time import run_virtual


def test_an_abort_is_explained_by_a_change_since_the_request_began():
    policy = Policy()
    before = policy.num_changes
    assert not policy.explains_abort(before)
    policy.changing()
    assert policy.explains_abort(before) and policy.explains_abort(policy.num_changes), (
        "during a change, whenever it began"
    )
    policy.changed(WeightsRef(version=3))
    assert policy.explains_abort(before) and not policy.explains_abort(policy.num_changes)
    assert policy.weights == WeightsRef("base", 3)


def test_waiting_for_the_end_of_a_change():
    async def test():
        policy = Policy()
        await policy.settled(0.01)
        policy.changing()
        with pytest.raises(WaitTimeout, match="engines serve base@0, the next sync has begun"):
            await policy.settled(0.01)
        waiting = asyncio.ensure_future(policy.settled(5))
        await asyncio.sleep(0)
        policy.changed(WeightsRef(version=1))
        await waiting

    asyncio.run(test())


def changes_after(*events: tuple[float, str], timeout_s: float = 3600.0) -> tuple[bool, float]:
    """What a request that failed at 0 is told, and when; events: at so many seconds a "look" or a "change"."""

    async def test() -> tuple[bool, float]:
        policy, clock = Policy(), asyncio.get_running_loop().time
        policy.engines_looked_at()  # of a run that looks after its engines
        begin = clock()

        async def happen() -> None:
            for at, what in events:
                await asyncio.sleep(at - (clock() - begin))
                policy.engines_looked_at() if what == "look" else policy.engines_changed(enough=True)

        task = asyncio.create_task(happen())
        answer = await policy.changes_after(0, timeout_s)
        task.cancel()
        return answer, round(clock() - begin)

    return run_virtual(test())


def test_a_request_that_failed_waits_for_what_two_looks_have_seen():
    assert changes_after((0.5, "look"), (1.5, "look"), (2.5, "look")) == (False, 3)
    assert changes_after((0.5, "look"), (1.4, "change"), (1.5, "look")) == (True, 1)


def test_in_a_train_step_nobody_looks_and_the_request_waits_for_its_end():
    assert changes_after((0.5, "look"), (200.0, "change"), (200.1, "look")) == (True, 200)
    assert changes_after((200.0, "look"), (201.0, "look")) == (False, 201)
    assert changes_after(timeout_s=50.0) == (False, 50)


def test_where_nobody_ever_looks_it_waits_a_moment_only():
    async def test() -> tuple[bool, float]:
        begin = asyncio.get_running_loop().time()
        answer = await Policy().changes_after(0, 3600.0)
        return answer, round(asyncio.get_running_loop().time() - begin)

    assert run_virtual(test()) == (False, 3)
