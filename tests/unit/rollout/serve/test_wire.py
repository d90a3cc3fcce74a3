"""Request bodies as real clients send them, and bodies that nobody should send."""

from __future__ import annotations

import pytest

from slime_like.rollout.serve.wire import ApiError, parse_chat, parse_generate, read_json, sse, tool_calls_on_wire

ADD = {
    "name": "add",
    "description": "Add.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
}
HELLO = [{"role": "user", "content": "2+2?"}]


def test_pydantic_ai_sends_null_content_with_its_calls():
    """As recorded from pydantic-ai 2.62: no temperature, `content: null`, arguments as JSON text."""
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}
    request = parse_chat(
        {
            "model": "m",
            "stream": False,
            "messages": [
                {"role": "system", "content": "be good"},
                *HELLO,
                {"role": "assistant", "content": None, "tool_calls": [call]},
                {"role": "tool", "tool_call_id": "c1", "content": "4"},
            ],
            "tools": [{"type": "function", "function": ADD | {"strict": True}}],
            "tool_choice": "auto",
        }
    )
    assistant, tool = request.messages[2:]
    assert assistant["content"] == "" and assistant["tool_calls"][0]["function"]["arguments"] == {"a": 2, "b": 2}
    assert tool == {"role": "tool", "content": "4", "tool_call_id": "c1"}
    assert request.tools == ({"type": "function", "function": ADD},)
    assert tool_calls_on_wire(assistant)[0]["function"]["arguments"] == '{"a": 2, "b": 2}'


def test_smolagents_sends_parts_and_wants_a_call():
    """As recorded from smolagents 1.26: content as lists of parts, tool_choice required, stop texts."""
    request = parse_chat(
        {
            "model": "m",
            "messages": [
                {"role": "system", "content": [{"type": "text", "text": "You are "}, {"type": "text", "text": "it"}]},
                {"role": "user", "content": [{"type": "text", "text": "New task:\n2+2?"}]},
            ],
            "stop": ["Observation:", "Calling tools:"],
            "tools": [{"type": "function", "function": ADD}],
            "tool_choice": "required",
        }
    )
    assert [message["content"] for message in request.messages] == ["You are it", "New task:\n2+2?"]
    assert request.stop == ("Observation:", "Calling tools:") and len(request.tools) == 1
    assert request.forced == ("add",)


def test_openai_agents_streams_and_leaves_nulls():
    """As recorded from openai-agents 0.24: developer messages, stream_options, null fields."""
    request = parse_chat(
        {
            "messages": [{"role": "developer", "content": "be good"}, *HELLO, {"role": "assistant", "content": "4",
                          "tool_calls": None, "reasoning_content": None}, *HELLO],
            "model": "m",
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": None,
            "tools": None,
            "parallel_tool_calls": False,
            "store": False,
            "max_completion_tokens": 32,
            "max_tokens": 64,
        }
    )  # fmt: skip
    assert [message["role"] for message in request.messages] == ["system", "user", "assistant", "user"]
    assert request.stream and request.include_usage and request.tools == ()
    assert request.max_tokens == 32, "the newer name counts"


def test_no_tools_are_shown_where_the_client_wants_no_call():
    tools = [{"type": "function", "function": ADD}]
    assert parse_chat({"messages": HELLO, "tools": tools, "tool_choice": "none"}).tools == ()
    assert parse_chat({"messages": HELLO, "tools": tools, "tool_choice": "auto"}).forced == ()


def test_a_call_that_is_forced_must_be_one_of_the_tools():
    named = {"type": "function", "function": {"name": "add"}}
    body = {"messages": HELLO, "tools": [{"type": "function", "function": ADD}], "tool_choice": named}
    assert parse_chat(body).forced == parse_chat(body | {"tool_choice": "required"}).forced == ("add",)
    assert parse_chat(body | {"tool_choice": {"type": "function", "name": "add"}}).forced == ("add",), "/v1/responses"
    for wrong in ({"tool_choice": {"name": "sub"}}, {"tools": [], "tool_choice": "required"}):
        with pytest.raises(ApiError) as refused:
            parse_chat(body | wrong)
        assert refused.value.param == "tool_choice"
    with pytest.raises(ApiError, match="the prompt is yours"):
        parse_chat(body | {"tokens": [1]}, with_ids=True)


def test_verifiers_sends_ids():
    """As recorded from verifiers 0.4's train client."""
    request = parse_generate(
        {
            "model": "m",
            "token_ids": [1, 2, 3],
            "sampling_params": {
                "stop_token_ids": [5],
                "logprobs": 1,
                "skip_special_tokens": False,
                "max_tokens": 32,
                "temperature": 1.0,
            },
            "cache_salt": "0",
        }
    )
    assert request.ids == (1, 2, 3) and request.stop_token_ids == (5,) and request.max_tokens == 32
    assert request.messages == ()


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"messages": None}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [7]}, "messages[0]"),
        ({"messages": [{"role": "alien", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": "x", "name": 3}]}, "messages[0].name"),
        ({"messages": [*HELLO, {"role": "assistant", "content": "4"}]}, "messages"),
        ({"messages": [{"role": "assistant", "tool_calls": 1}, *HELLO]}, "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}, *HELLO]}, "messages[0].tool_calls[0]"),
        ({"n": 2}, "n"),
        ({"n": True}, "n"),
        ({"tools": {}}, "tools"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {}}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]}, "tools[0].parameters"),
        ({"tool_choice": 7}, "tool_choice"),
        ({"stop": 7}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_completion_tokens": True}, "max_completion_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": []}, "stream_options"),
        ({"chat_template_kwargs": []}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"chat_template": "{{ 1 }}"}}, "chat_template_kwargs"),
        ({"model": 1}, "model"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
    ],
)
def test_a_wrong_field_is_named(change, param):
    with pytest.raises(ApiError) as refusal:
        parse_chat({"messages": HELLO} | change)
    assert refusal.value.status == 400 and refusal.value.param == param
    assert refusal.value.body["error"]["type"] == "invalid_request_error"


def test_what_is_no_object_is_refused():
    for data in (b"", b"{", b"[1]", b"\xff\xfe", b'"x"', b"[" * 100_000, b'{"a":' * 100 + b"1" + b"}" * 100):
        with pytest.raises(ApiError) as refusal:
            read_json(data)
        assert refusal.value.code == "invalid_json"


def test_half_surrogates_are_replaced():
    body = read_json(rb'{"messages": [{"role": "user", "content": "a\ud83d b"}], "\ud800": 1, "ok": "\ud83d\ude00"}')
    assert body["messages"][0]["content"] == "a\ufffd b" and body["\ufffd"] == 1 and body["ok"] == "\U0001f600"


def test_events_end_with_done():
    assert b"".join(sse([(None, {"a": 1})], done=True)) == b'data: {"a": 1}\n\ndata: [DONE]\n\n'
    assert b"".join(sse([("x", {"a": 1})], done=False)) == b'event: x\ndata: {"a": 1}\n\n'
