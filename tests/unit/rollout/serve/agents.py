"""Agents of tests, as users write them for --agent-path."""

from __future__ import annotations

import asyncio
import time

import httpx
from openai import AsyncOpenAI, OpenAI


async def two_turns(base_url, prompt, request_kwargs, metadata):
    """Asks, doubts, and rewards the length of the second answer."""
    async with AsyncOpenAI(base_url=base_url, api_key="k", max_retries=0) as client:
        first = await client.chat.completions.create(messages=prompt, **request_kwargs)
        said = {"role": "assistant", "content": first.choices[0].message.content}
        second = await client.chat.completions.create(
            messages=[*prompt, said, {"role": "user", "content": "sure?"}], **request_kwargs
        )
    return {"reward": len(second.choices[0].message.content) / 10, "metadata": {"label": metadata["label"]}}


def blocking(base_url, prompt, request_kwargs, metadata):
    """A plain function, whose client blocks; it posts its result."""
    client = OpenAI(base_url=base_url, api_key=metadata["session_id"], max_retries=0)
    client.chat.completions.create(messages=prompt, **request_kwargs)
    httpx.post(f"{base_url.removesuffix('/v1')}/finish", json={"reward": 0.25}, timeout=30).raise_for_status()


def no_reward(base_url, prompt, request_kwargs, metadata):
    """Leaves the reward to the run's rule."""
    OpenAI(base_url=base_url, api_key="k").chat.completions.create(messages=prompt, **request_kwargs)


async def sub_agents(base_url, prompt, request_kwargs, metadata):
    """Two conversations at a time in one episode."""
    async with AsyncOpenAI(base_url=base_url, api_key="k", max_retries=0) as client:
        await asyncio.gather(
            *(
                client.chat.completions.create(
                    messages=[{"role": "system", "content": name}, *prompt], **request_kwargs
                )
                for name in ("one", "two")
            )
        )
    return {"reward": 1.0}


async def raises(base_url, prompt, request_kwargs, metadata):
    """Does not know what to do."""
    raise KeyError("plan")


def gives_a_number(base_url, prompt, request_kwargs, metadata):
    """What is no result."""
    return 0.5


def says_nothing(base_url, prompt, request_kwargs, metadata):
    """Never asks the policy."""
    return {"reward": 1.0}


def hangs(base_url, prompt, request_kwargs, metadata):
    """Longer than any test waits."""
    time.sleep(30)


async def hangs_in_a_coroutine(base_url, prompt, request_kwargs, metadata):
    """As hangs, but can be ended."""
    await asyncio.sleep(3600)
