"""Calls are durable before they have an id, idempotent, and executed in order."""

# Covers slime_like.tinker.store.requests.

from __future__ import annotations

import asyncio
import itertools
from pathlib import Path

import pytest

from slime_like.errors import ConfigError
from slime_like.tinker.errors import Refused
from slime_like.tinker.records import NO_UNEMBED, CallFailure, Kind, StillWaiting
from slime_like.tinker.store.database import Database
from tests.helpers.postgres import postgres_server
from tests.helpers.tinker_backends import VectorEngines, VectorTrainer
from tests.helpers.tinker_service import Client, plain_losses, running_service


def test_losses_are_those_of_a_plain_loop(tmp_path: Path):
    async def run() -> list[float]:
        async with running_service(tmp_path, VectorTrainer()) as service:
            client = Client(service)
            await client.open_session()
            assert await client.do(client.creation()) == {"model_id": "s1:train:0", "notice": NO_UNEMBED}
            losses = []
            for seed in range(5):
                losses.append((await client.do(client.forward_backward(seed))).metrics["loss"])
                await client.do(client.optim_step())
            return losses

    assert asyncio.run(run()) == plain_losses(list(range(5)))


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_calls_run_by_seq_id_however_they_arrive(tmp_path: Path, order: tuple[int, ...]):
    """Measured of the SDK: chunks 2, 3, 1, then optim_step 4."""

    async def run() -> tuple[list, list]:
        trainer = VectorTrainer()
        async with running_service(tmp_path, trainer) as service:
            client = Client(service)
            await client.open_session()
            await client.do(client.creation())
            calls = [
                client.forward_backward(1),
                client.forward_backward(2),
                client.optim_step(),
                client.forward_backward(3),
            ]
            ids = {index: await service.submit(calls[index]) for index in order}
            again = {index: await service.submit(calls[index]) for index in order}
            assert again == ids
            answers = [await client.answer(ids[index]) for index in range(4)]
            return trainer.log, [answer.result for answer in answers]

    log, results = asyncio.run(run())
    assert [verb[0] for verb in log[:5]] == ["create", "passes", "passes", "step", "passes"]
    assert results[3].metrics["loss"] != results[0].metrics["loss"]


def test_an_answer_is_waited_for_and_stays(tmp_path: Path):
    async def run() -> None:
        async with running_service(tmp_path, VectorTrainer(seconds=0.2)) as service:
            client = Client(service)
            await client.open_session()
            request_id = await service.submit(client.creation())
            waiting = await service.result(request_id, tenant="ann", timeout_s=0.01)
            assert isinstance(waiting, StillWaiting)
            assert await service.result(request_id, tenant="bob", timeout_s=0.01) is None
            assert await service.result("req-unknown", tenant="ann", timeout_s=0.01) is None
            first = await client.answer(request_id)
            assert first == await client.answer(request_id)

    asyncio.run(run())


def test_another_tenants_model_and_a_wrong_kind_are_refused(tmp_path: Path):
    async def run() -> list[int]:
        statuses = []
        async with running_service(tmp_path, VectorTrainer()) as service:
            ann, bob = Client(service), Client(service, tenant="bob", session_id="s2")
            await ann.open_session()
            await bob.open_session()
            await ann.do(ann.creation())
            stranger = Client(service, tenant="bob", session_id="s2")
            stranger.session_id = "s1"
            await service.submit(ann.forward_backward(1))
            for call in (
                stranger.forward_backward(1),  # ann's session
                bob.forward_backward(1),  # a model that is not there
                ann.call(Kind.OPTIM_STEP, seq_id=1, adam={"learning_rate": 1.0}),  # call 1 was a pass
                ann.call(Kind.OPTIM_STEP, seq_id=0, adam={"learning_rate": 1.0}),
            ):
                with pytest.raises(Refused) as refusal:
                    await service.submit(call)
                statuses.append(refusal.value.status)
        return statuses

    assert asyncio.run(run()) == [404, 404, 400, 400]


