"""The rollout driver alone: its CPU a sample on an engine that answers at once, and its memory with a long queue.

usage: rollout_driver.py [--samples 1000 10000 100000] [--queued 1000 100000] [--output OUTPUT]

The scripted engine runs in a process of its own, and so does every row, so that the CPU (user and system, of
getrusage) and the memory are the driver's. A row "driver" is one rollout of that many samples of 512 tokens in groups
of eight, from drawing prompts to the trainer's records: requests over HTTP, answers, rewards, advantages. In turns with
them the bounds: "library", the same requests and bytes through a session of aiohttp and orjson, and "bytes", the same
bytes through bare sockets and orjson, which is as little as Python can do. parse_us of each row is orjson alone on that
answer in the same process: it tells how fast the host was just then, and ratios to it compare between hosts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import dataclasses
import io
import json
import multiprocessing
import os
import platform
import pstats
import resource
import tempfile
import time
import urllib.parse
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import aiohttp
import numpy as np
import orjson
import psutil
from bare_http import BareConnection
from step_phases import cpu_name

from slime_like.config.checkpoint import CheckpointConfig
from slime_like.config.data import DataConfig
from slime_like.config.model import ModelConfig
from slime_like.config.reward import RewardConfig
from slime_like.config.rollout import RolloutConfig
from slime_like.config.run import RunConfig
from slime_like.records import Prompt
from slime_like.rollout.check_data import check_data
from slime_like.rollout.generate import Sampling
from slime_like.rollout.service import EngineAccess, RolloutService
from slime_like.rollout.train_samples import train_samples_of
from slime_like.testing.scripted_engine import Fault, ScriptedEngine
from slime_like.utils.garbage import collect_seldom

TINY = Path(__file__).parents[1] / "models" / "tiny-qwen3"
GROUP, TOKENS = 8, 512
#: Samples before each measurement: connections are open then, as in every rollout but a run's first.
WARM_UP = 1024
#: The most samples that bounds are measured with: they do not know of any that wait.
BOUND_SAMPLES = 10_000
GOAL_US = 150.0
#: A vocabulary as large models have it: ids of up to six digits.
VOCABULARY = 151_936
_DEADLINE_S = 1800.0


def scripted_answer() -> tuple[list[int], list[float], str]:
    """TOKENS ids, their log-probs (float32, as an engine has them) and a text of four characters a token."""
    rng = np.random.default_rng(0)
    logprobs = (-rng.exponential(1.0, TOKENS)).astype(np.float32).astype(float)
    return rng.integers(0, VOCABULARY, TOKENS).tolist(), logprobs.tolist(), "word" * TOKENS


def engine_of(*, hang: bool) -> ScriptedEngine:
    """hang: it takes requests and never answers."""
    ids, logprobs, text = scripted_answer()
    fault = Fault(delay_s=_DEADLINE_S) if hang else None
    return ScriptedEngine(lambda prompt: (ids, logprobs), decode=lambda ids: text, fault_for=lambda body: fault)


def serve(pipe, *, hang: bool) -> None:
    """The engine's process: sends its url, ends when the pipe closes."""
    with engine_of(hang=hang) as engine, contextlib.suppress(EOFError):
        pipe.send(engine.url)
        pipe.recv()


