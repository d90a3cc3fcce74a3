"""Training and sampling never at once on shared devices, and each gets its share."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from slime_like.tinker.execution.turns import Side, Turns
from slime_like.tinker.records import CallResult
from tests.helpers.tinker_backends import VectorEngines, VectorTrainer
from tests.helpers.tinker_service import Client, running_service


async def compete(turns: Turns, seconds: float, *, samplers: int = 3, work_s: float = 0.01) -> dict[Side, float]:
    """Both sides always have work; the seconds that each was inside, and never together unless it may be."""
    inside = dict.fromkeys(Side, 0)
    busy = dict.fromkeys(Side, 0.0)
    deadline = time.monotonic() + seconds

    async def worker(side: Side) -> None:
        while time.monotonic() < deadline:
            async with turns.of(side):
                inside[side] += 1
                assert not turns._shared or not inside[side.other]
                begun = time.monotonic()
                await asyncio.sleep(work_s)
                busy[side] += time.monotonic() - begun
                inside[side] -= 1

    await asyncio.gather(worker(Side.TRAINING), *(worker(Side.SAMPLING) for _ in range(samplers)))
    busy[Side.SAMPLING] /= samplers
    return busy


@pytest.mark.long_run  # a comparison of times
@pytest.mark.parametrize(("weight", "low", "high"), [(1.0, 0.6, 1.6), (3.0, 1.7, 6.0)])
def test_the_seconds_are_as_the_weights(weight: float, low: float, high: float):
    turns = Turns(shared=True, sampling_weight=weight, turn_s=0.05)
    busy = asyncio.run(compete(turns, 4.0))
    assert low <= turns.seconds[Side.SAMPLING] / turns.seconds[Side.TRAINING] <= high
    assert all(seconds > 0.2 for seconds in busy.values())


def test_devices_of_their_own_are_never_waited_for():
    busy = asyncio.run(compete(Turns(shared=False), 0.5))
    assert all(seconds >= 0.4 for seconds in busy.values())


def test_a_side_that_is_alone_does_not_wait_and_owes_nothing():
    async def run() -> None:
        turns = Turns(shared=True, turn_s=0.01)
        for _ in range(10):
            async with asyncio.timeout(1), turns.of(Side.TRAINING):
                await asyncio.sleep(0.01)
        busy = await compete(turns, 1.0)
        assert busy[Side.TRAINING] > 0.2

    asyncio.run(run())


def test_one_that_gives_up_waiting_leaves_the_way_free():
    async def run() -> None:
        turns = Turns(shared=True)
        async with turns.of(Side.SAMPLING):
            waiting = asyncio.create_task(compete(turns, 0.1, samplers=0))
            await asyncio.sleep(0.05)
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
            async with asyncio.timeout(1), turns.of(Side.SAMPLING):
                pass
        async with asyncio.timeout(1), turns.of(Side.TRAINING):
            pass

    asyncio.run(run())


def test_a_service_on_shared_devices_never_uses_both_at_once(tmp_path: Path):
    async def run() -> None:
        engines = VectorEngines(seconds=0.03)

        class Watched(VectorTrainer):
            async def _verb(self, *what: object) -> None:
                assert not engines.num_running
                await super()._verb(*what)
                assert not engines.num_running

        async with running_service(
            tmp_path, Watched(seconds=0.01), engines, shared_devices=True, turn_s=0.05
        ) as service:
            client = Client(service)
            await client.open_session()
            await client.open_sampler("base")
            await client.do(client.creation())
            ids = []
            for number in range(12):
                ids.append(await service.submit(client.sample("base", number)))
                ids.append(await service.submit(client.forward_backward(number)))
            answers = [await client.answer(request_id) for request_id in ids]
            assert all(isinstance(answer, CallResult) for answer in answers), answers

    asyncio.run(run())
