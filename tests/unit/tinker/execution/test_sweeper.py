"""What never comes, who went away, and what is over."""

# Covers slime_like.tinker.execution.registry, slime_like.tinker.execution.verbs,
# slime_like.tinker.store.checkpoints, slime_like.tinker.store.sweeping.

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import text

from slime_like.tinker.errors import Refused
from slime_like.tinker.records import CallFailure, CallResult, Kind
from slime_like.tinker.store.listings import delete_checkpoint
from tests.helpers.tinker_backends import VectorEngines, VectorTrainer
from tests.helpers.tinker_service import Client, plain_losses, running_service

FAST = {"sweep_every_s": 0.05}


async def until(condition: Callable[[], Any], timeout_s: float = 15.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        await asyncio.sleep(0.02)


async def execute(service, statement: str, **values: Any) -> list:
    async with service.database.write() as session:
        result = await session.execute(text(statement), values)
        return list(result) if result.returns_rows else []


def test_a_gap_is_given_up_and_the_model_goes_on(tmp_path: Path):
    async def run() -> None:
        async with running_service(tmp_path, VectorTrainer(), **FAST, gap_timeout_s=0.5) as service:
            client = Client(service)
            await client.open_session()
            await client.do(client.creation())
            late = client.forward_backward(1)
            ids = [await service.submit(client.forward_backward(seed)) for seed in (2, 3)]
            for request_id in ids:
                failure = await client.answer(request_id)
                assert isinstance(failure, CallFailure) and failure.category == "user"
                assert "call 1 of s1:train:0 did not come within 0.5 s" in failure.message
            failure = await client.answer(await service.submit(late))
            assert isinstance(failure, CallFailure) and "came after its place was given up" in failure.message
            assert (await client.do(client.forward_backward(4))).metrics["loss"] == plain_losses([4])[0]

    asyncio.run(run())


def test_a_silent_clients_model_is_saved_and_a_late_call_brings_it_back(tmp_path: Path):
    async def run() -> list[float]:
        trainer, engines = VectorTrainer(), VectorEngines()
        async with running_service(tmp_path, trainer, engines, **FAST, session_timeout_s=60) as service:
            client = Client(service)
            await client.open_session()
            await client.do(client.creation())
            await client.do(client.next(Kind.SAVE_FOR_SAMPLER, sampler_id="mine"))
            before = await client.do(client.sample("mine", 0, seed=1))
            losses = []
            for seed in range(2):
                losses.append((await client.do(client.forward_backward(seed))).metrics["loss"])
                await client.do(client.optim_step())
            assert trainer.models and engines.opened
            await execute(service, "UPDATE sessions SET last_heartbeat = 0")
            await until(lambda: not trainer.models and not engines.opened)
            losses.append((await client.do(client.forward_backward(2))).metrics["loss"])
            after = await client.do(client.sample("mine", 1, seed=1))
            assert after.sequences[0].tokens.tolist() == before.sequences[0].tokens.tolist()
            return losses

    assert asyncio.run(run()) == plain_losses([0, 1, 2])


def test_a_finished_session_leaves_only_its_checkpoints(tmp_path: Path):
    async def run() -> None:
        trainer, engines = VectorTrainer(), VectorEngines()
        async with running_service(tmp_path, trainer, engines, **FAST, snapshot_every_steps=1) as service:
            client = Client(service)
            await client.open_session()
            await client.do(client.creation())
            await client.do(client.forward_backward(1))
            await client.do(client.optim_step())
            path = (await client.do(client.next(Kind.SAVE_WEIGHTS, name="kept")))["path"]
            await client.do(client.next(Kind.SAVE_FOR_SAMPLER, sampler_id="mine"))
            await client.do(client.sample("mine", 0))
            files = tmp_path / "state"
            await until(lambda: len(list(files.glob("s*/*"))) == 2)  # the snapshot and the sampler
            await execute(service, "UPDATE sessions SET finished = 1")
            await until(lambda: not trainer.models and not engines.opened and not list(files.glob("s*/*")))
            with pytest.raises(Refused, match="was finished") as refusal:
                await service.submit(client.forward_backward(2))
            assert refusal.value.status == 410
            # A new session goes on from what was saved.
            other = Client(service, session_id="s2")
            await other.open_session()
            creation = other.creation()
            spec = creation.fields["spec"]
            await other.do(other.call(Kind.CREATE_FROM_STATE, spec=spec, path=path, optimizer=True))
            assert (await other.do(other.forward_backward(2))).metrics["loss"] == plain_losses([1, 2])[1]

    asyncio.run(run())


async def saved_samplers(service, count: int, **fields: Any) -> Client:
    """A client that has stepped and saved so many times: samplers r0, r1, …"""
    client = Client(service)
    await client.open_session()
    await client.do(client.creation())
    for number in range(count):
        await client.do(client.forward_backward(number))
        await client.do(client.optim_step())
        await client.do(client.next(Kind.SAVE_FOR_SAMPLER, sampler_id=f"r{number}", **fields))
    return client


def kept(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("state/samplers/*"))


def test_of_a_models_unnamed_samplers_the_latest_are_kept_and_those_in_use(tmp_path: Path):
    async def run() -> None:
        engines = VectorEngines()
        settings = {"sweep_every_s": 1e9, "max_ephemeral_samplers": 3}
        async with running_service(tmp_path, VectorTrainer(), engines, **settings) as service:
            client = await saved_samplers(service, 8)
            truth = [(await client.do(client.sample(f"r{n}", 0, seed=1))).sequences[0].tokens for n in (1, 7)]
            assert kept(tmp_path) == [f"r{n}" for n in range(8)]
            engines.gate.clear()
            in_use = await service.submit(client.sample("r1", 1, seed=1))
            async with asyncio.timeout(10):
                while not engines.num_running:
                    await asyncio.sleep(0.01)
            for _ in range(2):
                await service.sweeper.superseded_samplers()
            assert kept(tmp_path) == ["r1", "r5", "r6", "r7"]
            engines.gate.set()
            assert (await client.answer(in_use)).result.sequences[0].tokens.tolist() == truth[0].tolist()
            await service.sweeper.superseded_samplers()
            assert kept(tmp_path) == ["r5", "r6", "r7"] == sorted({*engines.opened, "r5", "r6"})
            service._samplers.forget("r1")
            with pytest.raises(Refused, match="--max-ephemeral-samplers") as refusal:
                await service.submit(client.sample("r1", 2))
            assert refusal.value.status == 410
            assert (await client.do(client.sample("r7", 1, seed=1))).sequences[0].tokens.tolist() == truth[1].tolist()
            await service.sweeper.superseded_samplers()
            assert kept(tmp_path) == ["r5", "r6", "r7"]

    asyncio.run(run())


def test_a_sampler_that_follows_its_models_weights_is_answered_by_the_latest(tmp_path: Path):
    async def run() -> None:
        settings = {"sweep_every_s": 1e9, "max_ephemeral_samplers": 1}
        async with running_service(tmp_path, VectorTrainer(), VectorEngines(), **settings) as service:
            client = await saved_samplers(service, 3, sampler_kind="inflight")
            own, latest = [
                (await client.do(client.sample(name, 0, seed=1))).sequences[0].tokens.tolist() for name in ("r0", "r2")
            ]
            assert own != latest
            await service.sweeper.superseded_samplers()
            assert kept(tmp_path) == ["r2"]
            again = await client.do(client.sample("r0", 1, seed=1))
            assert again.sequences[0].tokens.tolist() == latest and again.weights == "r2"

    asyncio.run(run())


def test_one_models_samplers_do_not_supersede_anothers_and_named_ones_stay(tmp_path: Path):
    async def run() -> None:
        settings = {"sweep_every_s": 1e9, "max_ephemeral_samplers": 1}
        async with running_service(tmp_path, VectorTrainer(), VectorEngines(), **settings) as service:
            client = await saved_samplers(service, 2)
            path = (await client.do(client.next(Kind.SAVE_FOR_SAMPLER, name="named")))["path"]
            other = Client(service, number=1)
            await other.do(other.creation())
            await other.do(other.next(Kind.SAVE_FOR_SAMPLER, sampler_id="other"))
            await service.sweeper.superseded_samplers()
            assert kept(tmp_path) == ["other", "r1"]
            (row,) = await execute(service, "SELECT folder FROM checkpoints WHERE path = :path", path=path)
            assert Path(row.folder, "state.npz").is_file()

    asyncio.run(run())


def test_checkpoints_end_with_their_time_or_on_request(tmp_path: Path):
    async def run() -> None:
        async with running_service(tmp_path, VectorTrainer(), **FAST) as service:
            client = Client(service)
            await client.open_session()
            await client.do(client.creation())
            for name, ttl in (("short", 0.4), ("long", None)):
                await client.do(client.next(Kind.SAVE_WEIGHTS, name=name, ttl_seconds=ttl))
            folder = tmp_path / "weights"
            await until(lambda: [path.name[:4] for path in folder.glob("s*/weights/*")] == ["long"])
            gone = client.next(Kind.LOAD_WEIGHTS, path=f"tinker://{client.model_id}/weights/short", optimizer=False)
            failure = await client.answer(await service.submit(gone))
            assert isinstance(failure, CallFailure) and "its time is over" in failure.message
            path = f"tinker://{client.model_id}/weights/long"
            await delete_checkpoint(service.database, path, "ann")
            # Its name is free at once, and only what is there now stays.
            await client.do(client.next(Kind.SAVE_WEIGHTS, name="long"))
            await until(lambda: len(list(folder.glob("s*/weights/*"))) == 1)
            await asyncio.sleep(0.2)
            again = client.next(Kind.LOAD_WEIGHTS, path=path, optimizer=True)
            assert isinstance(await client.answer(await service.submit(again)), CallResult)

    asyncio.run(run())


def test_a_name_is_taken_once_unless_it_is_overwritten(tmp_path: Path):
    async def run() -> None:
        async with running_service(tmp_path, VectorTrainer()) as service:
            client = Client(service)
            await client.open_session()
            await client.do(client.creation())
            await client.do(client.next(Kind.SAVE_WEIGHTS, name="a"))
            for name, message in (
                ("a", "there already"),
                ("../a", "no name for weights"),
                ("..", "no name for weights"),
            ):
                failure = await client.answer(await service.submit(client.next(Kind.SAVE_WEIGHTS, name=name)))
                assert isinstance(failure, CallFailure) and failure.category == "user" and message in failure.message
            await client.do(client.next(Kind.SAVE_WEIGHTS, name="a", overwrite=True))
            await until(lambda: len(list((tmp_path / "weights").glob("s*/weights/*"))) == 1)

    asyncio.run(run())


def test_answers_are_forgotten_but_not_what_brings_a_model_back(tmp_path: Path):
    async def run() -> list[float]:
        losses = []
        async with running_service(tmp_path, VectorTrainer(), **FAST, result_retention_s=0.0) as service:
            client = Client(service)
            await client.open_session()
            await client.do(client.creation())
            for seed in range(3):
                answer = await client.answer(await service.submit(client.forward_backward(seed)))
                assert isinstance(answer, CallResult)
                losses.append(answer.result.metrics["loss"])
                await client.do(client.optim_step())
            await asyncio.sleep(0.3)
            left = await execute(service, "SELECT seq_id FROM requests ORDER BY seq_id")
            assert [seq for (seq,) in left] == [1, 2, 3, 4, 5, 6]
            service.residency.lost()
            losses.append((await client.do(client.forward_backward(3))).metrics["loss"])
        return losses

    assert asyncio.run(run()) == plain_losses([0, 1, 2, 3])


def test_weights_may_lie_where_fsspec_reaches(tmp_path: Path):
    async def run() -> list[float]:
        places = {"state_folder": "memory://state-of-test", "weights_folder": f"file://{tmp_path}/weights"}
        settings = {**places, "max_adapters_resident": 1, "snapshot_every_steps": 1}
        async with running_service(tmp_path, VectorTrainer(), VectorEngines(), **settings) as service:
            clients = [Client(service, number=number) for number in range(2)]
            await clients[0].open_session()
            for client in clients:
                await client.do(client.creation())
            losses = []
            for seed in range(3):
                for client in clients:
                    losses.append((await client.do(client.forward_backward(seed))).metrics["loss"])
                    await client.do(client.optim_step())
            await clients[0].do(clients[0].next(Kind.SAVE_FOR_SAMPLER, sampler_id="mine"))
            assert len((await clients[0].do(clients[0].sample("mine", 0))).sequences) == 1
            return losses[::2]

    assert asyncio.run(run()) == plain_losses([0, 1, 2])
