"""A reward over HTTP: POST {"prompt", "response", "label"} to --rm-url, answered by a number or an object (slime's
remote_rm).
"""

from __future__ import annotations

import asyncio
import functools
import json
from typing import Any

from slime_like.config.reward import RewardConfig
from slime_like.rollout.asking import BUSY, NoAnswer, ask, unlimited_session


class RemoteFailure(Exception):
    """Why there is no answer, in words that go behind the server's URL."""


class RemoteReward:
    """One session for all samples, --rm-concurrency requests at a time.

    Create and use it inside one running event loop.
    """

    def __init__(self, config: RewardConfig):
        self._config = config
        self._slots = asyncio.Semaphore(config.rm_concurrency)
        self._session = unlimited_session()

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def ask(self, *, prompt: str, response: str, label: Any) -> Any:
        """The server's answer as JSON gave it. Raises RemoteFailure after all tries, or at the deadline.

        The deadline (--reward-timeout-s) counts from when a slot is free, over all tries.
        """
        config = self._config
        try:
            text = await ask(
                functools.partial(self._exchange, {"prompt": prompt, "response": response, "label": label}),
                slots=self._slots, tries=config.rm_retries, timeout_s=config.reward_timeout_s, passing=BUSY,
            )  # fmt: skip
        except NoAnswer as error:
            why = {
                "deadline": (
                    f"gave no answer within {config.reward_timeout_s:g} s (--reward-timeout-s). Last heard:"
                    f" {error.last}"
                ),
                "tries": f"failed {config.rm_retries} times (--rm-retries). Last: {error.last}",
                "refused": f"refused the sample: {error.last}",
            }
            raise RemoteFailure(why[error.kind]) from error
        try:
            return json.loads(text)
        except ValueError:
            raise RemoteFailure(f"gave no JSON: {text[:200]!r}") from None

    async def _exchange(self, body: dict) -> tuple[str, int]:
        async with self._session.post(str(self._config.rm_url), json=body) as answer:
            return await answer.text(), answer.status
