"""Five hundred episodes at a time: what a turn costs, how long the slowest wait, and that memory stays flat."""

from __future__ import annotations

import asyncio
import time

import aiohttp
import psutil
import pytest

from slime_like.testing.scripted_engine import ScriptedEngine
from tests.unit.rollout.serve.served import says, served

pytestmark = [pytest.mark.long_run, pytest.mark.timeout(600)]
NUM_EPISODES, NUM_TURNS = 500, 8


async def play(client: aiohttp.ClientSession, name: str, waits: list[float]) -> int:
    """An episode of all turns: how many tokens its one row trains."""
    messages = [{"role": "user", "content": f"episode {name}"}]
    for turn in range(NUM_TURNS):
        begin = time.monotonic()
        async with client.post(f"/sessions/{name}/v1/chat/completions", json={"messages": messages}) as answer:
            body = await answer.json()
            assert answer.status == 200, body
        waits.append(time.monotonic() - begin)
        messages += [body["choices"][0]["message"], {"role": "user", "content": f"and {turn}?"}]
    async with client.post(f"/sessions/{name}/finish", json={"reward": 1}) as answer:
        body = await answer.json()
    (sample,) = body["samples"]
    assert body["num_turns"] == NUM_TURNS and body["violations"] == []
    return sum(sample["loss_mask"])


async def one_round(url: str, number: int) -> tuple[list[float], set[int]]:
    waits: list[float] = []
    connector, timeout = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=300)
    async with aiohttp.ClientSession(url, connector=connector, timeout=timeout) as client:
        trained = await asyncio.gather(*(play(client, f"{number}-{index}", waits) for index in range(NUM_EPISODES)))
    return sorted(waits), set(trained)


def test_five_hundred_episodes_of_eight_turns(tokenizer):
    num_answer_tokens = len(tokenizer("it is four", add_special_tokens=False)["input_ids"]) + 1
    with ScriptedEngine(says(tokenizer, "it is four")) as engine, served(engine) as running:
        process = psutil.Process(running.pid)
        resident = []
        for number in range(3):
            cpu, begin = sum(process.cpu_times()[:2]), time.monotonic()
            waits, trained = asyncio.run(one_round(running.url, number))
            engine.requests.clear()
            engine.headers.clear()
            assert trained == {NUM_TURNS * num_answer_tokens} and len(waits) == NUM_EPISODES * NUM_TURNS
            resident.append(process.memory_info().rss / 2**20)
            cpu_ms = 1000 * (sum(process.cpu_times()[:2]) - cpu) / len(waits)
            print(
                f"round {number}: {len(waits)} turns in {time.monotonic() - begin:.1f} s, {cpu_ms:.2f} CPU ms a turn,"
                f" median {waits[len(waits) // 2]:.2f} s, p99 {waits[int(len(waits) * 0.99)]:.2f} s,"
                f" {resident[-1]:.0f} MiB resident"
            )
    assert cpu_ms < 30, "a turn of some 100 tokens"
    assert resident[2] < resident[1] * 1.1 + 8, f"memory grows from round to round: {resident} MiB"
