"""A prompt goes through the engine once, before the samples of its group ask for it together.

Requests that an engine takes into one batch do not see what the others of it compute: eight samples of a prompt that
come at once are eight passes over it, and only later ones find it in the cache. The first sample that has a slot asks
for the pass, and the others wait for it in theirs. SGLang does the same for its own parameter `n`, which would give all
samples one seed.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import dataclasses
from collections.abc import Awaitable, Callable, Iterator

import aiohttp
import numpy as np

from slime_like.config.rollout import RolloutConfig
from slime_like.config.tree import ConfigTree
from slime_like.records import Prompt

#: Tokens that samples would compute again, from which the request is worth its few milliseconds.
_WORTH_TOKENS = 512


class _Prefill:
    """The pass of one group's prompt."""

    def __init__(self, prompt: Prompt):
        self._body = {
            "input_ids": np.ascontiguousarray(prompt.tokens, dtype=np.int64),
            "sampling_params": {"max_new_tokens": 0},
        }
        self._asked: asyncio.Task | None = None

    async def wait(self, post: Callable[[dict], Awaitable[object]]) -> None:
        """Ask for it, where that was not done yet, and wait for the answer."""
        if self._asked is None:
            self._asked = asyncio.ensure_future(self._ask(post))
        await asyncio.wait([self._asked])

    def close(self) -> None:
        """Nobody waits any more."""
        if self._asked is not None:
            self._asked.cancel()

    async def _ask(self, post: Callable[[dict], Awaitable[object]]) -> None:
        with contextlib.suppress(aiohttp.ClientError, OSError):  # whoever asks for an answer finds out, and tries again
            await post(self._body)


_OF_GROUP: contextvars.ContextVar[_Prefill | None] = contextvars.ContextVar("prefill", default=None)


@contextlib.contextmanager
def prefilled(prompt: Prompt) -> Iterator[None]:
    """Requests that tasks made in this block send (`after_prefill`) wait for the prompt's own pass."""
    prefill = _Prefill(prompt)
    token = _OF_GROUP.set(prefill)
    try:
        yield
    finally:
        _OF_GROUP.reset(token)
        prefill.close()


async def after_prefill(post: Callable[[dict], Awaitable[object]]) -> None:
    """Return when the engine has the prompt of this task's group, or when asking for it has failed.

    post: sends a body on the way that the request itself will take.
    """
    if (prefill := _OF_GROUP.get()) is not None:
        await prefill.wait(post)


def is_worth(prompt: Prompt, num_samples: int) -> bool:
    """Whether its samples would compute much of it again."""
    return len(prompt.tokens) * (num_samples - 1) >= _WORTH_TOKENS


def with_prefill(config: ConfigTree, num_engines: int) -> RolloutConfig:
    """The flags with `auto` decided: on where all samples of a prompt reach the engine that has it, and it keeps it."""
    asked, engine = config.rollout.share_prefill, config.engine
    if asked == "auto":
        to_one = num_engines == 1 or (
            config.router_policy == "cache_aware" and not config.loss.use_rollout_routing_replay
        )
        keeps = not (engine.sglang.get("disable_radix_cache") or config.observability.deterministic)
        asked = "on" if to_one and keeps else "off"
    return dataclasses.replace(config.rollout, share_prefill=asked)
