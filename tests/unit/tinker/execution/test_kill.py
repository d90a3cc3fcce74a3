"""kill -9 of the server's process at random moments of a client's loop."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from slime_like.tinker.records import CallResult
from tests.helpers.tinker_process import ServiceProcess
from tests.helpers.tinker_service import Client, plain_losses


async def losses_under_kills(
    folder: Path, *, num_kills: int, num_models: int, seed: int
) -> tuple[list, ServiceProcess]:
    """Every model's losses, of a client that goes on until the server was killed so often, and 5 steps more."""
    process = ServiceProcess(folder, max_adapters_resident=1, snapshot_every_steps=3)
    process.start()
    source = random.Random(seed)
    clients = [Client(None, number=number) for number in range(num_models)]
    steps_after_kills = 0

    async def kill_again_and_again() -> None:
        for _ in range(num_kills):
            await process.wait_until_up()
            await asyncio.sleep(source.uniform(0.05, 1.0))
            process.kill()
            process.start()

    killer = asyncio.create_task(kill_again_and_again())
    losses: list[list[float]] = [[] for _ in clients]

    async def train(client: Client) -> None:
        nonlocal steps_after_kills
        assert isinstance(await process.do(client.creation(seed=client.number)), CallResult)
        step = after = 0
        while after < 5:
            first, second = client.forward_backward(step), client.optim_step()
            # The step is there before its pass, as chunks of the SDK are.
            answers = await asyncio.gather(process.do(second), process.do(first))
            assert all(isinstance(answer, CallResult) for answer in answers), answers
            losses[client.number].append(answers[1].result.metrics["loss"])
            step, after = step + 1, after + killer.done()

    try:
        await asyncio.gather(*(train(client) for client in clients))
        await killer
    finally:
        killer.cancel()
        process.kill()
    return losses, process


@pytest.mark.parametrize(
    "num_kills",
    [pytest.param(2, marks=pytest.mark.slow), pytest.param(15, marks=[pytest.mark.slow, pytest.mark.long_run])],
)
def test_kill_9_changes_no_loss(memory_folder: Path, num_kills: int):
    losses, process = asyncio.run(losses_under_kills(memory_folder, num_kills=num_kills, num_models=3, seed=num_kills))
    assert process.num_kills == num_kills + 1
    for seed, of_model in enumerate(losses):
        assert len(of_model) > 5
        assert of_model == plain_losses(list(range(len(of_model))), model_seed=seed), seed
