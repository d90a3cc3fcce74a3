"""From what was sampled to a chat message: thinking, text and tool calls, by SGLang's own parsers."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
from collections.abc import Sequence

from slime_like.config.agents import AgentConfig
from slime_like.errors import PluginError
from slime_like.rollout.rewards.pool import WorkerPool

_WORKER = "slime_like.sglang_backend.answer_parser"
_PARSE_S = 20.0
#: Family -> (SGLang's parser of tool calls, of thinking), where the flags do not say.
PARSERS: dict[str, tuple[str, str | None]] = {
    "qwen2": ("qwen25", None),
    "qwen3": ("qwen25", "qwen3"),
    "qwen3_moe": ("qwen25", "qwen3"),
    "llama": ("llama3", None),
    "glm4": ("glm", None),
    "glm4_moe": ("glm45", "glm45"),
    "deepseek_v3": ("deepseekv3", "deepseek-v3"),
}
NO_PARSER = "none"


@dataclasses.dataclass(frozen=True)
class Answer:
    """message: as it stands in the conversation. problem: why what looks like a tool call is none, or None."""

    message: dict
    problem: str | None = None


class AnswerReader:
    """Reads answers, inside one event loop; SGLang's parsers get a process when the first answer needs them."""

    def __init__(self, config: AgentConfig, family: str | None):
        tool, reasoning = PARSERS.get(family or "", (None, None))
        self._tool_parser = _named(config.env_tool_call_parser, tool)
        self._reasoning_parser = _named(config.env_reasoning_parser, reasoning)
        self._always_reasons = config.env_reasoning_parser not in (None, NO_PARSER)
        self._pool: WorkerPool | None = None

    async def read(self, text: str, tools: Sequence[dict] | None) -> Answer:
        """The message. text: what was sampled, without the token that ended it; tools: what could be called.

        Raises PluginError if there are tools and no parser for them.
        """
        if tools and not self._tool_parser:
            raise PluginError(
                "the environment gives tools, and no parser of their calls is known for this model."
                " Fix: --env-tool-call-parser NAME, or none to leave calls to the environment."
            )
        parses_tools = bool(tools) and self._tool_parser != NO_PARSER
        thinks = self._reasoning_parser and (self._always_reasons or "</think>" in text or "<think>" in text)
        if not (parses_tools or thinks):
            return Answer({"role": "assistant", "content": text})
        task = {
            "text": text,
            "tools": list(tools or []) if parses_tools else [],
            "tool_parser": self._tool_parser,
            "reasoning_parser": self._reasoning_parser if thinks else None,
        }
        return _message(text, await self._ask(task))

    async def opening(self, names: Sequence[str]) -> str | None:
        """How a call of one of these functions begins, as far as all begin alike; None if the parser does not tell."""
        if not self._tool_parser or self._tool_parser == NO_PARSER:
            return None
        task = {"openings_of": list(names), "tool_parser": self._tool_parser, "reasoning_parser": None}
        result = await self._ask(task)
        return os.path.commonprefix((result or {}).get("openings", [])) or None

    async def _ask(self, task: dict) -> dict | None:
        """What the parsers' process answers; None at its deadline. Raises PluginError for a parser that is none."""
        if self._pool is None:
            if importlib.util.find_spec("sglang") is None:
                raise PluginError(
                    "tool calls are read by SGLang's parsers, and sglang is not installed here. Fix: install it, or"
                    " --env-tool-call-parser none --env-reasoning-parser none, which leave it to the environment."
                )
            self._pool = WorkerPool(1, module=_WORKER)
        result = await self._pool.run(task, timeout_s=_PARSE_S)
        if result and "unknown" in result:
            flag = {"tool_parser": "--env-tool-call-parser", "reasoning_parser": "--env-reasoning-parser"}
            name = f"{flag[result['unknown']]} {task[result['unknown']]}"
            raise PluginError(f"{name} is unknown. Known: {', '.join(result['known'])}, {NO_PARSER}.")
        return result

    async def close(self) -> None:
        """End the process."""
        if self._pool is not None:
            await self._pool.close()


def _named(flag: str | None, default: str | None) -> str | None:
    return default if flag is None else flag


def _message(text: str, result: dict | None) -> Answer:
    if result is None or "error" in result:
        why = result["error"] if result else f"reading it took longer than {_PARSE_S:g} s"
        return Answer({"role": "assistant", "content": text}, problem=why)
    message: dict = {"role": "assistant", "content": result["content"]}
    if result["reasoning"]:
        message["reasoning_content"] = result["reasoning"]
    calls = []
    for number, (name, arguments) in enumerate(result["calls"]):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError as error:
            return Answer(message | {"content": text}, problem=f"the arguments of {name} are no JSON: {error}")
        # An object, not JSON text: chat templates walk through it.
        function = {"name": name, "arguments": arguments}
        calls.append({"id": f"call_{number}", "type": "function", "function": function})
    return Answer(message | ({"tool_calls": calls} if calls else {}), problem=result["problem"])
