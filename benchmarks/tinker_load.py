"""Many tenants' mixed calls: p50 and p99 of each kind, how even the tenants' shares are, what memory does.

    python -m benchmarks.tinker_load                         # scripted trainer and engines: the service's own cost
    python -m benchmarks.tinker_load --url http://HOST:PORT  # a real server, by the public SDK (pip install tinker)

A tenant's loop: two forward_backward and an optim_step; every fourth time a sampler of the new weights and samples of
it. The bound that the times are read against is printed beside them: what the calls take where nobody else calls.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import numpy as np
import psutil

from slime_like.tinker.records import Kind
from tests.helpers.tinker_backends import VectorEngines, VectorTrainer
from tests.helpers.tinker_service import Client, rows, running_service

Timed = Callable[[str, Awaitable], Awaitable]
#: One round of a tenant's loop: its number, and what measures a call.
Round = Callable[[int, Timed], Awaitable[None]]

ROWS, TOKENS, SAMPLES = 4, 64, 4


class Measures:
    """Seconds of each call by kind, and rounds by tenant."""

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = collections.defaultdict(list)
        self.rounds: dict[int, int] = collections.defaultdict(int)
        self.memory_mb: list[float] = []

    async def timed(self, kind: str, call: Awaitable) -> object:
        """A call's answer."""
        begun = time.perf_counter()
        answer = await call
        self.seconds[kind].append(time.perf_counter() - begun)
        return answer

    def fairness(self) -> float:
        """Jain's index of the tenants' rounds."""
        counts = np.array(list(self.rounds.values()), dtype=float)
        return float(counts.sum() ** 2 / (len(counts) * (counts**2).sum()))


@contextlib.asynccontextmanager
async def scripted(options: argparse.Namespace) -> AsyncIterator[list[Round]]:
    """The service in this process, with a trainer and engines that sleep."""
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        trainer, engines = VectorTrainer(seconds=options.verb_s), VectorEngines(seconds=options.sample_s)
        url = options.db or None
        settings = {"max_adapters_resident": options.resident}
        async with running_service(Path(folder), trainer, engines, url=url, **settings) as service:
            clients = [
                Client(service, tenant=f"t{n}", session_id=f"s{n}-{time.time_ns()}") for n in range(options.tenants)
            ]

            async def begin(client: Client) -> None:
                await client.open_session()
                await client.do(client.creation(seed=client.number))

            await asyncio.gather(*map(begin, clients))
            yield [_scripted_round(client) for client in clients]
            print_stats(service.stats())


def _scripted_round(client: Client) -> Round:
    async def one(number: int, timed: Timed) -> None:
        for part in range(2):
            work = rows(number + part, ROWS, TOKENS)
            call = client.next(Kind.FORWARD_BACKWARD, model_rows=work, loss="cross_entropy")
            await timed("forward_backward", client.do(call))
        await timed("optim_step", client.do(client.optim_step()))
        if number % 4 == 3:
            sampler = f"{client.session_id}-{client.seq_id}"
            call = client.next(Kind.SAVE_FOR_SAMPLER, sampler_id=sampler)
            await timed("save_weights_for_sampler", client.do(call))
            samples = [client.sample(sampler, seq, max_tokens=16, num_samples=2) for seq in range(SAMPLES)]
            await asyncio.gather(*(timed("asample", client.do(sample)) for sample in samples))

    return one


@contextlib.asynccontextmanager
async def by_sdk(options: argparse.Namespace) -> AsyncIterator[list[Round]]:
    """A server at a URL, each tenant with a client of the public SDK."""
    import tinker

    services = [tinker.ServiceClient(base_url=options.url, api_key=key) for key in options.api_key]
    rest = tinker.RestClient(base_url=options.url, api_key=options.api_key[0])
    base = (await rest.get_server_capabilities()).supported_models[0].model_name
    rounds = []
    for number in range(options.tenants):
        service = services[number % len(services)]
        training = await service.create_lora_training_client(base_model=base, rank=options.rank)
        rounds.append(_sdk_round(tinker, training))
    yield rounds


