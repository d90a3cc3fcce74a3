"""The router of a fleet that dies or hangs: another of the same address and key, with who serves then."""
# Covers slime_like.cluster.fleet_router.

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
from collections.abc import Iterator

import pytest

from slime_like.cluster.engine_care import EngineCare
from slime_like.cluster.fleet_router import FleetRouter
from slime_like.config.rollout import RolloutConfig
from slime_like.errors import EngineError
from slime_like.rollout.generate import GenerationClient
from slime_like.rollout.policy import Policy
from slime_like.utils.net import wait_until
from tests.contract.fleet_world import FIRST, SLOW, SLOW_S, World, fleet_world


@pytest.fixture
def world(tmp_path) -> Iterator[World]:
    with fleet_world(tmp_path) as world:
        yield world


def killed_router(world) -> None:
    """It has ended, and that is seen."""
    router = world.fleet.router._router
    os.kill(router._process.pid, signal.SIGKILL)
    wait_until(
        lambda: None if world.fleet.router.failure() else "it runs",
        deadline_s=10, who="test", whom="the router", phase="its end",
    )  # fmt: skip


def test_a_router_that_died_is_followed_by_one_of_the_same_address_and_key_with_who_serves_then(world):
    world.fleet.sync(FIRST, world.trainer)
    url, key = world.fleet.router.url, world.fleet.router.api_key
    killed_router(world)
    with pytest.raises(EngineError, match="(?s)the router at .* ended with status 137. End of .*router-0.log"):
        world.fleet.check()
    world.engines[1].close()
    world.fleet.mark_dead(1, "it does not answer")  # nobody is there to be told
    assert world.fleet.router.restart() < 20 and world.fleet.router.failure() is None
    assert (world.fleet.router.url, world.fleet.router.api_key) == (url, key)
    assert world.routed() == [0] and world.ask([1, 2]).status_code == 200


def test_a_router_that_hangs_is_ended_and_started_again(world, tmp_path):
    engine = dataclasses.replace(world.fleet._config.engine, engine_hang_timeout_s=2.0, max_router_restarts=1)
    router = FleetRouter(dataclasses.replace(world.fleet._config, engine=engine), str(tmp_path / "other"))
    router.start()
    try:
        router.register(world.fleet.endpoints[0])
        assert router.failure() is None
        os.kill(router._router._process.pid, signal.SIGSTOP)
        wait_until(
            lambda: None if router.failure() else "it answers",
            deadline_s=20, who="test", whom="the router", phase="its end",
        )  # fmt: skip
        assert "hangs: no answer to /workers for" in str(router.failure())
        router.restart()
        assert router.failure() is None and router.engine_urls() == [world.engines[0].url]
        assert not router.can_restart
    finally:
        router.close()


def test_who_joins_finds_a_router_that_died_a_moment_ago_running(world):
    world.fleet.sync(FIRST, world.trainer)
    killed_router(world)
    world.fleet.add(world.third(), world.trainer)
    assert world.routed() == [0, 1, 2]


def test_one_that_does_not_answer_while_an_engine_joins_or_leaves_is_replaced(world, tmp_path, monkeypatch):
    """Before the watch has seen that it hangs: the engine that comes for a dead one would end the run."""
    monkeypatch.setattr("slime_like.sglang_backend.router._REQUEST_TIMEOUT_S", 1.0)
    engine = dataclasses.replace(world.fleet._config.engine, max_router_restarts=2)
    router = FleetRouter(dataclasses.replace(world.fleet._config, engine=engine), str(tmp_path / "other"))
    router.start()
    try:
        first, second = world.fleet.endpoints[:2]
        router.register(first)
        os.kill(router._router._process.pid, signal.SIGSTOP)
        router.register(second)
        assert router.failure() is None and set(router.engine_urls()) == {first.url, second.url}
        os.kill(router._router._process.pid, signal.SIGSTOP)
        router.deregister(first)
        assert "failed: " in str(router.failure()) and "It is ended" in str(router.failure())
        router.restart()
        assert router.failure() is None and router.engine_urls() == [second.url]
        os.kill(router._router._process.pid, signal.SIGSTOP)
        with pytest.raises(EngineError, match="(?s)/workers failed: .*--max-router-restarts is 0, or used up"):
            router.register(first)
    finally:
        router.close()


def test_requests_outlive_the_router(world):
    """Those that are under way when it is killed, and those that begin while none runs: all are answered."""
    world.fleet.sync(FIRST, world.trainer)
    care = EngineCare(world.fleet, world.fleet._config.engine)
    policy, notes = Policy(), []

    async def look_after() -> None:
        while True:
            changes = await asyncio.to_thread(care.tend, world.trainer)
            notes.extend(changes.notes)
            if changes.serving_changed:
                policy.engines_changed(enough=changes.enough)
            await asyncio.sleep(0.3)

    async def run() -> list:
        router = world.fleet.router
        client = GenerationClient(router.url, router.api_key, RolloutConfig(), concurrency=64, weight_version=lambda: 0)
        client.wait_for_engines(policy)
        care_task = asyncio.create_task(look_after())
        before = [asyncio.create_task(client.generate(SLOW, {"max_new_tokens": 4})) for _ in range(4)]
        await asyncio.sleep(SLOW_S / 2)
        os.kill(router._router._process.pid, signal.SIGKILL)
        after = [asyncio.create_task(client.generate([1, number], {"max_new_tokens": 4})) for number in range(4)]
        try:
            return await asyncio.gather(*before, *after)
        finally:
            care_task.cancel()
            await client.close()

    assert [answer.tokens for answer in asyncio.run(run())] == [[7]] * 8
    assert "ended with status 137" in notes[0] and "with 2 engines" in notes[1] and len(notes) == 2