def run_config(folder: Path, *, num_groups: int, group: int) -> RunConfig:
    """A run on rows of one prompt length, rewarded by the strictest rule."""
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"sort {n:04d}", "label": f"{n:04d}"}) + "\n" for n in range(1000)))
    return RunConfig(
        checkpoint=CheckpointConfig(hf_checkpoint=str(TINY)),
        data=DataConfig(
            prompt_data=str(rows), input_key="prompt", label_key="label", apply_chat_template=True, num_rollout=1
        ),
        rollout=RolloutConfig(
            rollout_batch_size=num_groups,
            n_samples_per_prompt=group,
            rollout_max_response_len=TOKENS,
            rollout_request_timeout_s=_DEADLINE_S,
        ),
        reward=RewardConfig(rm_type="exact"),
        model=ModelConfig(max_position_embeddings=2 * TOKENS),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """How a row is measured. whose_cpu: resource.RUSAGE_SELF or RUSAGE_THREAD."""

    profile: bool = False
    whose_cpu: int = resource.RUSAGE_SELF


class Meter:
    """CPU, seconds and memory between its making and `read`."""

    def __init__(self, whose: int) -> None:
        self._whose, self._before, self._start = whose, resource.getrusage(whose), time.monotonic()
        self._rss = psutil.Process().memory_info().rss

    def read(self, count: int) -> dict[str, float]:
        """A row of `count` pieces; microseconds a piece, and by how much the resident memory grew at most."""
        now, seconds = resource.getrusage(self._whose), time.monotonic() - self._start
        user, system = now.ru_utime - self._before.ru_utime, now.ru_stime - self._before.ru_stime
        return {
            "cpu_us": (user + system) / count * 1e6,
            "user_us": user / count * 1e6,
            "system_us": system / count * 1e6,
            "per_second": count / seconds,
            "rss_growth_bytes": float(now.ru_maxrss * 1024 - self._rss),
        }


def engine_answer() -> bytes:
    """What the scripted engine sends, but for the request's id."""
    ids, logprobs, text = scripted_answer()
    meta = {
        "id": "0" * 32,
        "finish_reason": {"type": "length", "length": TOKENS},
        "prompt_tokens": 20,
        "completion_tokens": TOKENS,
        "weight_version": "default",
        "output_token_logprobs": [[value, token, None] for value, token in zip(logprobs, ids, strict=True)],
    }
    return orjson.dumps({"text": text, "output_ids": ids, "meta_info": meta})


def parse_us(times: int = 3000) -> float:
    """Microseconds of CPU that orjson takes for one answer, here and now."""
    answer, start = engine_answer(), time.process_time()
    for _ in range(times):
        orjson.loads(answer)
    return (time.process_time() - start) / times * 1e6


async def drive(url: str, samples: int, options: Options) -> dict:
    """A row: one rollout of `samples` samples and what trainers get of it."""
    with tempfile.TemporaryDirectory() as folder:
        config = run_config(Path(folder), num_groups=samples // GROUP, group=GROUP)
        source = check_data(config)
    service = RolloutService(config, EngineAccess(router_url=url, router_api_key=None, num_engines=1), source)
    profiler = cProfile.Profile()
    try:
        await service.stream.take(WARM_UP // GROUP)
        meter = Meter(options.whose_cpu)
        if options.profile:
            profiler.enable()
        result = await service.generate(0)
        records = train_samples_of(config, result.groups)
        profiler.disable()
        row = meter.read(samples)
    finally:
        await service.close()
    names = [field.name for field in dataclasses.fields(records[0])]
    values = [getattr(record, name) for record in records for name in names]
    row["record_bytes"] = sum(value.nbytes for value in values if isinstance(value, np.ndarray)) / samples
    if len(records) != samples:
        raise SystemExit(f"rollout_driver: {len(records)} records of {samples} samples")
    if options.profile:
        text = io.StringIO()
        pstats.Stats(profiler, stream=text).strip_dirs().sort_stats("tottime").print_stats(40)
        row["profile"] = text.getvalue()
    return row


async def in_turns(exchange: Callable[[], Awaitable[bytes]], samples: int, options: Options) -> dict:
    """A row of so many exchanges, as many at a time as the driver makes, each answer parsed."""
    at_a_time = RunConfig().engine.sglang_server_concurrency

    async def work(left: Iterator[int]) -> None:
        for _ in left:  # one iterator for all
            if len(orjson.loads(await exchange())["output_ids"]) != TOKENS:
                raise SystemExit("rollout_driver: the engine gave another answer")

    async def all_of(count: int) -> None:
        left = iter(range(count))
        await asyncio.gather(*(work(left) for _ in range(at_a_time)))

    await all_of(WARM_UP)
    meter = Meter(options.whose_cpu)
    await all_of(samples)
    return meter.read(samples)


def request_body() -> bytes:
    """A request as the driver sends it, but for the seed."""
    return orjson.dumps(
        {
            "input_ids": list(range(20)),
            "sampling_params": Sampling.for_training(RolloutConfig(), max_context_tokens=1024, seed="0").request(
                Prompt(index=0, text="", tokens=np.zeros(20, np.int32)), 0
            )
            | {"max_new_tokens": TOKENS},
            "return_logprob": True,
        }
    )


async def library(url: str, samples: int, options: Options) -> dict:
    """A row of the same exchanges through a session of aiohttp."""
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)
    ) as session:
        body, headers = request_body(), {"Content-Type": "application/json"}

        async def exchange() -> bytes:
            async with session.post(f"{url}/generate", data=body, headers=headers) as answer:
                return await answer.read()

        return await in_turns(exchange, samples, options)


async def bytes_only(url: str, samples: int, options: Options) -> dict:
    """A row of the same bytes through bare sockets."""
    place, body, idle = urllib.parse.urlsplit(url), request_body(), []
    head = f"POST /generate HTTP/1.1\r\nHost: {place.netloc}\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    async def exchange() -> bytes:
        if idle:
            connection = idle.pop()
        else:
            _, connection = await asyncio.get_running_loop().create_connection(
                BareConnection, place.hostname, place.port
            )
        answer = await connection.send(request)
        idle.append(connection)
        return answer

    row = await in_turns(exchange, samples, options)
    for connection in idle:
        connection.transport.close()
    return row


async def queue(url: str, prompts: int, options: Options) -> dict:
    """A row: the memory of that many prompts asked for, when none of them is answered yet."""
    with tempfile.TemporaryDirectory() as folder:
        config = run_config(Path(folder), num_groups=prompts, group=GROUP)
        source = check_data(config)
    service = RolloutService(config, EngineAccess(router_url=url, router_api_key=None, num_engines=1), source)
    meter = Meter(options.whose_cpu)
    rollout = asyncio.ensure_future(service.generate(0))
    await asyncio.sleep(1.0)
    while service.stream.num_in_flight == 0:
        await asyncio.sleep(0.1)
    row = meter.read(prompts) | {"tasks": float(len(asyncio.all_tasks()))}
    rollout.cancel()
    await asyncio.gather(rollout, return_exceptions=True)
    await service.close()
    return row


ROWS: dict[str, Callable] = {"driver": drive, "library": library, "bytes": bytes_only, "queue": queue}


def _measure(kind: str, url: str, count: int, options: Options) -> dict:
    collect_seldom()  # as RolloutManager.start
    before = parse_us()
    row = asyncio.run(ROWS[kind](url, count, options))
    return {"kind": kind, "count": count} | row | {"parse_us": (before + parse_us()) / 2}


def _run(pipe, *args) -> None:
    pipe.send(_measure(*args))


def row_beside_the_engine(kind: str, count: int) -> dict:
    """One row with the engine in a thread of this process: the CPU is the driver's thread's; its memory is both's."""
    with engine_of(hang=kind == "queue") as engine:
        row = _measure(kind, engine.url, count, Options(whose_cpu=resource.RUSAGE_THREAD))
    del row["rss_growth_bytes"]
    return row


def row_of(kind: str, count: int, *, profile: bool = False) -> dict:
    """One row, measured in a process of its own with an engine of its own."""
    spawn = multiprocessing.get_context("spawn")
    (engine_end, engine_child), (row_end, row_child) = spawn.Pipe(), spawn.Pipe()
    engine = spawn.Process(target=serve, args=(engine_child,), kwargs={"hang": kind == "queue"}, daemon=True)
    engine.start()
    engine_child.close()
    driver = spawn.Process(
        target=_run, args=(row_child, kind, engine_end.recv(), count, Options(profile=profile)), daemon=True
    )
    try:
        driver.start()
        row_child.close()
        if not row_end.poll(_DEADLINE_S):
            raise SystemExit(f"rollout_driver: the row {kind} of {count} gave nothing within {_DEADLINE_S:g} s")
        return row_end.recv()
    except EOFError:
        raise SystemExit(f"rollout_driver: the row {kind} of {count} ended without a result") from None
    finally:
        engine_end.close()
        for process in (driver, engine):
            process.join(timeout=10)
            process.kill()


def table(rows: list[dict]) -> list[str]:
    """The rows as Markdown; what the driver takes beyond each bound is at the same count."""
    lines = [
        "| row | count | CPU us (user + system) | ÷ parse | a second | memory grew by, MB (records) |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        cpu = f"{row['cpu_us']:.0f} ({row['user_us']:.0f} + {row['system_us']:.0f})"
        grown = f"{row['rss_growth_bytes'] / 1e6:.0f}" if "rss_growth_bytes" in row else ""
        records = f" ({row['record_bytes'] * row['count'] / 1e6:.0f})" if "record_bytes" in row else ""
        lines.append(
            f"| {row['kind']} | {row['count']} | {cpu} | {row['cpu_us'] / row['parse_us']:.2f} |"
            f" {row['per_second']:.0f} | {grown}{records} |"
        )
    return lines


def ratios(rows: list[dict]) -> dict[str, float]:
    """The driver's CPU over each bound's at the largest count that both have, and over the smallest count's own."""
    cpu = {(row["kind"], row["count"]): row["cpu_us"] for row in rows}
    counts = sorted(count for kind, count in cpu if kind == "driver")
    both = max((count for count in counts if count <= BOUND_SAMPLES), default=None)
    over = {f"driver/{kind}": cpu["driver", both] / cpu[kind, both] for kind in ("library", "bytes") if both}
    return over | {"driver_per_sample_last/first": cpu["driver", counts[-1]] / cpu["driver", counts[0]]}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--queued", type=int, nargs="*", default=[1000, 100_000], help="Prompts asked for at once.")
    parser.add_argument("--profile", action="store_true", help="Add a profile of the smallest count, by function.")
    parser.add_argument(
        "--one-process", action="store_true", help="The engine is a thread, and the CPU the driver's thread's."
    )
    parser.add_argument("--output", type=Path, help="Write OUTPUT.json and OUTPUT.md.")
    args = parser.parse_args()
    measure, rows = row_beside_the_engine if args.one_process else row_of, []
    for count in sorted(args.samples):
        kinds = ("driver", "library", "bytes") if count <= BOUND_SAMPLES else ("driver",)
        rows += [measure(kind, count) for kind in kinds]
    rows += [measure("queue", count) for count in args.queued]
    result, driver = ratios(rows), [row["cpu_us"] for row in rows if row["kind"] == "driver"]
    hardware = {"cpu": cpu_name(), "cores": len(os.sched_getaffinity(0)), "system": platform.platform()}
    lines = [
        f"{hardware['cpu']}, {hardware['cores']} cores, {hardware['system']}; load {os.getloadavg()[0]:.1f}",
        "the engine is a thread beside the driver" if args.one_process else "driver and engine are processes",
        "",
        *table(rows),
        "",
        *(f"{name}: {value:.2f}" for name, value in result.items()),
        f"goal {GOAL_US:.0f} us a sample: the driver's least is {min(driver):.0f} us",
    ]
    if args.profile:
        lines += ["", "```", row_of("driver", min(args.samples), profile=True)["profile"].strip(), "```"]
    print("\n".join(lines))
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        record = {
            "hardware": hardware,
            "one_process": args.one_process,
            "load": os.getloadavg()[0],
            "ratios": result,
            "rows": rows,
        }
        args.output.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        args.output.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
