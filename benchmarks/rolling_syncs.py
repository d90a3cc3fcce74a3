"""Whether it pays to update engines one after another while the others serve, against all at once.

usage: python -m benchmarks.rolling_syncs [--engines 2 4 8] [--output benchmarks/results/rolling-syncs]
       python -m benchmarks.rolling_syncs --real MEGABYTES     two SGLang engines of this host, with running requests

Engines that answer control requests at once, and load a folder in LOAD_S, asleep; everything else is the real session's
engine side (weight_sync.session.EngineSide) over HTTP. Three ways:

    together    as run_session has it: all pause, all load, all go on once the last one is ready
    rolling     one engine is paused, loads and goes on; then the next
    each        all at once, but each goes on as soon as it is ready itself

and three cases: every engine has a link of its own to the folder; one engine's is half as fast; all share one link, on
which n loads at a time take n times as long each.

    lost        seconds from pause to continue, summed over engines: what is not generated
    sync s      from the first pause to the last continue: what the trainer waits

With --real, lost is what requests say (benchmarks/running_requests.py): seconds of generating, at the pace before,
summed over both engines.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from aiohttp import web

from slime_like.records import EngineEndpoint, WeightsRef
from slime_like.weight_sync.session import EngineSide, PublishOrder

LOAD_S, PARTS, REPEATS = 0.5, 25, 3
OWN, SLOW, SHARED = "links of their own", "one half as fast", "one link for all"
OK = {"success": True}


class Link:
    """What loads are limited by: takes turns in small parts."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def load(self, seconds: float) -> None:
        """Alone it takes so many seconds."""
        for _ in range(PARTS):
            async with self._turn:
                await asyncio.sleep(seconds / PARTS)


class LoadingEngine:
    """Loads over a link; notes from when to when it was paused."""

    def __init__(self, link: Link, load_s: float):
        self._link, self._load_s, self._version, self._since = link, load_s, "0", 0.0
        self.paused: list[tuple[float, float]] = []

    def app(self) -> web.Application:
        """What it answers to."""
        app = web.Application()
        app.router.add_route("*", "/{path}", self._answer)
        return app

    async def _answer(self, request: web.Request) -> web.Response:
        path = request.match_info["path"]
        if path == "pause_generation":
            self._since = time.monotonic()
        elif path == "update_weights_from_disk":
            await self._link.load(self._load_s)
        elif path == "update_weight_version":
            self._version = str((await request.json())["new_version"])
        elif path == "continue_generation":
            self.paused.append((self._since, time.monotonic()))
        elif path == "model_info":
            return web.json_response({"weight_version": self._version})
        return web.json_response(OK)