def _sdk_round(tinker, training) -> Round:
    parameters = tinker.SamplingParams(max_tokens=16, temperature=1.0)

    def datum(seed: int):
        source = np.random.default_rng(seed)
        tokens = source.integers(5, 100, TOKENS + 1)
        inputs = {"target_tokens": tokens[1:].astype(np.int64), "weights": np.ones(TOKENS, np.float32)}
        return tinker.Datum(
            model_input=tinker.ModelInput.from_ints(tokens[:-1].tolist()),
            loss_fn_inputs={name: tinker.TensorData.from_numpy(array) for name, array in inputs.items()},
        )

    async def one(number: int, timed: Timed) -> None:
        for part in range(2):
            data = [datum(ROWS * (number + part) + row) for row in range(ROWS)]
            await timed("forward_backward", training.forward_backward(data, "cross_entropy"))
        await timed("optim_step", training.optim_step(tinker.AdamParams(learning_rate=1e-4)))
        if number % 4 == 3:
            sampler = await timed("save_weights_for_sampler", training.save_weights_and_get_sampling_client())
            prompt = tinker.ModelInput.from_ints([5, 6, 7, 8])
            samples = [sampler.sample(prompt, num_samples=2, sampling_params=parameters) for _ in range(SAMPLES)]
            await asyncio.gather(*(timed("asample", sample) for sample in samples))

    return one


async def load(rounds: list[Round], seconds: float, measures: Measures) -> None:
    """Every tenant's loop until the time is over."""
    deadline = time.monotonic() + seconds

    async def tenant(index: int, one: Round) -> None:
        while time.monotonic() < deadline:
            await one(measures.rounds[index], measures.timed)
            measures.rounds[index] += 1

    async def watch() -> None:
        while True:
            measures.memory_mb.append(psutil.Process().memory_info().rss / 2**20)
            await asyncio.sleep(seconds / 20)

    watcher = asyncio.create_task(watch())
    await asyncio.gather(*(tenant(index, one) for index, one in enumerate(rounds)))
    watcher.cancel()


def print_stats(stats: dict) -> None:
    """What the service counted."""
    keys = ("batches", "batched_passes", "evictions", "reloads", "replays", "snapshots")
    print("service: " + ", ".join(f"{key} {stats[key]}" for key in keys))


def report(measures: Measures, alone: Measures, options: argparse.Namespace) -> None:
    """The table."""
    calls = sum(map(len, measures.seconds.values()))
    print(f"{options.tenants} tenants, {options.seconds:g} s: {calls} calls, {calls / options.seconds:.0f}/s")
    print(f"{'call':<26}{'count':>8}{'p50 ms':>10}{'p99 ms':>10}{'alone p50 ms':>14}{'p50/alone':>11}")
    for kind, seconds in measures.seconds.items():
        middle, late = np.percentile(seconds, [50, 99]) * 1000
        bound = float(np.median(alone.seconds[kind])) * 1000 if alone.seconds[kind] else float("nan")
        print(f"{kind:<26}{len(seconds):>8}{middle:>10.1f}{late:>10.1f}{bound:>14.1f}{middle / bound:>11.1f}")
    memory = measures.memory_mb
    print(f"fairness (Jain, rounds of each tenant): {measures.fairness():.4f}")
    print(f"memory of this process: {memory[len(memory) // 3]:.0f} MB after a third, {memory[-1]:.0f} at the end")


async def main(options: argparse.Namespace) -> None:
    """Alone first, then all."""
    async with (by_sdk if options.url else scripted)(options) as rounds:
        alone, measures = Measures(), Measures()
        await load(rounds[:1], min(10.0, options.seconds / 4), alone)
        await load(rounds, options.seconds, measures)
        report(measures, alone, options)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tenants", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--resident", type=int, default=64, help="models that the scripted trainer holds")
    parser.add_argument("--verb-s", type=float, default=0.002, help="seconds of each of its verbs")
    parser.add_argument("--sample-s", type=float, default=0.02, help="seconds of each of the scripted engines' samples")
    parser.add_argument(
        "--folder", help="where the database and the weights are; default: the system's for temporary files"
    )
    parser.add_argument("--db", help="URL of a database; default: SQLite in the folder")
    parser.add_argument("--url", help="of a real server")
    parser.add_argument("--api-key", action="append", default=[], help="of a tenant of it; several take turns")
    parser.add_argument("--rank", type=int, default=8)
    options = parser.parse_args(arguments)
    if options.url and not options.api_key:
        parser.error("--url needs an --api-key")
    return options


if __name__ == "__main__":
    asyncio.run(main(parse()))
