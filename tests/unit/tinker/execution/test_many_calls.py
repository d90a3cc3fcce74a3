"""Random schedules of many tenants give each the numbers that it would have alone; memory does not grow with calls."""

from __future__ import annotations

import asyncio
import collections
import gc
import random
from pathlib import Path

import psutil
import pytest

from slime_like.tinker.records import CallResult, Kind
from tests.helpers.tinker_backends import VectorTrainer
from tests.helpers.tinker_service import Client, plain_losses, rows, running_service


@pytest.mark.parametrize("seed", range(4))
def test_any_schedule_gives_each_tenant_its_own_numbers(memory_folder: Path, seed: int):
    """5 tenants send their calls in any order, some twice, to a trainer of 2 places that dies now and then."""
    source = random.Random(seed)

    async def run() -> tuple[list[list[float]], VectorTrainer, dict]:
        trainer = VectorTrainer()
        trainer.lose_at = {source.randrange(20, 90) for _ in range(4)}
        settings = {"max_adapters_resident": 2, "snapshot_every_steps": source.choice([1, 3, 100]), "max_attempts": 9}
        async with running_service(memory_folder, trainer, **settings) as service:
            clients = [Client(service, tenant=f"t{n}", session_id=f"s{n}", number=n) for n in range(5)]
            calls: list[tuple[Client, object]] = []
            for client in clients:
                await client.open_session()
                await service.submit(client.creation(seed=client.number))
                for step in range(6):
                    calls += [(client, client.forward_backward(step)), (client, client.optim_step())]
                    if step == 3:
                        model_rows = rows(step)
                        calls.append((client, client.next(Kind.FORWARD, model_rows=model_rows, loss="cross_entropy")))
            source.shuffle(calls)
            calls += source.sample(calls, 10)

            async def send(client: Client, call) -> tuple[str, str]:
                await asyncio.sleep(source.random() * 0.3)
                request_id = await service.submit(call)
                assert isinstance(await client.answer(request_id), CallResult)
                return f"{client.tenant}-{call.seq_id}", request_id

            pairs = await asyncio.gather(*(send(client, call) for client, call in calls))
            assert len(set(pairs)) == len({name for name, _ in pairs}) == 65, "one future a call"
            losses = []
            for client in clients:
                of_client = sorted(
                    (call.seq_id, call) for owner, call in calls[:65] if owner is client and call.kind in PASSES
                )
                losses.append([(await client.do(call)).metrics["loss"] for _, call in of_client])
            return losses, trainer, service.stats()

    losses, trainer, stats = asyncio.run(run())
    for number, of_client in enumerate(losses):
        truth = plain_losses(list(range(6)), model_seed=number)
        # The forward pass after step 3 sees the weights after it.
        assert of_client[:4] + of_client[5:] == truth
        assert of_client[4] != truth[3]
    assert trainer.most_models <= 2 and stats["trainer_losses"] >= 1 and stats["replays"] > 0


PASSES = {Kind.FORWARD_BACKWARD, Kind.FORWARD}


@pytest.mark.slow
@pytest.mark.long_run
def test_memory_is_flat_over_ten_thousand_calls(memory_folder: Path):
    async def run() -> list[float]:
        sizes = []
        settings = {
            "max_adapters_resident": 2,
            "result_retention_s": 1.0,
            "sweep_every_s": 0.5,
            "session_timeout_s": 1e9,
        }
        trainer = VectorTrainer()
        trainer.log = collections.deque(maxlen=10)  # it would grow with the calls
        async with running_service(memory_folder, trainer, **settings) as service:
            clients = [Client(service, tenant=f"t{n}", session_id=f"s{n}") for n in range(8)]
            for client in clients:
                await client.open_session()
                await client.do(client.creation())

            async def two(client: Client, seed: int) -> None:
                ids = [await service.submit(client.forward_backward(seed, num_rows=8, num_tokens=128))]
                ids.append(await service.submit(client.optim_step()))
                for request_id in ids:
                    assert isinstance(await client.answer(request_id), CallResult)

            for number in range(10_000 // 16):
                await asyncio.gather(*(two(client, number) for client in clients))
                if number % 62 == 0:
                    gc.collect()
                    sizes.append(psutil.Process().memory_info().rss / 2**20)
            assert not service.book.entries and not service.book.loads
        return sizes

    sizes = asyncio.run(run())
    print("MB:", [round(size, 1) for size in sizes])
    assert max(sizes[3:]) - sizes[3] < 6
