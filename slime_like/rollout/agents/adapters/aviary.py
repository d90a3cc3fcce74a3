"""fhaviary's environments (the PyPI package `aviary` is something else): tools, called in the model's own way."""

from __future__ import annotations

import json
from typing import Any

from aviary.core import Environment, ToolCall, ToolCallFunction, ToolRequestMessage

from slime_like.errors import PluginError
from slime_like.rollout.agents.environment import Task, Turn
from slime_like.utils.user_functions import load_function


class Aviary:
    """path: `package.module:Class` of an aviary Environment, made with the row's metadata `aviary` as arguments; or a
    name that aviary knows (`dummy`), made by Environment.from_name.
    """

    def __init__(self, path: str, **options: Any):
        self._options = options
        if ":" in path or "." in path:
            self._make = load_function(path, num_positional=None, flag="--env aviary:")
        elif path:
            self._make = lambda **arguments: Environment.from_name(path, **arguments)
        else:
            raise PluginError("--env aviary: needs package.module:Class, or a name that aviary knows.")
        self._environment: Any = None

    async def reset(self, seed: int, task: Task) -> Turn:
        """Its observations and tools."""
        self._environment = self._make(**self._options, **task.metadata.get("aviary", {}))
        messages, tools = await self._environment.reset()
        offered = [tool.model_dump(exclude_none=True, mode="json", by_alias=True) for tool in tools]
        return Turn(messages=[_plain(message) for message in messages], tools=offered)

    async def step(self, answer: dict) -> Turn:
        """What its tools say; a hint where none was called."""
        calls = answer.get("tool_calls") or []
        if not calls:
            return Turn(messages=[{"role": "user", "content": "Call one of the tools."}])
        request = ToolRequestMessage(
            content=answer["content"],
            tool_calls=[
                ToolCall(
                    id=call["id"],
                    function=ToolCallFunction(name=call["function"]["name"], arguments=call["function"]["arguments"]),
                )
                for call in calls
            ],
        )
        messages, reward, done, truncated = await self._environment.step(request)
        return Turn(
            messages=[_plain(message) for message in messages], reward=float(reward), done=done, truncated=truncated
        )

    async def close(self) -> None:
        """Its own clean-up."""
        if self._environment is not None:
            await self._environment.close()


def _plain(message: Any) -> dict:
    fields = message.model_dump(exclude_none=True, mode="json")
    content = fields.get("content")
    text = content if isinstance(content, str) else json.dumps(content) if content is not None else ""
    kept = {name: fields[name] for name in ("name", "tool_call_id") if name in fields}
    return {"role": fields["role"], "content": text, **kept}
