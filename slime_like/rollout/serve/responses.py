"""OpenAI's responses API over chat turns: items in, items out, and the events of a finished answer."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from slime_like.rollout.serve.turn_answer import TurnAnswer
from slime_like.rollout.serve.wire import (
    ApiError,
    TurnRequest,
    logprobs_content,
    parse_chat,
    read_content,
    tool_calls_on_wire,
)


def parse_responses(body: dict, history: Sequence[dict] = ()) -> TurnRequest:
    """The chat turn that a request asks for. history: the messages of previous_response_id. Raises ApiError."""
    instructions = body.get("instructions")
    if instructions is not None and not isinstance(instructions, str):
        raise ApiError("instructions: must be text", param="instructions")
    form = body.get("text") or {}
    if not isinstance(form, dict):
        raise ApiError("text: must be an object", param="text")
    # Instructions are not carried over from the previous response: OpenAI's rule.
    older = [message for message in history if message["role"] != "system"] if instructions else list(history)
    messages = [{"role": "system", "content": instructions}] if instructions else []
    return parse_chat(
        {
            "messages": [*messages, *older, *_messages(body.get("input"))],
            "tools": body.get("tools"),
            "tool_choice": body.get("tool_choice"),
            "chat_template_kwargs": body.get("chat_template_kwargs"),
            "max_completion_tokens": body.get("max_output_tokens"),
            "response_format": form.get("format"),
            "model": body.get("model"),
            "stream": body.get("stream"),
        }
    )


def response(answer: TurnAnswer, model: str, body: dict) -> dict:
    """A finished `response` with its items, ids, log-probs and weight versions."""
    truncated = answer.finish_reason == "length"
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "incomplete" if truncated else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if truncated else None,
        "error": None,
        "model": model,
        "output": _items(answer),
        "instructions": body.get("instructions"),
        "previous_response_id": body.get("previous_response_id"),
        "parallel_tool_calls": True,
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "metadata": {},
        "usage": {
            "input_tokens": len(answer.prompt_ids),
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": len(answer.tokens),
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": len(answer.prompt_ids) + len(answer.tokens),
        },
        "prompt_token_ids": list(answer.prompt_ids),
        "token_ids": list(answer.tokens),
        "logprobs": {"content": logprobs_content(answer.tokens, answer.logprobs)},
        "weight_version": answer.weight_version,
        "weight_versions": [answer.weight_version] * len(answer.tokens),
    }


def events(whole: dict) -> Iterator[tuple[str, dict]]:
    """The stream of a finished response, as (name, data): each item's beginning, its parts at once, its end."""
    number = -1

    def event(kind: str, /, **data: Any) -> tuple[str, dict]:
        nonlocal number
        number += 1
        return kind, {"type": kind, "sequence_number": number, **data}

    begun = whole | {"status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
    yield event("response.created", response=begun)
    yield event("response.in_progress", response=begun)
    for index, item in enumerate(whole["output"]):
        place = {"item_id": item["id"], "output_index": index}
        if item["type"] == "function_call":
            yield event("response.output_item.added", output_index=index, item=item | {"arguments": ""})
            yield event("response.function_call_arguments.delta", **place, delta=item["arguments"])
            yield event(
                "response.function_call_arguments.done", **place, name=item["name"], arguments=item["arguments"]
            )
        elif item["type"] == "message":
            part = item["content"][0]
            inner = place | {"content_index": 0}
            yield event(
                "response.output_item.added", output_index=index, item=item | {"content": [], "status": "in_progress"}
            )
            yield event("response.content_part.added", **inner, part=part | {"text": ""})
            yield event("response.output_text.delta", **inner, delta=part["text"], logprobs=[])
            yield event("response.output_text.done", **inner, text=part["text"], logprobs=[])
            yield event("response.content_part.done", **inner, part=part)
        else:
            yield event("response.output_item.added", output_index=index, item=item)
        yield event("response.output_item.done", output_index=index, item=item)
    yield event("response.incomplete" if whole["status"] == "incomplete" else "response.completed", response=whole)


def _items(answer: TurnAnswer) -> list[dict]:
    items: list[dict] = []
    thinking, text = answer.message.get("reasoning_content"), answer.message["content"]
    calls = tool_calls_on_wire(answer.message)
    if thinking:
        content = [{"type": "reasoning_text", "text": thinking}]
        items.append({"type": "reasoning", "id": f"rs_{uuid.uuid4().hex}", "summary": [], "content": content})
    if text or not calls:
        part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
        items.append(
            {
                "type": "message",
                "id": f"msg_{uuid.uuid4().hex}",
                "role": "assistant",
                "status": "incomplete" if answer.finish_reason == "length" else "completed",
                "content": [part],
            }
        )
    for call in calls:
        items.append(
            {
                "type": "function_call",
                "id": f"fc_{uuid.uuid4().hex}",
                "call_id": call["id"],
                "status": "completed",
                **call["function"],
            }
        )
    return items


def _messages(value: Any) -> list[dict]:
    """Chat messages of the input's items; what one answer said and called is one message again."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        raise ApiError("input: must be text or a list of at least one item", param="input")
    messages: list[dict] = []
    thinking: str | None = None
    for number, item in enumerate(value):
        where = f"input[{number}]"
        if not isinstance(item, dict):
            raise ApiError(f"{where}: must be an object", param=where)
        kind = item.get("type", "message")
        if kind == "reasoning":
            thinking = read_content(_reasoning_parts(item, where), where) or None
        elif kind == "message":
            message = {"role": item.get("role"), "content": read_content(item.get("content"), f"{where}.content")}
            messages.append(message | ({"reasoning_content": thinking} if thinking else {}))
            thinking = None
        elif kind == "function_call":
            call = _call(item, where)
            # Only what follows an answer's text directly belongs to it.
            if not messages or messages[-1].get("role") != "assistant":
                messages.append({"role": "assistant", "content": ""})
                if thinking:
                    messages[-1]["reasoning_content"] = thinking
            messages[-1].setdefault("tool_calls", []).append(call)
            thinking = None
        elif kind == "function_call_output":
            output = item.get("output")
            text = read_content(output, f"{where}.output") if not isinstance(output, dict) else json.dumps(output)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": text})
        else:
            raise ApiError(f"{where}: items of type {kind!r:.80} are not served", param=where)
    return messages


def _reasoning_parts(item: dict, where: str) -> list[dict]:
    parts = item.get("content") or []
    if not isinstance(parts, list) or not all(isinstance(part, dict) for part in parts):
        raise ApiError(f"{where}.content: must be a list of parts", param=f"{where}.content")
    return [{"type": "text", "text": part.get("text")} for part in parts]


def _call(item: dict, where: str) -> dict:
    if not isinstance(item.get("name"), str) or not isinstance(item.get("call_id"), str):
        raise ApiError(f"{where}: a function_call needs name and call_id", param=where)
    function = {"name": item["name"], "arguments": item.get("arguments")}
    return {"id": item["call_id"], "type": "function", "function": function}
