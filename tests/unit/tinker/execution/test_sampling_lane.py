"""Samples run many at once, tenants in turn; engines that die are asked again."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from slime_like.tinker.errors import Refused
from slime_like.tinker.records import CallFailure, CallResult, StillWaiting
from tests.helpers.tinker_backends import VectorEngines, VectorTrainer
from tests.helpers.tinker_service import Client, running_service, set_terms


async def tenants(service, names: list[str]) -> list[Client]:
    clients = [Client(service, tenant=name, session_id=f"s-{name}") for name in names]
    for client in clients:
        await client.open_session()
        await client.open_sampler(f"base-{client.tenant}")
    return clients


def test_many_run_at_once_within_the_limits(tmp_path: Path):
    async def run() -> int:
        engines = VectorEngines(seconds=0.5)
        limits = {"max_samples_running": 12, "max_samples_running_a_tenant": 8}
        async with running_service(tmp_path, VectorTrainer(), engines, **limits) as service:
            ann, bob = await tenants(service, ["ann", "bob"])
            ids = [(ann, await service.submit(ann.sample("base-ann", n, num_samples=4))) for n in range(6)]
            states = [await service.result(ids[-1][1], tenant="ann", timeout_s=0.0)]
            assert engines.num_running <= 8 and isinstance(states[0], StillWaiting)
            assert states[0].queue_state == "paused_rate_limit" and "of at most 8 sequences" in states[0].reason
            ids += [(bob, await service.submit(bob.sample("base-bob", n, num_samples=4))) for n in range(6)]
            state = await service.result(ids[-1][1], tenant="bob", timeout_s=0.0)
            assert state.queue_state == "paused_capacity"
            for client, request_id in ids:
                assert isinstance(await client.answer(request_id), CallResult)
            await asyncio.sleep(0.1)
            assert service.stats()["samples_running"] == {} and service.stats()["samples_waiting"] == 0
            return engines.most_running

    assert asyncio.run(run()) == 12


def test_a_flood_does_not_keep_others_waiting(tmp_path: Path):
    async def run() -> tuple[int, int]:
        limits = {"max_samples_running": 2, "max_samples_running_a_tenant": 2}
        async with running_service(tmp_path, VectorTrainer(), VectorEngines(seconds=0.2), **limits) as service:
            flood, other = await tenants(service, ["flood", "other"])
            many = [await service.submit(flood.sample("base-flood", n)) for n in range(60)]
            few = [await service.submit(other.sample("base-other", n)) for n in range(5)]
            for request_id in few:
                await other.answer(request_id)
            left = [request_id for request_id in many if request_id in service.book.entries]
            for request_id in left:
                await service.cancel(request_id, tenant="flood")
            return len(left), len(many)

    left, total = asyncio.run(run())
    assert left > total / 2


def test_a_tenants_weight_is_its_share(memory_folder: Path):
    async def run() -> list[str]:
        limits = {"max_samples_running": 1, "max_samples_running_a_tenant": 1}
        engines = VectorEngines(seconds=30)
        async with running_service(memory_folder, VectorTrainer(), engines, **limits) as service:
            await set_terms(service, "paying", weight=2.0)
            *clients, first = await tenants(service, ["paying", "other", "first"])
            before = await service.submit(first.sample("base-first", 0))  # until all others wait
            ids = []
            for number in range(60):
                ids += [(c, await service.submit(c.sample(f"base-{c.tenant}", number, max_tokens=8))) for c in clients]
            engines.seconds = 0.0
            await service.cancel(before, tenant="first")
            for client, request_id in ids:
                await client.answer(request_id)
            return engines.asked

    first, *while_both_wait = asyncio.run(run())[:61]
    assert first == "base-first"
    assert while_both_wait.count("base-paying") == pytest.approx(40, rel=0.05)


def test_an_engine_that_dies_is_asked_again_and_then_no_more(tmp_path: Path):
    async def run() -> None:
        engines = VectorEngines()
        async with running_service(tmp_path, VectorTrainer(), engines, retry_after_s=0.01, max_attempts=3) as service:
            (ann,) = await tenants(service, ["ann"])
            truth = await ann.do(ann.sample("base-ann", 0, seed=1))
            engines.lose_next = 2
            again = await ann.do(ann.sample("base-ann", 1, seed=1))
            assert again.sequences[0].tokens.tolist() == truth.sequences[0].tokens.tolist()
            engines.lose_next = 3
            failure = await ann.answer(await service.submit(ann.sample("base-ann", 2)))
            assert failure.category == "server" and "died 3 times" in failure.message
            assert service.stats()["engine_losses"] == 5

    asyncio.run(run())


@pytest.mark.parametrize("running", [True, False])
def test_a_cancelled_sample_ends_at_once_and_frees_its_place(tmp_path: Path, running: bool):
    async def run() -> None:
        engines = VectorEngines(seconds=30)
        async with running_service(tmp_path, VectorTrainer(), engines, max_samples_running=1) as service:
            ann, bob = await tenants(service, ["ann", "bob"])
            ids = [await service.submit(ann.sample("base-ann", n)) for n in range(2)]
            await asyncio.sleep(0.1)
            unwanted = ids[0 if running else 1]
            await service.cancel(unwanted, tenant="bob")  # not bob's
            assert unwanted in service.book.entries
            await service.cancel(unwanted, tenant="ann")
            failure = await ann.answer(unwanted)
            assert isinstance(failure, CallFailure) and failure.message == "cancelled"
            assert await service.result(unwanted, tenant="ann", timeout_s=0.0) == failure
            await service.cancel(unwanted, tenant="ann")
            await service.cancel("req-unknown", tenant="ann")
            await asyncio.sleep(0.1)
            assert engines.num_running == 1  # the other one

    asyncio.run(run())


def test_a_restart_samples_again_what_had_no_answer(tmp_path: Path):
    async def run() -> None:
        async with running_service(tmp_path, VectorTrainer(), VectorEngines(seconds=30)) as service:
            (ann,) = await tenants(service, ["ann"])
            ids = [await service.submit(ann.sample("base-ann", n, seed=n)) for n in range(3)]
            await asyncio.sleep(0.05)
        async with running_service(tmp_path, VectorTrainer(), VectorEngines()) as service:
            ann.service = service
            answers = [await ann.answer(request_id) for request_id in ids]
            assert all(isinstance(answer, CallResult) for answer in answers)
            assert await service.submit(ann.sample("base-ann", 1, seed=1)) == ids[1]

    asyncio.run(run())


def test_a_sampler_that_is_not_there_is_refused(tmp_path: Path):
    async def run() -> None:
        async with running_service(tmp_path, VectorTrainer()) as service:
            ann, bob = await tenants(service, ["ann", "bob"])
            for sampler in ("base-bob", "none"):
                with pytest.raises(Refused, match="there is no sampler"):
                    await service.submit(ann.sample(sampler, 0))

    asyncio.run(run())
