"""SGLang's own parsers read answers; what they cannot read is said, not raised."""

# Covers slime_like.sglang_backend.answer_parser too: the process that the reader starts.

from __future__ import annotations

import asyncio
import importlib.util

import pytest

from slime_like.config.agents import AgentConfig
from slime_like.config.families import FAMILIES
from slime_like.errors import PluginError
from slime_like.rollout.agents.answers import PARSERS, AnswerReader

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "calc",
            "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}},
        },
    }
]
has_sglang = pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")


def read(*texts: str, family: str | None = "qwen3", tools=TOOLS, **flags):
    """What one reader makes of the texts."""

    async def run():
        reader = AnswerReader(AgentConfig(env="x", **flags), family)
        try:
            return [await reader.read(text, tools) for text in texts], reader._pool is not None
        finally:
            await reader.close()

    return asyncio.run(run())


def test_without_tools_and_thinking_nothing_is_started():
    (answer,), started = read("<calc>1+2</calc>", tools=None)
    assert answer.message == {"role": "assistant", "content": "<calc>1+2</calc>"} and not started
    (answer,), started = read('<tool_call>{"name": "calc"}</tool_call>', env_tool_call_parser="none")
    assert answer.problem is None and "tool_calls" not in answer.message and not started


def test_every_family_has_its_parsers():
    assert set(PARSERS) == set(FAMILIES)
    with pytest.raises(PluginError, match="--env-tool-call-parser NAME"):
        read("hello", family=None)


@has_sglang
@pytest.mark.slow
def test_calls_and_thinking_of_qwen3():
    answers, _ = read(
        "<think>\nhm\n</think>\n\nLet me see.\n"
        '<tool_call>\n{"name": "calc", "arguments": {"expression": "1+2"}}\n</tool_call>',
        '<tool_call>\n{"name": "calc", "arguments": {\'expression\'}}\n</tool_call>',
        '<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call>',
        "just text",
        "<tool_call>\n</tool_call>\u0000\ud7ff🙂",
    )
    call, malformed, unknown, plain, rubbish = answers
    assert call.problem is None and call.message["reasoning_content"].strip() == "hm"
    assert call.message["content"].strip() == "Let me see."
    function = {"name": "calc", "arguments": {"expression": "1+2"}}
    assert call.message["tool_calls"] == [{"id": "call_0", "type": "function", "function": function}]
    for answer in (malformed, unknown, rubbish):
        assert answer.problem and "tool_calls" not in answer.message
    assert "(calc)" in unknown.problem
    assert plain.problem is None and plain.message == {"role": "assistant", "content": "just text"}


@has_sglang
@pytest.mark.slow
def test_calls_of_glm_and_an_unknown_parser():
    text = "<tool_call>calc\n<arg_key>expression</arg_key>\n<arg_value>1+2</arg_value>\n</tool_call>"
    (answer,), _ = read(text, family="glm4_moe")
    assert answer.message["tool_calls"][0]["function"] == {"name": "calc", "arguments": {"expression": "1+2"}}
    with pytest.raises(PluginError, match="--env-tool-call-parser no_such_parser is unknown. Known: .*qwen25"):
        read(text, env_tool_call_parser="no_such_parser")
