"""Messages as chat templates want them."""

from __future__ import annotations

import pytest

from slime_like.errors import DataError
from slime_like.rollout.chat_messages import read_messages, read_tools


def test_openais_form_becomes_what_templates_take():
    call = {"id": "1", "type": "function", "index": None, "function": {"name": "f", "arguments": '{"a": [1, null]}'}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": None},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "why"},
        {"role": "assistant", "content": "c", "tool_calls": None},
        {"role": "assistant", "content": "d", "tool_calls": []},
    ]
    kept = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": [1, None]}}}
    assert read_messages(messages, "") == [
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "", "tool_calls": [kept], "reasoning_content": "why"},
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    assert messages[1]["tool_calls"][0]["index"] is None  # the row itself stays as it was


@pytest.mark.parametrize(("text", "arguments"), [("", {}), ("{}", {}), ("{broken", "{broken"), ("[1]", "[1]")])
def test_arguments_are_objects_where_they_can_be(text, arguments):
    for call in ({"name": "f", "arguments": text}, {"function": {"name": "f", "arguments": text}}):
        (message,) = read_messages([{"role": "assistant", "tool_calls": [call]}], "")
        (read,) = message["tool_calls"]
        assert read.get("function", read)["arguments"] == arguments


@pytest.mark.parametrize(
    ("message", "error"),
    [
        ({"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}, "'content' is .*image.*: only text"),
        ({"role": "user", "content": {"a": 1}}, "'content' is .*: only text"),
        ({"role": "assistant", "tool_calls": "f()"}, "'tool_calls' is no list of objects, but 'f"),
        ({"content": "a"}, "a chat message needs 'role' and 'content'"),
    ],
)
def test_what_no_template_takes_is_named(message, error):
    with pytest.raises(DataError, match="x line 1: .*" + error):
        read_messages([message], "x line 1")


def test_tools_are_a_list_or_its_text():
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert read_tools(tools, "tools", "") == read_tools('[{"type": "function", "function": {"name": "f"}}]', "t", "")
    assert read_tools(None, "tools", "") is read_tools([], "tools", "") is read_tools("", "tools", "") is None
