"""An OpenEnv server by HTTP: POST /reset and /step, as openenv 0.10 serves them. Needs no package of theirs."""

from __future__ import annotations

import json
from typing import Any

import aiohttp

from slime_like.rollout.agents.environment import Task, Turn


class OpenEnv:
    """url: `http://host:8000`. field: of the action, which gets the policy's text (`message` for the echo environment).
    said: of the observation, which is what the policy sees; without it all of the observation, as JSON.

    A server keeps one episode a connection at most: run one for each episode at a time, or one that keeps sessions.
    """

    def __init__(self, url: str, field: str = "message", said: str | None = None):
        self._url, self._field, self._said = url.rstrip("/"), field, said
        self._session: aiohttp.ClientSession | None = None

    async def reset(self, seed: int, task: Task) -> Turn:
        """The first observation, behind the row's messages."""
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        answer = await self._post("/reset", {"seed": seed % 2**31})
        return Turn(messages=[*task.messages, {"role": "user", "content": self._text(answer)}])

    async def step(self, answer: dict) -> Turn:
        """The next observation."""
        reply = await self._post("/step", {"action": {self._field: answer["content"]}})
        done = bool(reply.get("done"))
        messages = [{"role": "user", "content": self._text(reply)}]
        return Turn(messages=messages, reward=float(reply.get("reward") or 0.0), done=done)

    async def close(self) -> None:
        """Close the connection."""
        if self._session is not None:
            await self._session.close()

    async def _post(self, path: str, body: dict) -> dict[str, Any]:
        assert self._session is not None, "reset opens it"
        async with self._session.post(self._url + path, json=body) as answer:
            text = await answer.text()
            if answer.status != 200:
                raise RuntimeError(f"{self._url}{path} answered {answer.status}: {text[:300]}")
            return json.loads(text)

    def _text(self, answer: dict) -> str:
        observation = answer.get("observation", {})
        value = observation.get(self._said) if self._said and isinstance(observation, dict) else observation
        return value if isinstance(value, str) else json.dumps(value)
