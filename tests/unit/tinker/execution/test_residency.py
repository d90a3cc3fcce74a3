"""Whatever dies, and whenever: the numbers are those of a loop that nothing disturbs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slime_like.tinker.records import CallResult, Kind
from tests.helpers.tinker_backends import VectorTrainer
from tests.helpers.tinker_crashes import Moments, MortalService
from tests.helpers.tinker_service import Client, plain_losses, rows, running_service


async def two_clients_loop(do, service, models: int = 2) -> list[Any]:
    """Two models of one tenant, which take turns; passes, steps, weights saved and loaded. Every answer."""
    clients = [Client(service, number=number) for number in range(models)]
    answers = [await do(client.creation(seed=client.number)) for client in clients]
    for step in range(3):
        for client in clients:
            answers.append(await do(client.forward_backward(10 * step + client.number)))
            answers.append(await do(client.forward_backward(10 * step + 5)))
            answers.append(await do(client.optim_step()))
    first = clients[0]
    answers.append(await do(first.forward_backward(77)))  # lost by the load
    answers.append(await do(first.next(Kind.SAVE_WEIGHTS, name="now")))
    answers.append(await do(first.optim_step(learning_rate=1.0)))
    answers.append(
        await do(first.next(Kind.LOAD_WEIGHTS, path=f"tinker://{first.model_id}/weights/now", optimizer=True))
    )
    for client in clients:
        answers.append(await do(client.forward_backward(99)))
        answers.append(await do(client.optim_step()))
        answers.append(await do(client.next(Kind.FORWARD, model_rows=rows(98), loss="x")))
    return answers


def numbers(answers: list[Any]) -> list:
    """What can be compared bitwise."""
    plain = []
    for answer in answers:
        assert isinstance(answer, CallResult), answer
        result = answer.result
        if isinstance(result, dict):
            plain.append({key: value for key, value in result.items() if key != "size_bytes"})
        else:
            plain.append((result.metrics, [np.asarray(values).tobytes() for values in result.log_probs]))
    return plain


async def mortal_run(folder: Path, last: int | None, **settings: Any) -> tuple[list, MortalService, list[str]]:
    folder.mkdir()
    moments = Moments()
    mortal = MortalService(folder, settings, moments)
    await mortal.start()
    await Client(mortal.service).open_session()
    moments._last = None if last is None else moments.count + last
    start = moments.count
    # Client reads only the ids from the service, so that it may outlive it.
    answers = await two_clients_loop(mortal.do, mortal.service)
    names = moments.names[start:]
    moments._last = None
    await mortal.close()
    return numbers(answers), mortal, names


#: Snapshots by steps alone, so that every run has the same moments.
OFTEN = {"snapshot_every_s": 1e9, "snapshot_share": 1e9}
SETTINGS = {
    **OFTEN,
    "max_adapters_resident": 1,
    "snapshot_every_steps": 2,
    "batch_window_s": 0.0,
    "resident_slack_tokens": 0,
}


@pytest.mark.parametrize(
    "stride",
    [pytest.param(29, marks=pytest.mark.slow), pytest.param(1, marks=[pytest.mark.slow, pytest.mark.long_run])],
)
def test_a_kill_at_every_moment_changes_no_number(memory_folder: Path, stride: int):
    """Before and after each commit and each verb of the trainer, evictions and reloads among them."""
    truth, calm, names = asyncio.run(mortal_run(memory_folder / "calm", None, **SETTINGS))
    assert calm.num_deaths == 0
    assert {"before save", "after load", "before commit", "after step"} <= set(names)
    for last in range(1, len(names) + 1, stride):
        answers, mortal, _ = asyncio.run(mortal_run(memory_folder / str(last), last, **SETTINGS))
        assert mortal.num_deaths == 1, f"moment {last} of {len(names)}"
        assert answers == truth, f"moment {last} of {len(names)}: {names[last - 1]}"


def test_a_trainer_that_dies_at_any_verb_changes_no_number(memory_folder: Path):
    tmp_path = memory_folder

    async def run(name: str, lose_at: set[int]) -> tuple[list, VectorTrainer]:
        trainer = VectorTrainer()
        trainer.lose_at = lose_at
        async with running_service(tmp_path / name, trainer, **SETTINGS) as service:
            client = Client(service)
            await client.open_session()

            async def do(call):
                return await client.answer(await service.submit(call))

            return numbers(await two_clients_loop(do, service)), trainer

    for name in ("calm", "every"):
        (tmp_path / name).mkdir()
    truth, trainer = asyncio.run(run("calm", set()))
    for verb in range(1, trainer.num_verbs, 11):
        (tmp_path / str(verb)).mkdir()
        assert asyncio.run(run(str(verb), {verb}))[0] == truth, f"verb {verb}"
    assert asyncio.run(run("every", set(range(9, 2000, 9))))[0] == truth


def test_a_call_that_the_trainer_always_dies_over_fails_and_others_go_on(tmp_path: Path):
    async def run() -> None:
        trainer = VectorTrainer()
        async with running_service(tmp_path, trainer, max_attempts=3) as service:
            client = Client(service)
            await client.open_session()
            await client.do(client.creation())
            trainer.lose_at = set(range(trainer.num_verbs + 1, trainer.num_verbs + 4))
            failure = await client.answer(await service.submit(client.forward_backward(1)))
            assert failure.category == "server" and "3 times" in failure.message
            assert (await client.do(client.forward_backward(2))).metrics["loss"] == plain_losses([2])[0]
            assert service.stats()["trainer_losses"] == 3

    asyncio.run(run())


def test_more_models_than_places_train_as_if_each_were_alone(tmp_path: Path):
    async def run() -> tuple[list, int, dict]:
        trainer = VectorTrainer()
        async with running_service(tmp_path, trainer, max_adapters_resident=2) as service:
            clients = [Client(service, number=number) for number in range(5)]
            await clients[0].open_session()
            for client in clients:
                await client.do(client.creation(seed=client.number))
            losses: list[list[float]] = [[] for _ in clients]
            for step in range(4):
                for client in clients:
                    losses[client.number].append((await client.do(client.forward_backward(step))).metrics["loss"])
                    await client.do(client.optim_step())
            return losses, trainer.most_models, service.stats()

    losses, most, stats = asyncio.run(run())
    assert losses == [plain_losses([0, 1, 2, 3], model_seed=seed) for seed in range(5)]
    assert most == 2 and stats["evictions"] >= 12 and stats["reloads"] >= 12


def test_bodies_are_kept_until_a_snapshot_has_them(tmp_path: Path):
    from sqlalchemy import text

    async def run() -> list[list[int]]:
        async with running_service(tmp_path, VectorTrainer(), **OFTEN, snapshot_every_steps=2) as service:
            client = Client(service)
            await client.open_session()
            await client.do(client.creation())
            kept = []
            for seed in range(4):
                await client.do(client.forward_backward(seed))
                await client.do(client.optim_step())
                await client.do(client.next(Kind.FORWARD, model_rows=client.creation().rows, loss="x"))
                async with service.training.trainer_lock, service.database.read() as session:
                    query = text("SELECT seq_id FROM requests WHERE body IS NOT NULL ORDER BY seq_id")
                    kept.append([seq for (seq,) in await session.execute(query)])
            folders = [path.name for path in (tmp_path / "state").glob("s1*/*")]
            assert folders == ["snapshot-11"]
            return kept

    assert asyncio.run(run()) == [[1, 2], [], [7, 8], []]


def test_an_end_in_the_middle_of_a_verb_loses_and_doubles_nothing(tmp_path: Path):
    """close() waits for what the trainer does; where that takes too long, nothing of it is saved."""

    async def run(folder: Path, close_timeout_s: float) -> list[float]:
        folder.mkdir()
        losses = []
        for part in range(4):
            trainer = VectorTrainer(seconds=0.1)
            async with running_service(folder, trainer, close_timeout_s=close_timeout_s) as service:
                client = Client(service)
                if part == 0:
                    await client.open_session()
                    await client.do(client.creation())
                client.seq_id = 2 * part
                losses.append((await client.do(client.forward_backward(part))).metrics["loss"])
                request_id = await service.submit(client.optim_step())
                await asyncio.sleep(0.05)  # the trainer is at it
            async with running_service(folder, VectorTrainer()) as service:
                client.service = service
                assert isinstance(await client.answer(request_id), CallResult)
        return losses

    for timeout_s in (30.0, 0.0):
        assert asyncio.run(run(tmp_path / str(timeout_s), timeout_s)) == plain_losses([0, 1, 2, 3])


def test_snapshots_that_take_long_are_rare(tmp_path: Path):
    async def run(seconds: float) -> int:
        class SlowToSave(VectorTrainer):
            async def save_state(self, model_id: str, folder: str, *, optimizer: bool) -> None:
                await asyncio.sleep(seconds)
                await super().save_state(model_id, folder, optimizer=optimizer)

        async with running_service(tmp_path / str(seconds), SlowToSave(), snapshot_every_steps=1) as service:
            client = Client(service)
            await client.open_session()
            await client.do(client.creation())
            for step in range(6):
                await client.do(client.forward_backward(step))
                await client.do(client.optim_step())
            return service.stats()["snapshots"]

    (tmp_path / "1.0").mkdir()
    assert asyncio.run(run(1.0)) == 1  # the next may come after 10 s


@pytest.mark.parametrize("places", [1, 2])
def test_clients_that_train_all_parameters_take_turns_in_their_places(tmp_path: Path, places: int):
    """Three of them and one with adapters, which need not make way; each has the numbers that it has alone."""

    async def run() -> VectorTrainer:
        trainer = VectorTrainer()
        async with running_service(
            tmp_path, trainer, max_whole_models_resident=places, resident_slack_tokens=0
        ) as service:
            clients = [Client(service, tenant=f"t{n}", session_id=f"s{n}") for n in range(4)]
            for client, rank in zip(clients, (0, 0, 0, 8), strict=True):
                await client.open_session()
                await client.do(client.creation(rank=rank))

            async def train(client: Client, seeds: list[int]) -> list[float]:
                losses = []
                for seed in seeds:
                    losses.append((await client.do(client.forward_backward(seed))).metrics["loss"])
                    await client.do(client.optim_step())
                return losses

            seeds = [list(range(10 * n, 10 * n + 5)) for n in range(4)]
            losses = await asyncio.gather(*map(train, clients, seeds))
            assert losses == [plain_losses(own) for own in seeds]
            assert service.stats()["evictions"] > 0
        return trainer

    trainer = asyncio.run(run())
    assert trainer.most_whole_models == places and trainer.most_models == places + 1
    assert [verb for verb in trainer.log if verb == ("create", "s3:train:0")] == [("create", "s3:train:0")]