@contextlib.contextmanager
def serving(case: str, count: int) -> Iterator[tuple[list[LoadingEngine], tuple[EngineEndpoint, ...]]]:
    """Engines of a case, on an event loop in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    runners: list[web.AppRunner] = []

    async def start() -> tuple[list[LoadingEngine], tuple[EngineEndpoint, ...]]:
        shared, engines, endpoints = Link(), [], []
        for index in range(count):
            slow = case == SLOW and index == 0
            engine = LoadingEngine(shared if case == SHARED else Link(), LOAD_S * (2 if slow else 1))
            runners.append(web.AppRunner(engine.app()))
            await runners[-1].setup()
            await web.TCPSite(runners[-1], "127.0.0.1", 0).start()
            engines.append(engine)
            endpoints.append(EngineEndpoint(index=index, url=f"http://127.0.0.1:{runners[-1].addresses[0][1]}"))
        return engines, tuple(endpoints)

    async def stop() -> None:
        for runner in runners:
            await runner.cleanup()

    try:
        yield asyncio.run_coroutine_threadsafe(start(), loop).result(30.0)
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(30.0)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(30.0)


def update(order: PublishOrder) -> None:
    """What a session does of engines, in its order."""
    engines = EngineSide(order)
    engines.begin()
    engines.load()
    engines.finish()


def _one_by_one(order: PublishOrder) -> list[PublishOrder]:
    from dataclasses import replace

    return [replace(order, endpoints=(endpoint,)) for endpoint in order.endpoints]


def rolling(order: PublishOrder) -> None:
    """One after another."""
    for one in _one_by_one(order):
        update(one)


def each(order: PublishOrder) -> None:
    """All at once, none waits for another."""
    with ThreadPoolExecutor(len(order.endpoints)) as pool:
        list(pool.map(update, _one_by_one(order)))


WAYS: dict[str, Callable[[PublishOrder], None]] = {"together": update, "rolling": rolling, "each": each}


def measure(case: str, count: int, way: str) -> dict:
    """A row: medians of a few syncs."""
    lost, taken = [], []
    with serving(case, count) as (engines, endpoints):
        for version in range(1, REPEATS + 1):
            for engine in engines:
                engine.paused.clear()
            order = PublishOrder(
                weights=WeightsRef(version=version), endpoints=endpoints, transport="disk", timeout_s=60.0,
                pause_mode="retract", directory="/nowhere",
            )  # fmt: skip
            WAYS[way](order)
            spans = [engine.paused[0] for engine in engines]
            lost.append(sum(end - begin for begin, end in spans))
            taken.append(max(end for _, end in spans) - min(begin for begin, _ in spans))
    seconds = {"lost_engine_s": statistics.median(lost), "sync_s": statistics.median(taken)}
    return {"case": case, "engines": count, "way": way, **seconds}


def measure_real(megabytes: float, way: str, repeats: int = 5) -> dict:
    """The same of two SGLang engines that load a folder of this host, four requests running on each."""
    import sys

    import numpy as np

    sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts" / "lib"))
    from sync_model import Shape, make_weights, write_model

    from benchmarks.running_requests import RunningRequests, interruption
    from slime_like.sglang_backend.launcher import EngineSpec, launch_engine
    from slime_like.weight_sync.session import version_directory

    lost, taken, draw = [], [], np.random.default_rng(0)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rolling-syncs-")))
        shape = Shape.of_bytes(megabytes * 1e6)
        for version in (1, 2):  # which take turns
            write_model(Path(version_directory(str(folder), version)), shape, make_weights(shape, seed=version))
        flags = {"skip_tokenizer_init": True, "max_total_tokens": 16384}
        engines, askers = [], []
        for index in (0, 1):
            spec = EngineSpec(
                index=index, model_path=version_directory(str(folder), 1), dtype="float32", context_length=1024,
                log_path=str(folder / f"engine-{index}.log"), extra_flags=flags,
            )  # fmt: skip
            engines.append(launch_engine(spec, 120.0))
            stack.callback(engines[-1].close)
            end = engines[-1].endpoint
            askers.append(stack.enter_context(RunningRequests(end.url, end.api_key, 4)))
        for repeat in range(repeats + 1):
            for asker in askers:
                asker.start([draw.integers(5, 300, 64).tolist() for _ in range(4)], None)
            for asker in askers:
                asker.wait_for(40)
            order = PublishOrder(
                weights=WeightsRef(version=1 + repeat % 2), endpoints=tuple(engine.endpoint for engine in engines),
                transport="disk", timeout_s=60.0, pause_mode="in_place", directory=str(folder),
            )  # fmt: skip
            begin = time.monotonic()
            WAYS[way](order)
            end_at = time.monotonic()
            for asker in askers:
                asker.wait_for(20)
            seen = [interruption(asker.stop(), begin, end_at, before_s=2.0) for asker in askers]
            if repeat:
                lost.append(sum(one.lost_s for one in seen))
                taken.append(end_at - begin)
    seconds = {"lost_engine_s": statistics.median(lost), "sync_s": statistics.median(taken)}
    return {"case": f"SGLang, {megabytes:g} MB, one host", "engines": 2, "way": way, "repeats": len(lost), **seconds}


def table(rows: Sequence[dict]) -> str:
    """Markdown: a line for each case and number of engines."""
    heads = ["engines' way to the folder", "engines"]
    heads += [f"{way}: {what}" for way in WAYS for what in ("lost", "sync s")]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    by_key = {(row["case"], row["engines"], row["way"]): row for row in rows}
    for case, count in dict.fromkeys((row["case"], row["engines"]) for row in rows):
        cells = [case, str(count)]
        for way in WAYS:
            row = by_key[case, count, way]
            cells += [f"{row['lost_engine_s']:.2f}", f"{row['sync_s']:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def save(output: Path, rows: list[dict]) -> None:
    """Into NAME.json and NAME.md, beside those of other cases that are there."""
    path, cases = output.with_suffix(".json"), {row["case"] for row in rows}
    kept = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    rows = [*(row for row in kept if row["case"] not in cases), *rows]
    output.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    text = f"Asleep a load alone takes {LOAD_S:g} s; the rest is the real session's engine side, over HTTP\n\n"
    output.with_suffix(".md").write_text(text + table(rows) + "\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--engines", nargs="+", type=int, default=[2, 4, 8], help="How many.")
    parser.add_argument("--output", type=Path, help="Write NAME.json and NAME.md.")
    parser.add_argument("--real", type=float, metavar="MEGABYTES", help="Of the model's weights in fp32.")
    args = parser.parse_args(argv)
    if args.real:
        rows = [measure_real(args.real, way) for way in WAYS]
        print(table(rows))
        if args.output:
            save(args.output, rows)
        return
    rows = [measure(case, count, way) for case in (OWN, SLOW, SHARED) for count in args.engines for way in WAYS]
    print(table(rows))
    if args.output:
        save(args.output, rows)


if __name__ == "__main__":
    main()
