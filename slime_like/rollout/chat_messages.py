"""Chat messages and tools of a row, as chat templates want them."""

from __future__ import annotations

import json
from typing import Any

from slime_like.errors import DataError
from slime_like.utils.chat_templates import TemplateLimit, apply_template

#: slime's key of an assistant message: 0 leaves it untrained.
STEP_LOSS_MASK = "step_loss_mask"


def read_messages(value: Any, where: str) -> list[dict]:
    """Messages with text content: no null, no parts, arguments of calls as objects where they are JSON text.

    Engines render a request's messages in this form too, and templates of models differ in which other form they take.
    Raises DataError naming the row.
    """
    if not isinstance(value, list) or not value:
        raise DataError(f"{where}: the list of chat messages is empty.")
    return [_message(message, where) for message in value]


def read_tools(value: Any, key: str, where: str) -> list[dict] | None:
    """The row's tools; None without any.

    Many data sets keep them as JSON text, since their rows must be of one type. Raises DataError naming the row.
    """
    tools = value
    if isinstance(value, str) and value.strip():
        try:
            tools = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise DataError(
                f"{where}: {key!r} (--tool-key) is malformed JSON: {error}. It starts with {value.strip()[:60]!r}."
            ) from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{where}: {key!r} (--tool-key) is no list of objects, but {str(tools)[:80]!r}.")
    return tools


def render(tokenizer, messages: list[dict], tools: list[dict] | None, where: str, **kwargs: Any) -> str:
    """The messages and tools as text, through the chat template. Raises DataError naming the row."""
    if not tokenizer.chat_template:
        raise DataError(
            "--apply-chat-template: the tokenizer of --hf-checkpoint has no chat template. Fix: another checkpoint, or"
            " prompts as plain strings."
        )
    if tools is not None and "tools" not in str(tokenizer.chat_template):
        fix = "another checkpoint; or --tool-key with a key that no row has, which leaves them out"
        raise DataError(
            f"{where}: has tools (--tool-key), and the chat template of --hf-checkpoint has no place for them. Fix:"
            f" {fix}."
        )
    try:
        return apply_template(tokenizer, messages, tools=tools, **kwargs)
    except TemplateLimit as error:
        raise DataError(f"{where}: the chat template of --hf-checkpoint is given up: {error}.") from None
    except Exception as error:  # a template may raise anything: it is a program of the model's author
        raise DataError(f"{where}: the chat template refuses the messages: {type(error).__name__}: {error}") from error


def is_trained(message: dict, where: str) -> bool:
    """What an assistant message says of itself (step_loss_mask). Raises DataError for anything but 0 and 1."""
    value = message.get(STEP_LOSS_MASK, 1)
    if value not in (0, 1):
        raise DataError(f"{where}: {STEP_LOSS_MASK!r} is {value!r}: 0 leaves a message untrained, 1 trains it.")
    return bool(value)


def _message(message: Any, where: str) -> dict:
    calls_tools = isinstance(message, dict) and message.get("role") == "assistant" and message.get("tool_calls")
    if not isinstance(message, dict) or "role" not in message or not ("content" in message or calls_tools):
        raise DataError(
            f"{where}: a chat message needs 'role' and 'content' (an assistant's 'tool_calls' will do), but is"
            f" {str(message)[:80]!r}."
        )
    if not isinstance(message["role"], str) or not all(isinstance(key, str) for key in message):
        raise DataError(f"{where}: a chat message's 'role' and keys are texts, but it is {str(message)[:80]!r}.")
    kept = {key: value for key, value in message.items() if value is not None}
    kept["content"] = _text(message.get("content"), where)
    if not kept.get("tool_calls"):
        kept.pop("tool_calls", None)  # some templates only ask whether the key is there
    else:
        if not isinstance(kept["tool_calls"], list) or not all(isinstance(call, dict) for call in kept["tool_calls"]):
            raise DataError(f"{where}: 'tool_calls' is no list of objects, but {str(kept['tool_calls'])[:80]!r}.")
        kept["tool_calls"] = [_call(call) for call in kept["tool_calls"]]
    return kept


def _text(content: Any, where: str) -> str:
    """Text of text, null or parts."""
    if content is None:
        return ""
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        return "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise DataError(f"{where}: a message's 'content' is {str(content)[:80]!r}: only text is taken.")
    return content


def _call(call: dict) -> dict:
    """A tool call without nulls; both OpenAI's form and a bare function are known to templates."""
    kept = {key: value for key, value in call.items() if value is not None}
    if isinstance(kept.get("function"), dict):
        kept["function"] = _call(kept["function"])
    if isinstance(kept.get("arguments"), str):
        try:
            arguments = json.loads(kept["arguments"] or "{}")
        except (ValueError, RecursionError):
            return kept  # what a model wrote may be no JSON; templates take text too
        if isinstance(arguments, dict):
            kept["arguments"] = arguments
    return kept