def test_a_failed_call_fails_alone(tmp_path: Path):
    async def run() -> None:
        trainer = VectorTrainer()
        async with running_service(tmp_path, trainer) as service:
            ann, bob = Client(service), Client(service, tenant="bob", session_id="s2")
            for client in (ann, bob):
                await client.open_session()
                await client.do(client.creation())
            trainer.refuse.add(bob.model_id)
            ids = [await service.submit(client.forward_backward(1)) for client in (ann, bob)]
            good, bad = await ann.answer(ids[0]), await bob.answer(ids[1])
            assert good.result.metrics["loss"] == plain_losses([1])[0]
            assert isinstance(bad, CallFailure) and bad.category == "user" and "refused" in bad.message
            trainer.refuse.clear()
            assert (await bob.do(bob.forward_backward(1))).metrics["loss"] == plain_losses([1])[0]

    asyncio.run(run())


def test_a_model_that_cannot_be_created_is_none(tmp_path: Path):
    async def run() -> None:
        async with running_service(tmp_path, VectorTrainer()) as service:
            client = Client(service)
            await client.open_session()
            creation, early = client.creation(rank=65), client.forward_backward(1)
            ids = [await service.submit(creation), await service.submit(early)]
            failures = [await client.answer(request_id) for request_id in ids]
            assert all(isinstance(failure, CallFailure) for failure in failures)
            assert "rank 65 is more than 64" in failures[0].message and "was not created" in failures[1].message
            with pytest.raises(Refused, match="there is no model"):
                await service.submit(client.optim_step())

    asyncio.run(run())


def test_a_sampler_of_its_own_samples_what_was_trained(tmp_path: Path):
    async def run() -> None:
        async with running_service(tmp_path, VectorTrainer(), VectorEngines()) as service:
            client = Client(service)
            await client.open_session()
            await client.do(client.creation())
            await client.do(client.next(Kind.SAVE_FOR_SAMPLER, sampler_id="sampler-1"))
            await client.do(client.forward_backward(1))
            await client.do(client.optim_step())
            await client.do(client.next(Kind.SAVE_FOR_SAMPLER, sampler_id="sampler-2"))
            answers = [await client.do(client.sample(f"sampler-{n}", 0, seed=3, num_samples=2)) for n in (1, 1, 2)]
            tokens = [answer.sequences[1].tokens.tolist() for answer in answers]
            assert tokens[0] == tokens[1] != tokens[2]

    asyncio.run(run())


@pytest.mark.slow
def test_on_postgresql_as_on_sqlite(tmp_path: Path):
    """The same call twice at one moment is one; a second server is refused; a new one goes on."""

    async def run(url: str) -> list[float]:
        losses = []
        for part in range(3):
            settings = {"max_adapters_resident": 1, "snapshot_every_steps": 2, "sweep_every_s": 0.05}
            async with running_service(tmp_path, VectorTrainer(), url=url, **settings) as service:
                client = Client(service, seq_id=4 * part)
                if part == 0:
                    await client.open_session()
                    creation = client.creation()
                    ids = await asyncio.gather(*(service.submit(creation) for _ in range(8)))
                    assert len(set(ids)) == 1
                rival = Database(url)
                with pytest.raises(ConfigError, match="another server uses"):
                    await rival.claim(wait_s=0.2)
                await rival.close()
                for step in range(2):
                    calls = [client.forward_backward(2 * part + step), client.optim_step()]
                    ids = await asyncio.gather(*(service.submit(call) for call in (*calls[::-1], *calls, *calls)))
                    assert len(set(ids)) == 2
                    losses.append((await client.do(calls[0])).metrics["loss"])
                    await client.do(calls[1])
                await client.open_sampler(f"base-{part}")
                samples = [client.sample(f"base-{part}", 3_000_000_000 + n) for n in range(5)]
                await asyncio.gather(*(client.do(sample) for sample in samples))
        return losses

    with postgres_server() as url:
        assert asyncio.run(run(url)) == plain_losses(list(range(6)))


def test_a_second_server_on_one_file_is_refused(tmp_path: Path):
    async def run() -> None:
        async with running_service(tmp_path, VectorTrainer()) as service:
            rival = Database(str(tmp_path / "server.db"))
            with pytest.raises(ConfigError, match="another server uses"):
                await rival.claim(wait_s=0.2)
            await service.close()
            await service.database.close()
            await rival.claim(wait_s=1.0)
            await rival.close()

    asyncio.run(run())
