"""A request that our own change of weights ended is told apart from one that failed."""

from __future__ import annotations

import asyncio

import pytest

from slime_like.errors import WaitTimeout
from slime_like.records import WeightsRef
from slime_like.rollout.policy import Policy


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
