"""How the router's policies serve episodes of many turns: prefix-cache hits, balance and seconds, on real engines.

usage: session_affinity.py [--sessions 16] [--turns 6] [--repeats 2] [--megabytes 40] [--output
benchmarks/results/session-affinity-cpu.json]

Two SGLang engines behind the real router. Every session begins with one of sessions/4 prompts (four samples a prompt,
as GRPO has them) and grows each turn by the answer and an observation; all play at a time, each with pauses of its own
between its turns, as tools make them. Played twice: prompts that have nothing in common, and prompts behind one long
system message, as agents with tools have it. Policies take turns, each with a fresh router and empty caches.
Hits: cached tokens of all tokens that were sent. Bound: the most that there can be, which is all that was sent or
sampled before in the session, and a beginning that another session sent. Balance: requests of the busier engine over
the mean; 1 is even, 2 is one engine idle. Medians over the repeats; seconds are those of a shared host: compare them
within one run.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the engines share the cores
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "lib")]

import aiohttp  # noqa: E402
from sync_model import Shape, make_weights, write_model  # noqa: E402

from slime_like.rollout.generate import SESSION_HEADER  # noqa: E402
from slime_like.sglang_backend.client import EngineClient  # noqa: E402
from slime_like.sglang_backend.launcher import Engine, EngineSpec, start_engine  # noqa: E402
from slime_like.sglang_backend.router import launch_router  # noqa: E402

POLICIES = ("round_robin", "cache_aware", "manual")
SAMPLES_PER_PROMPT = 4
#: What is played -> tokens of (the system message of all, a prompt's own).
WORKLOADS = {"prompts of their own": (0, 96), "one system message": (240, 48)}
ANSWER_TOKENS, OBSERVATION_TOKENS = 24, 72
LONGEST_PAUSE_S = 0.3
TIMEOUT_S = 300.0
CACHE_TOKENS = 40_000  # of an engine: more than all sessions together


@dataclasses.dataclass(frozen=True)
class Work:
    """What is played; drawn from a seed, the same for every policy."""

    sessions: int
    turns: int
    vocabulary: int
    system_tokens: int
    prompt_tokens: int

    def opening(self, session: int) -> list[int]:
        """A session's prompt, which it shares with the other samples of it, behind the system message of all."""
        prompt = self._tokens(f"prompt {session // SAMPLES_PER_PROMPT}", self.prompt_tokens)
        return [*self._tokens("system", self.system_tokens), *prompt]

    @property
    def bound(self) -> float:
        """The most hits: of each request all but what nobody has sent or sampled before, and its last token."""
        opening, turn = self.system_tokens + self.prompt_tokens, ANSWER_TOKENS + OBSERVATION_TOKENS
        prompts = -(-self.sessions // SAMPLES_PER_PROMPT)
        sent = self.sessions * sum(opening + turn * number for number in range(self.turns))
        new = (
            self.system_tokens + prompts * self.prompt_tokens + (self.sessions - prompts)
        )  # the last of a repeated one
        # Of an answer's last token there is nothing in the cache: it has not been computed with.
        new += self.sessions * (self.turns - 1) * (OBSERVATION_TOKENS + 1)
        return 1 - new / sent

    def observation(self, session: int, turn: int) -> list[int]:
        """What a tool says."""
        return self._tokens(f"observation {session} {turn}", OBSERVATION_TOKENS)

    def _tokens(self, seed: str, count: int) -> list[int]:
        return random.Random(seed).choices(range(5, self.vocabulary), k=count)


@dataclasses.dataclass
class Played:
    """What came of it."""

    seconds: float
    sent_tokens: int
    cached_tokens: int
    #: requests by engine; engines by session
    requests: collections.Counter
    places: dict[int, set]

    def numbers(self, num_engines: int) -> dict[str, float]:
        """What is reported."""
        return {
            "hits": self.cached_tokens / self.sent_tokens,
            "seconds": self.seconds,
            "balance": max(self.requests.values()) * num_engines / self.requests.total(),
            "sessions_on_one_engine": sum(len(engines) == 1 for engines in self.places.values()),
        }


async def play(work: Work, url: str, key: str | None) -> Played:
    """All sessions at a time against a router or an engine."""
    played = Played(0.0, 0, 0, collections.Counter(), collections.defaultdict(set))
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as client:

        async def session(number: int) -> None:
            tokens, pauses = work.opening(number), random.Random(f"pauses {number}")
            for turn in range(work.turns):
                sampling = {"max_new_tokens": ANSWER_TOKENS, "ignore_eos": True, "sampling_seed": number}
                body = {"input_ids": tokens, "sampling_params": sampling, "return_logprob": True}
                async with client.post(
                    f"{url}/generate", json=body, headers={SESSION_HEADER: f"session {number}"}
                ) as answer:
                    answer.raise_for_status()
                    said = await answer.json()
                meta = said["meta_info"]
                played.sent_tokens += len(tokens)
                played.cached_tokens += meta["cached_tokens"]
                played.requests[meta["weight_version"]] += 1  # engines are told apart by it
                played.places[number].add(meta["weight_version"])
                tokens = [*tokens, *said["output_ids"], *work.observation(number, turn)]
                await asyncio.sleep(pauses.uniform(0, LONGEST_PAUSE_S))

        begin = time.monotonic()
        await asyncio.gather(*map(session, range(work.sessions)))
        played.seconds = time.monotonic() - begin
    return played


def with_policy(work: Work, policy: str, engines: list[Engine], folder: str) -> Played:
    """The work behind a fresh router."""
    router = launch_router(policy=policy, log_path=f"{folder}/router-{policy}.log", timeout_s=60)
    try:
        for engine in engines:
            EngineClient(engine.endpoint, timeout_s=TIMEOUT_S).flush_cache(TIMEOUT_S)
            router.register(engine.endpoint, timeout_s=60)
        return asyncio.run(play(work, router.url, router.api_key))
    finally:
        router.close()


@contextlib.contextmanager
def engines_of(model: Path, folder: str, count: int):
    """Real engines of that model, each with a weight version that tells it from the others."""
    engines: list[Engine] = []
    try:
        for index in range(count):
            flags = {"skip_tokenizer_init": True, "max_total_tokens": CACHE_TOKENS, "weight_version": str(index)}
            engines.append(
                start_engine(
                    EngineSpec(
                        index=index,
                        model_path=str(model),
                        dtype="float32",
                        log_path=f"{folder}/engine-{index}.log",
                        context_length=1024,
                        extra_flags=flags,
                    )
                )
            )
        for engine in engines:
            engine.wait_healthy(TIMEOUT_S)
        yield engines
    finally:
        for engine in engines:
            engine.close()


def measure(*, sessions: int, turns: int, repeats: int, megabytes: float) -> dict[str, dict[str, dict[str, float]]]:
    """Workload -> policy -> medians, and the share of the bound."""
    runs: dict[tuple[str, str], list[dict[str, float]]] = collections.defaultdict(list)
    shape = Shape.of_bytes(megabytes * 1e6)
    works = {name: Work(sessions, turns, shape.vocabulary, *sizes) for name, sizes in WORKLOADS.items()}
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / "model", shape, make_weights(shape, seed=0))
        with engines_of(Path(folder) / "model", folder, 2) as engines:
            with_policy(Work(4, 1, shape.vocabulary, 0, 96), "round_robin", engines, folder)  # warms up
            for repeat in range(repeats):
                for name, work in works.items():
                    for policy in POLICIES[repeat % len(POLICIES) :] + POLICIES[: repeat % len(POLICIES)]:
                        numbers = with_policy(work, policy, engines, folder).numbers(len(engines))
                        runs[name, policy].append(numbers)
                        print(f"{name}, {policy}: {numbers}", file=sys.stderr, flush=True)
    results: dict[str, dict[str, dict[str, float]]] = {name: {} for name in works}
    for (name, policy), several in sorted(runs.items()):
        medians = {key: statistics.median(one[key] for one in several) for key in several[0]}
        results[name][policy] = {**medians, "hits_of_bound": medians["hits"] / works[name].bound}
    return results


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sessions", type=int, default=16, help="Episodes at a time.")
    parser.add_argument("--turns", type=int, default=6, help="Answers of each.")
    parser.add_argument("--repeats", type=int, default=2, help="Runs of each policy.")
    parser.add_argument("--megabytes", type=float, default=40, help="fp32 weights of the model, a Qwen3 from a seed.")
    parser.add_argument("--output", type=Path, help="Write the numbers here as JSON.")
    options = parser.parse_args()
    results = measure(
        sessions=options.sessions, turns=options.turns, repeats=options.repeats, megabytes=options.megabytes
    )
    for name, policies in results.items():
        for policy, numbers in policies.items():
            print(f"{name}, {policy:12}" + ", ".join(f"{key} {value:.3g}" for key, value in numbers.items()))
    if options.output:
        hardware = {"system": platform.platform(), "cores": len(os.sched_getaffinity(0))}
        versions = {name: version(name) for name in ("sglang", "sglang-router")}
        shown = {key: value for key, value in vars(options).items() if key != "output"}
        report = {"hardware": hardware, "versions": versions, "options": shown, "results": results}
        options.output.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
