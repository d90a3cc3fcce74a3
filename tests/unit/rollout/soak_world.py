"""The soak's surroundings: engine processes that stall, an environment and a reward server that flap."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import multiprocessing
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator

from aiohttp import web

from slime_like.records import FAILED, EngineEndpoint
from slime_like.rollout.sample_builder import SampleBuilder
from slime_like.rollout.tokenizer import load_tokenizer
from slime_like.sglang_backend.client import EngineClient
from slime_like.testing.scripted_engine import Fault, ScriptedEngine

START_S = 60.0
#: Chances: a call of the environment fails; an answer of an engine takes long, is an HTTP error, or a closed line; the
#: reward server's is.
ENVIRONMENT_FAILS, SLOW, ENGINE_FAILS, REWARD_FAILS = 0.25, 0.03, 0.02, 0.2
EVERY = 11


@dataclasses.dataclass
class Seen:
    """What the functions below saw, by prompt."""

    failed: set[int] = dataclasses.field(default_factory=set)
    filtered: list[int] = dataclasses.field(default_factory=list)
    num_environment_errors: int = 0

    def clear(self) -> None:
        """As if nothing had been seen."""
        self.failed.clear()
        self.filtered.clear()
        self.num_environment_errors = 0


SEEN = Seen()
_random = random.Random(1)


async def environment(args, prompt, sampling_params, engine):
    """--custom-generate-function-path: now and then it hangs up, and it takes its time."""
    await asyncio.sleep(_random.random() * 0.05)
    if _random.random() < ENVIRONMENT_FAILS:
        SEEN.num_environment_errors += 1
        raise ConnectionResetError("the environment hung up")
    builder = SampleBuilder(prompt)
    builder.generated(await engine.generate(builder.tokens, sampling_params))
    await asyncio.sleep(0.5 if _random.random() < SLOW else _random.random() * 0.02)
    return builder.finish()


def all_but_some(args, samples) -> tuple[bool, str]:
    """--dynamic-sampling-filter-path"""
    prompt = samples[0].prompt_index
    if prompt % EVERY == 0:
        SEEN.filtered.append(prompt)
    return prompt % EVERY != 0, "some"


def remember_failed(args, groups, source) -> None:
    """--rollout-all-samples-process-path"""
    SEEN.failed.update(
        group.prompt.index for group in groups if any(sample.status == FAILED for sample in group.samples)
    )


def serve_engine(pipe, model: str, seed: int) -> None:
    """A process: tells its URL, and serves until the other end closes."""
    tokenizer, chance = load_tokenizer(model), random.Random(seed)

    def answer(prompt: list[int]):
        text = tokenizer.decode(prompt, skip_special_tokens=True)
        digits = "".join(sorted(character for character in text if character.isdigit()))
        ids = [*tokenizer(digits, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        return ids, [-0.5] * len(ids)

    def fault(body: dict) -> Fault:
        if chance.random() < ENGINE_FAILS:
            return Fault(status=503) if chance.random() < 0.5 else Fault(drop=True)
        return Fault(delay_s=1.0 if chance.random() < SLOW else 0.01 + 0.1 * chance.random())

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(ids, skip_special_tokens=True)

    with ScriptedEngine(answer, fault_for=fault, decode=decode) as engine:
        pipe.send(engine.url)
        until_closed(pipe)


def serve_reward(pipe) -> None:
    """A process: a reward server that fails a fifth of the time, never twice in a row for one sample."""
    chance, failed = random.Random(3), set()

    async def score(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        key = (str(body["prompt"]), body["response"])
        await asyncio.sleep(0.6 if chance.random() < SLOW else 0.02 * chance.random())
        if key not in failed and chance.random() < REWARD_FAILS:
            failed.add(key)
            if chance.random() < 0.5 and request.transport is not None:
                request.transport.close()
            return web.json_response({"error": "flapping"}, status=503)
        failed.discard(key)
        return web.json_response(float(body["response"].replace(" ", "") == body["label"]))

    async def serve() -> None:
        app = web.Application()
        app.router.add_post("/", score)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        pipe.send(f"http://127.0.0.1:{runner.addresses[0][1]}/")
        await asyncio.to_thread(until_closed, pipe)
        await runner.cleanup()

    asyncio.run(serve())


def until_closed(pipe) -> None:
    """Until the process at the other end closes it, or ends."""
    with contextlib.suppress(EOFError):
        pipe.recv()


@contextlib.contextmanager
def served(target: Callable, *args) -> Iterator[tuple[str, int]]:
    """(URL, process id) of one of the servers above, in a process of its own."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=target, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    try:
        assert ours.poll(START_S), f"{target.__name__} did not start within {START_S:g} s"
        yield ours.recv(), process.pid or 0
    finally:
        ours.close()
        process.join(5.0)
        if process.is_alive():
            process.kill()
            process.join(5.0)


class Stalls:
    """Stops one of the processes for a while, again and again; a context manager, after which all of them run."""

    def __init__(self, pids: list[int], seed: int = 2):
        self._pids, self._random, self._over = pids, random.Random(seed), threading.Event()
        self._thread = threading.Thread(target=self._run, name="stalls", daemon=True)
        self.seconds: list[float] = []

    def __enter__(self) -> Stalls:
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._over.set()
        self._thread.join(START_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        while not self._over.wait(self._random.uniform(0.5, 3.0)):
            pid, seconds = self._random.choice(self._pids), self._random.uniform(0.1, 2.5)
            os.kill(pid, signal.SIGSTOP)
            try:
                self._over.wait(seconds)
            finally:
                os.kill(pid, signal.SIGCONT)
            self.seconds.append(seconds)


class SyncedEngines:
    """Syncs as weight_sync/session.py does, without weights."""

    def __init__(self, urls: list[str], pause_mode: str):
        self._clients = [EngineClient(EngineEndpoint(index=i, url=url)) for i, url in enumerate(urls)]
        self._mode = pause_mode

    def sync(self, version: int) -> None:
        for client in self._clients:
            client.pause_generation(self._mode)
        time.sleep(0.02)
        for client in self._clients:
            client.update_weight_version(str(version))
        for client in self._clients:
            client.continue_generation()
