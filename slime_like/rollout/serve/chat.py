"""Answers in the form of chat completions, whole or as the stream of one that is finished; and of token routes."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator

from slime_like.rollout.serve.turn_answer import TurnAnswer
from slime_like.rollout.serve.wire import TurnRequest, logprobs_content, tool_calls_on_wire, usage


def completion(answer: TurnAnswer, model: str) -> dict:
    """A chat.completion with the ids that were sent and sampled, their log-probs and weight versions."""
    return _head(answer, model, "chat.completion") | {
        "prompt_token_ids": list(answer.prompt_ids),
        "choices": [
            {
                "index": 0,
                "message": _message(answer),
                "prompt_token_ids": list(answer.prompt_ids),
                **_end(answer),
            }
        ],
        "usage": usage(len(answer.prompt_ids), len(answer.tokens)),
    }


def chunks(answer: TurnAnswer, model: str, request: TurnRequest) -> Iterator[tuple[None, dict]]:
    """The same as chat.completion.chunk events: role, thinking, text, calls by name and arguments, the end, usage."""
    head = _head(answer, model, "chat.completion.chunk")
    message = _message(answer)

    def chunk(delta: dict, **more) -> tuple[None, dict]:
        return None, head | {"choices": [{"index": 0, "delta": delta, "finish_reason": None, "logprobs": None} | more]}

    yield chunk({"role": "assistant", "content": ""}, prompt_token_ids=list(answer.prompt_ids))
    if message.get("reasoning_content"):
        yield chunk({"reasoning_content": message["reasoning_content"]})
    if message["content"]:
        yield chunk({"content": message["content"]})
    for number, call in enumerate(message.get("tool_calls", [])):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        yield chunk({"tool_calls": [{"index": number, **call, "function": {"name": name, "arguments": ""}}]})
        yield chunk({"tool_calls": [{"index": number, "function": {"arguments": arguments}}]})
    yield chunk({}, **_end(answer))
    if request.include_usage:
        yield None, head | {"choices": [], "usage": usage(len(answer.prompt_ids), len(answer.tokens))}


def generated(answer: TurnAnswer, model: str) -> dict:
    """The answer of /inference/v1/generate: ids only."""
    return {
        "request_id": f"gen-{uuid.uuid4().hex}",
        "model": model,
        "prompt_token_ids": list(answer.prompt_ids),
        "weight_version": answer.weight_version,
        "choices": [{"index": 0, **_end(answer)}],
        "usage": usage(len(answer.prompt_ids), len(answer.tokens)),
    }


def _head(answer: TurnAnswer, model: str, kind: str) -> dict:
    return {
        "id": f"chatcmpl-{uuid.uuid4().hex}",
        "object": kind,
        "created": int(time.time()),
        "model": model,
        "weight_version": answer.weight_version,
    }


def _message(answer: TurnAnswer) -> dict:
    calls = tool_calls_on_wire(answer.message)
    message = {"role": "assistant", "content": answer.message["content"] or (None if calls else ""), "refusal": None}
    if answer.message.get("reasoning_content"):
        message["reasoning_content"] = answer.message["reasoning_content"]
    return message | ({"tool_calls": calls} if calls else {})


def _end(answer: TurnAnswer) -> dict:
    return {
        "finish_reason": answer.finish_reason,
        "token_ids": list(answer.tokens),
        "weight_versions": [answer.weight_version] * len(answer.tokens),
        "logprobs": {"content": logprobs_content(answer.tokens, answer.logprobs), "refusal": None},
    }
