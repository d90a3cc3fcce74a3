"""Requests that stream from an engine while something is done to it, and what that did to them.

They are asked in a process of its own, so that the time of a token is when it came, not when a busy thread looked.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import json
import multiprocessing
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

#: (time.monotonic(), tokens so far), one for each that came
Arrivals = list[tuple[float, int]]
START_S = 60.0
#: A request's tokens at most: more than any measurement waits for.
MAX_TOKENS = 800


@dataclass(frozen=True)
class Interruption:
    """What a stretch of time did to requests that ran through it. All in seconds beyond a usual decode step, but for
    step_s, which that is.

    silent_s: the longest time in which none of them got a token. next_token_s, next_token_max_s: until a request went
    on, mean and most over requests. lost_s: of generating, at the rate before: what a slower engine loses counts too.
    tokens: what they had when it began. running: requests.
    """

    step_s: float
    silent_s: float
    next_token_s: float
    next_token_max_s: float
    lost_s: float
    tokens: int
    running: int


def interruption(arrivals: Sequence[Arrivals], begin: float, end: float, *, before_s: float = 1.0) -> Interruption:
    """Of what happened from `begin` to `end`. before_s: how long before that the usual step is taken from.

    Tokens that a request had before, and that it was asked for again, are no new ones.
    """
    fresh = [_fresh(one) for one in arrivals]
    steps = [
        after - before
        for one in fresh
        for (before, _), (after, _) in zip(one, one[1:], strict=False)
        if begin - before_s <= before and after <= begin
    ]
    step_s = statistics.median(steps)
    gaps = [_longest_gap([when for when, _ in one], begin, end) for one in fresh]
    every = sorted(when for one in fresh for when, _ in one)
    silent_from, silent_until = _longest_gap(every, begin, end)
    last = max(end, *(until for _, until in gaps))
    lost_s = (last - begin) - (_count(fresh, last) - _count(fresh, begin)) * step_s / len(fresh)
    waits = [max(0.0, until - since - step_s) for since, until in gaps]
    return Interruption(
        step_s=step_s,
        silent_s=max(0.0, silent_until - silent_from - step_s),
        next_token_s=statistics.mean(waits),
        next_token_max_s=max(waits),
        lost_s=lost_s,
        tokens=_count(fresh, begin),
        running=len(fresh),
    )


def _fresh(arrivals: Arrivals) -> Arrivals:
    """Without those that brought no token more than there had been."""
    kept: Arrivals = []
    for when, count in arrivals:
        if not kept or count > kept[-1][1]:
            kept.append((when, count))
    return kept


def _longest_gap(times: Sequence[float], begin: float, end: float) -> tuple[float, float]:
    """(from, until) of the longest time between two neighbours that reaches into `begin` to `end`."""
    pairs = [(low, high) for low, high in zip(times, times[1:], strict=False) if high > begin and low < end]
    return max(pairs, key=lambda pair: pair[1] - pair[0])


def _count(arrivals: Sequence[Arrivals], moment: float) -> int:
    """Tokens of all requests at a moment."""
    return sum(one[place - 1][1] for one in arrivals if (place := bisect.bisect_right([t for t, _ in one], moment)))


class RunningRequests:
    """So many requests at a time on one engine, again and again; a context manager.

    An answer that the engine ends is gone on with once `hold` is over, without its last token, as
    rollout/continuing.py does.
    """

    def __init__(self, url: str, api_key: str | None, count: int):
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._counts = context.Array("i", count)
        self._held, self._over = context.Event(), context.Event()
        where = (url.rstrip("/"), api_key)
        self._process = context.Process(
            target=_serve, args=(theirs, where, self._counts, self._held, self._over), daemon=True
        )

    def __enter__(self) -> RunningRequests:
        self._process.start()
        return self

    def __exit__(self, *_) -> None:
        self._over.set()
        with contextlib.suppress(BrokenPipeError):  # it has ended by an error of its own
            self._ours.send(None)
        self._process.join(START_S)
        if self._process.is_alive():
            self._process.kill()

    def start(self, prompts: Sequence[Sequence[int]], adapter: str | None) -> None:
        """Ask. prompts: token ids of each request."""
        assert len(prompts) == len(self._counts), "one prompt each"
        self._over.clear()
        for number in range(len(prompts)):
            self._counts[number] = 0
        more: dict[str, Any] = {"lora_path": adapter} if adapter else {}
        self._ours.send(([list(prompt) for prompt in prompts], more))

    def wait_for(self, more_tokens: int) -> None:
        """Until each has so many more than now."""
        goals, deadline = [count + more_tokens for count in self._counts], time.monotonic() + START_S
        while any(count < goal for count, goal in zip(self._counts, goals, strict=True)):
            if time.monotonic() > deadline or not self._process.is_alive():
                raise SystemExit(f"running requests: {list(self._counts)} tokens came, not {goals}, in {START_S:g} s")
            time.sleep(0.01)

    def hold(self, is_held: bool) -> None:
        """Whether an answer that was ended waits before it goes on."""
        if is_held:
            self._held.set()
        else:
            self._held.clear()

    def stop(self) -> list[Arrivals]:
        """End them; when their tokens came."""
        self._over.set()
        if not self._ours.poll(START_S):
            raise SystemExit(f"running requests did not end within {START_S:g} s")
        return self._ours.recv()


def _serve(pipe, where: tuple, counts, held, over) -> None:
    """The process."""
    while (what := pipe.recv()) is not None:
        pipe.send(asyncio.run(_all((*where, *what), counts, held, over)))


async def _all(what: tuple, counts, held, over) -> list[Arrivals]:
    import aiohttp

    url, api_key, prompts, more = what
    arrivals: list[Arrivals] = [[] for _ in prompts]
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(None), read_bufsize=2**22) as http:

        async def ask(number: int, prompt: list[int]) -> None:
            before: list[int] = []
            while True:
                sampling = {"temperature": 1.0, "max_new_tokens": MAX_TOKENS - len(before), "ignore_eos": True}
                body = {"input_ids": [*prompt, *before], "sampling_params": sampling, "stream": True} | more
                part: list[int] = []
                reason = None
                async with http.post(f"{url}/generate", json=body) as answer:
                    answer.raise_for_status()
                    async for line in answer.content:
                        if not line.startswith(b"data: {"):
                            continue
                        event = json.loads(line[6:])
                        if "error" in event:
                            raise RuntimeError(f"the engine says {event}")
                        ids, count = event["output_ids"], event["meta_info"]["completion_tokens"]
                        part = ids if len(ids) == count else [*part, *ids]
                        arrivals[number].append((time.monotonic(), len(before) + len(part)))
                        counts[number] = max(counts[number], len(before) + len(part))
                        reason = event["meta_info"]["finish_reason"]
                if reason is None or reason["type"] != "abort":
                    raise RuntimeError(f"an answer ended by itself after {len(before) + len(part)} tokens: {reason}")
                before = [*before, *part][:-1]
                while held.is_set():
                    await asyncio.sleep(0.002)

        tasks = [asyncio.create_task(ask(number, prompt)) for number, prompt in enumerate(prompts)]
        ended = asyncio.create_task(asyncio.to_thread(over.wait))
        done, _ = await asyncio.wait([*tasks, ended], return_when=asyncio.FIRST_COMPLETED)
        for task in done - {ended}:
            task.result()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return arrivals
