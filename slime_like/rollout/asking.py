"""One HTTP question with tries, pauses and a deadline: what clients of engines and of reward servers have in common."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import AnyStr

import aiohttp
import tenacity

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0
#: What a server says that is busy: request timeout, too early, too many requests.
BUSY = frozenset({408, 425, 429})


class NoAnswer(Exception):
    """Why there is none. kind: "deadline", "tries" (all of them failed) or "refused"; last: what was heard last."""

    def __init__(self, kind: str, last: str):
        super().__init__(f"{kind}: {last}")
        self.kind, self.last = kind, last


class _Passing(Exception):
    """A failure that may pass: worth another try."""


def unlimited_session(**options) -> aiohttp.ClientSession:
    """A session without limits and timeouts of aiohttp's own: the caller's semaphore and deadline are the only ones."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), **options
    )


async def ask(
    exchange: Callable[[], Awaitable[tuple[AnyStr, int]]],
    *,
    slots: asyncio.Semaphore,
    tries: int,
    timeout_s: float,
    passing: frozenset[int] = frozenset(),
) -> AnyStr:
    """The body of a 200 answer. exchange: asks once; (body, HTTP status). Raises NoAnswer.

    Asked again, after pauses that are drawn: broken connections, every 5xx, and the statuses in `passing`. The deadline
    counts from when a slot is free, over all tries.
    """
    last = ["nothing"]
    async with slots:
        try:
            async with asyncio.timeout(timeout_s):
                return await _until_answered(functools.partial(_once, exchange, last, passing), tries, last)
        except TimeoutError:
            raise NoAnswer("deadline", last[0]) from None


async def _until_answered(once: Callable[[], Awaitable[AnyStr]], tries: int, last: list[str]) -> AnyStr:
    try:
        return await once()
    except _Passing as error:
        failure = error  # most requests are done by now: tenacity's bookkeeping is for those that are not
    retrying = tenacity.AsyncRetrying(
        stop=tenacity.stop_after_attempt(tries),
        wait=tenacity.wait_random_exponential(multiplier=_FIRST_PAUSE_S, max=_LONGEST_PAUSE_S),
        retry=tenacity.retry_if_exception_type(_Passing),
        reraise=True,
    )
    try:
        async for attempt in retrying:
            with attempt:
                if attempt.retry_state.attempt_number == 1:
                    raise failure
                return await once()
    except _Passing as error:
        raise NoAnswer("tries", last[0]) from error
    raise AssertionError("unreachable: the retry loop returns or raises")


async def _once(
    exchange: Callable[[], Awaitable[tuple[AnyStr, int]]], last: list[str], passing: frozenset[int]
) -> AnyStr:
    try:
        body, status = await exchange()
    except (aiohttp.ClientError, OSError) as error:
        last[0] = f"{type(error).__name__}: {error}"
        raise _Passing(last[0]) from error
    if status == 200:
        return body
    text = body.decode(errors="replace") if isinstance(body, bytes) else body
    last[0] = f"HTTP {status}: {text[:300]}"
    if status >= 500 or status in passing:
        raise _Passing(last[0])
    raise NoAnswer("refused", last[0])
