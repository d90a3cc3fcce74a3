"""Items of the responses API become chat messages and back."""

from __future__ import annotations

import pytest

from slime_like.rollout.serve.responses import events, parse_responses, response
from slime_like.rollout.serve.turn_answer import TurnAnswer
from slime_like.rollout.serve.wire import ApiError

CALL = {"id": "c00001000", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}


def answer(message: dict, finish_reason: str = "stop") -> TurnAnswer:
    return TurnAnswer(
        prompt_ids=(11, 12),
        tokens=(21, 2),
        logprobs=(-0.3, -0.1),
        weight_version=4,
        message={"role": "assistant", "content": ""} | message,
        finish_reason=finish_reason,
    )


def test_what_openai_agents_sends_back_is_one_conversation():
    """As recorded from openai-agents 0.24 after a tool call: flat tools, the call and its output as items."""
    request = parse_responses(
        {
            "model": "m",
            "instructions": "be good",
            "include": [],
            "input": [
                {"content": "2+2?", "role": "user"},
                {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "text", "text": "hm"}]},
                {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a":2,"b":2}', "id": "fc_1"},
                {"type": "function_call", "call_id": "c2", "name": "add", "arguments": "{}", "id": "fc_2"},
                {"type": "function_call_output", "call_id": "c1", "output": "4"},
                {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "0"}]},
            ],
            "tools": [{"type": "function", "name": "add", "description": "Add.", "parameters": {}, "strict": True}],
            "max_output_tokens": 9,
        }
    )
    assert [message["role"] for message in request.messages] == ["system", "user", "assistant", "tool", "tool"]
    assistant = request.messages[2]
    assert assistant["reasoning_content"] == "hm"
    assert [call["function"]["arguments"] for call in assistant["tool_calls"]] == [{"a": 2, "b": 2}, {}]
    assert request.messages[4]["content"] == "0" and request.max_tokens == 9
    assert request.tools[0]["function"]["name"] == "add"


def test_history_comes_before_the_input_and_old_instructions_go():
    history = [{"role": "system", "content": "old"}, {"role": "user", "content": "a"}]
    messages = parse_responses({"input": "b", "instructions": "new"}, history).messages
    assert [message["content"] for message in messages] == ["new", "a", "b"]
    assert [message["content"] for message in parse_responses({"input": "b"}, history).messages] == ["old", "a", "b"]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"input": []},
        {"input": 7},
        {"input": [7]},
        {"input": [{"type": "image"}]},
        {"input": [{"type": "function_call"}]},
        {"input": [{"type": "reasoning", "content": 3}]},
        {"input": "a", "instructions": 3},
        {"input": "a", "text": 3},
        {"input": "a", "text": {"format": {"type": "json_schema"}}},
        {"input": "a", "max_output_tokens": "many"},
        {"input": [{"role": "assistant", "content": "done"}]},
    ],
)
def test_wrong_bodies_are_refused(body):
    with pytest.raises(ApiError) as refusal:
        parse_responses(body)
    assert refusal.value.status == 400


def test_an_answer_becomes_items_with_its_tokens():
    whole = response(answer({"tool_calls": [CALL], "reasoning_content": "hm"}, "tool_calls"), "m", {})
    assert [item["type"] for item in whole["output"]] == ["reasoning", "function_call"]
    assert whole["output"][1]["call_id"] == CALL["id"] and whole["output"][1]["arguments"] == '{"a": 2, "b": 2}'
    assert whole["prompt_token_ids"] == [11, 12] and whole["token_ids"] == [21, 2]
    assert whole["weight_versions"] == [4, 4]
    assert [entry["logprob"] for entry in whole["logprobs"]["content"]] == [-0.3, -0.1]
    cut = response(answer({"content": "so"}, "length"), "m", {})
    assert cut["status"] == "incomplete" and cut["incomplete_details"] == {"reason": "max_output_tokens"}


def test_the_stream_holds_what_the_response_holds():
    whole = response(answer({"content": "four", "tool_calls": [CALL]}, "tool_calls"), "m", {})
    stream = list(events(whole))
    assert [data["sequence_number"] for _, data in stream] == list(range(len(stream)))
    assert all(name == data["type"] for name, data in stream)
    assert "".join(data["delta"] for name, data in stream if name == "response.output_text.delta") == "four"
    arguments = [data["delta"] for name, data in stream if name == "response.function_call_arguments.delta"]
    assert arguments == ['{"a": 2, "b": 2}']
    assert stream[0][0] == "response.created" and stream[0][1]["response"]["output"] == []
    assert stream[-1] == ("response.completed", {"type": "response.completed", "sequence_number": len(stream) - 1,
                                                 "response": whole})  # fmt: skip
