"""A reward over HTTP: POST {"prompt", "response", "label"} to --rm-url, answered by a number or an object (slime's remote_rm)."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import tenacity

from slime_like.config.rollout import RewardConfig

_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 5.0
#: HTTP statuses below 500 that may pass: request timeout, too early, too many requests.
_RETRIED_HTTP = (408, 425, 429)


class RemoteFailure(Exception):
    """Why there is no answer, in words that go behind the server's URL."""


class _Passing(RemoteFailure):
    """A failure that may pass: worth another try."""


class RemoteReward:
    """One session for all samples, --rm-concurrency requests at a time. Create and use it inside one running event loop."""

    def __init__(self, config: RewardConfig):
        self._config = config
        self._slots = asyncio.Semaphore(config.rm_concurrency)
        # No limit and no timeout of aiohttp's own: the semaphore and the deadline below are the only ones.
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None))

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def ask(self, *, prompt: str, response: str, label: Any) -> Any:
        """The server's answer as JSON gave it. Raises RemoteFailure after all tries, or at the deadline.

        The deadline (--reward-timeout-s) counts from when a slot is free, over all tries.
        """
        last = ["nothing"]
        async with self._slots:
            try:
                async with asyncio.timeout(self._config.reward_timeout_s):
                    return await self._retry({"prompt": prompt, "response": response, "label": label}, last)
            except TimeoutError:
                raise RemoteFailure(f"gave no answer within {self._config.reward_timeout_s:g} s (--reward-timeout-s). Last heard: {last[0]}") from None

    async def _retry(self, body: dict, last: list[str]) -> Any:
        retrying = tenacity.AsyncRetrying(
            stop=tenacity.stop_after_attempt(self._config.rm_retries),
            wait=tenacity.wait_random_exponential(multiplier=_FIRST_PAUSE_S, max=_LONGEST_PAUSE_S),
            retry=tenacity.retry_if_exception_type(_Passing),
            reraise=True,
        )
        try:
            async for attempt in retrying:
                with attempt:
                    return await self._post(body, last)
        except _Passing as error:
            raise RemoteFailure(f"failed {self._config.rm_retries} times (--rm-retries). Last: {error}") from error
        raise AssertionError("unreachable: the retry loop returns or raises")

    async def _post(self, body: dict, last: list[str]) -> Any:
        try:
            async with self._session.post(str(self._config.rm_url), json=body) as answer:
                text, status = await answer.text(), answer.status
        except (aiohttp.ClientError, OSError) as error:
            last[0] = f"{type(error).__name__}: {error}"
            raise _Passing(last[0]) from error
        if status != 200:
            last[0] = f"HTTP {status}: {text[:300]}"
            if status >= 500 or status in _RETRIED_HTTP:
                raise _Passing(last[0])
            raise RemoteFailure(f"refused the sample: {last[0]}")
        try:
            return json.loads(text)
        except ValueError:
            raise RemoteFailure(f"gave no JSON: {text[:200]!r}") from None
