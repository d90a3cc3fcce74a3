"""What comes in over HTTP, checked and brought into one form; and the errors that go out, in OpenAI's envelope."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

_MOST_LEVELS = 64
#: Half of a surrogate pair in a JSON escape; no tokenizer takes one.
_SURROGATE = re.compile("[\ud800-\udfff]")
_ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
#: Arguments of the tokenizer's renderer that are no template's: a client may not set them.
_RESERVED_KWARGS = frozenset(
    "conversation messages tools documents chat_template add_generation_prompt continue_final_message tokenize padding"
    " truncation max_length return_tensors return_dict return_assistant_tokens_mask tokenizer_kwargs".split()
)


class ApiError(Exception):
    """An answer that is an error. kind, param, code: as OpenAI's; retry_after_s: for a 429 or 503."""

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ):
        super().__init__(message)
        self.status, self.kind, self.param, self.code, self.retry_after_s = status, kind, param, code, retry_after_s

    @property
    def body(self) -> dict:
        """OpenAI's envelope."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        """Retry-After where trying again makes sense."""
        return {"Retry-After": str(self.retry_after_s)} if self.retry_after_s is not None else {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TurnRequest:
    """One answer that is asked for, by whatever route. What a client says of sampling is not in it: the run's holds.

    ids: the prompt as token ids, where the client renders by itself; then messages may be empty. forced: names of
    functions; the answer has to begin with a call of one of them, () leaves it to the policy.
    """

    messages: tuple[dict, ...] = ()
    tools: tuple[dict, ...] = ()
    forced: tuple[str, ...] = ()
    template_kwargs: dict = dataclasses.field(default_factory=dict)
    ids: tuple[int, ...] | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    model: str | None = None
    stream: bool = False
    include_usage: bool = False


def read_json(data: bytes) -> dict:
    """The body as an object, half surrogates replaced. Raises ApiError."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ApiError(
            f"the body is no JSON: {str(error)[:200] or type(error).__name__}", code="invalid_json"
        ) from None
    if not isinstance(body, dict):
        raise ApiError(f"the body is a JSON {type(body).__name__}, not an object", code="invalid_json")
    return _tidy(body, 0)


def parse_chat(body: dict, *, with_ids: bool = False) -> TurnRequest:
    """Of /v1/chat/completions; with_ids: of its /tokens, where the prompt is in `tokens`. Raises ApiError."""
    _refuse_several(body)
    options = body.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise _wrong("stream_options", options, "an object")
    choice = body.get("tool_choice")
    tools = () if choice == "none" else read_tools(body.get("tools"))
    forced = _forced(choice, tools)
    if forced and with_ids:
        raise ApiError("tool_choice: the prompt is yours here; begin the call in tokens", param="tool_choice")
    return TurnRequest(
        messages=read_messages(body.get("messages")),
        tools=tools,
        forced=forced,
        template_kwargs=read_template_kwargs(body),
        ids=read_ids(body.get("tokens"), "tokens") if with_ids else None,
        max_tokens=read_limit(body, "max_completion_tokens", "max_tokens"),
        stop=_read_stop(body.get("stop")),
        stop_token_ids=_optional_ids(body, "stop_token_ids"),
        model=_optional_text(body, "model"),
        stream=_switch(body, "stream"),
        include_usage=bool((options or {}).get("include_usage")),
    )


def parse_generate(body: dict) -> TurnRequest:
    """Of /inference/v1/generate: ids in, ids out. Raises ApiError."""
    params = body.get("sampling_params") or {}
    if not isinstance(params, dict):
        raise _wrong("sampling_params", params, "an object")
    if body.get("features"):
        raise ApiError("features (images and the like) are not served", param="features")
    if _switch(body, "stream"):
        raise ApiError("this route does not stream; leave out stream", param="stream")
    _refuse_several(params)
    return TurnRequest(
        ids=read_ids(body.get("token_ids"), "token_ids"),
        max_tokens=read_limit(params, "max_tokens", "max_new_tokens"),
        stop=_read_stop(params.get("stop")),
        stop_token_ids=_optional_ids(params, "stop_token_ids"),
        model=_optional_text(body, "model"),
    )


def read_messages(value: Any, *, may_end_with_answer: bool = False) -> tuple[dict, ...]:
    """Chat messages with text content, as templates want them: no null, no parts, arguments as objects.

    Raises ApiError, also for a conversation that ends with the assistant's message: there is nothing to answer.
    """
    if not isinstance(value, list) or not value:
        raise _wrong("messages", value, "a list of at least one message")
    messages = tuple(_message(item, f"messages[{number}]") for number, item in enumerate(value))
    if messages[-1]["role"] == "assistant" and not may_end_with_answer:
        raise ApiError("the last message is the assistant's: there is nothing to answer", param="messages")
    return messages


def read_tools(value: Any) -> tuple[dict, ...]:
    """Function tools in the chat form. Raises ApiError for other kinds: nobody here could run them."""
    if value is None:
        return ()
    if not isinstance(value, list):
        raise _wrong("tools", value, "a list")
    tools = []
    for number, tool in enumerate(value):
        where = f"tools[{number}]"
        if not isinstance(tool, dict) or tool.get("type", "function") != "function":
            kind = tool.get("type") if isinstance(tool, dict) else tool
            raise ApiError(f"{where}: {kind!r:.80} is not served; only functions are", param=where)
        function = tool.get("function", tool)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str) or not function["name"]:
            raise ApiError(f"{where}: a function needs a name", param=where)
        parameters = function.get("parameters")
        if parameters is not None and not isinstance(parameters, dict):
            raise _wrong(f"{where}.parameters", parameters, "an object")
        description = function.get("description")
        if description is not None and not isinstance(description, str):
            raise _wrong(f"{where}.description", description, "text")
        kept = {"name": function["name"], "description": description or "", "parameters": parameters or {}}
        tools.append({"type": "function", "function": kept})
    return tuple(tools)


def read_template_kwargs(body: dict) -> dict:
    """chat_template_kwargs. Raises ApiError for names that are not the template's."""
    kwargs = body.get("chat_template_kwargs")
    if kwargs is None:
        return {}
    if not isinstance(kwargs, dict):
        raise _wrong("chat_template_kwargs", kwargs, "an object")
    reserved = sorted(_RESERVED_KWARGS & kwargs.keys())
    if reserved:
        raise ApiError(f"chat_template_kwargs may not set {', '.join(reserved)}", param="chat_template_kwargs")
    return kwargs


def read_ids(value: Any, param: str) -> tuple[int, ...]:
    """At least one token id. Raises ApiError."""
    if not isinstance(value, list) or not value or not all(type(item) is int and 0 <= item < 1 << 31 for item in value):
        raise _wrong(param, value, "a list of at least one token id")
    return tuple(value)


def read_limit(body: dict, *names: str) -> int | None:
    """The first of the fields that is there: a number of tokens. Raises ApiError."""
    for name in names:
        value = body.get(name)
        if value is not None:
            if type(value) is not int or value < 1:
                raise _wrong(name, value, "a whole number of at least 1")
            return value
    return None


def read_content(value: Any, param: str) -> str:
    """Text, from text, null or a list of parts. Raises ApiError for parts that are no text."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _wrong(param, value, "text, null or a list of parts")
    texts = []
    for number, part in enumerate(value):
        if isinstance(part, str):
            texts.append(part)
            continue
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if isinstance(part, dict) else None
        if kind not in ("text", "input_text", "output_text", "refusal") or not isinstance(text, str):
            raise ApiError(f"{param}[{number}]: only text is served, not {kind!r:.80}", param=f"{param}[{number}]")
        texts.append(text)
    return "".join(texts)


def tool_calls_on_wire(message: dict) -> list[dict]:
    """A stored message's tool calls as clients take them: with arguments as JSON text."""
    return [
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["function"]["name"], "arguments": _as_json(call["function"]["arguments"])},
        }
        for call in message.get("tool_calls") or []
    ]


def sse(events: Iterable[tuple[str | None, dict]], *, done: bool) -> Iterable[bytes]:
    """Server-sent events of (name or None, data); done: with OpenAI's last line."""
    for name, data in events:
        head = f"event: {name}\n" if name else ""
        yield f"{head}data: {json.dumps(data)}\n\n".encode()
    if done:
        yield b"data: [DONE]\n\n"


def _message(item: Any, where: str) -> dict:
    if not isinstance(item, dict):
        raise _wrong(where, item, "an object")
    role = item.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise ApiError(f"{where}.role {role!r:.80} is unknown. Known: {', '.join(_ROLES)}", param=f"{where}.role")
    message: dict = {"role": _ROLES[role], "content": read_content(item.get("content"), f"{where}.content")}
    for name in ("name", "tool_call_id", "reasoning_content"):
        text = item.get(name)
        if text is not None:
            if not isinstance(text, str):
                raise _wrong(f"{where}.{name}", text, "text")
            message[name] = text
    if message["role"] == "assistant" and item.get("tool_calls") is not None:
        calls = item["tool_calls"]
        if not isinstance(calls, list):
            raise _wrong(f"{where}.tool_calls", calls, "a list")
        if calls:
            message["tool_calls"] = [
                _tool_call(call, f"{where}.tool_calls[{number}]") for number, call in enumerate(calls)
            ]
    return message


def _tool_call(call: Any, where: str) -> dict:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise _wrong(where, call, "a call of a function with a name")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            pass  # what a model wrote may be no JSON; templates take text too
    identity = call.get("id")
    if identity is not None and not isinstance(identity, str):
        raise _wrong(f"{where}.id", identity, "text")
    function = {"name": function["name"], "arguments": {} if arguments is None else arguments}
    return {"id": identity or "", "type": "function", "function": function}


def _forced(choice: Any, tools: Sequence[dict]) -> tuple[str, ...]:
    """The functions one of which has to be called, by tool_choice. Raises ApiError."""
    if choice is None or choice in ("auto", "none"):
        return ()
    names = tuple(tool["function"]["name"] for tool in tools)
    if choice == "required":
        if not names:
            raise ApiError("tool_choice required: there are no tools to call", param="tool_choice")
        return names
    function = choice.get("function", choice) if isinstance(choice, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise _wrong("tool_choice", choice, "auto, required, none, or a function's name")
    if name not in names:
        raise ApiError(f"tool_choice: {name[:80]!r} is none of the tools ({len(names)})", param="tool_choice")
    return (name,)


def _refuse_several(body: dict) -> None:
    count = body.get("n")
    if count is not None and (type(count) is not int or count != 1):
        raise ApiError(f"n {count!r:.40}: one answer a request is served", param="n")
    form = body.get("response_format")
    if form is not None and (not isinstance(form, dict) or form.get("type", "text") != "text"):
        raise ApiError(
            "response_format: answers are sampled freely, a grammar would change their log-probs. Leave it out, or ask"
            " for the form in words or as a tool.",
            param="response_format",
        )


def _read_stop(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or len(stops) > 16 or not all(isinstance(stop, str) and stop for stop in stops):
        raise _wrong("stop", value, "text, or a list of at most 16 texts")
    return tuple(stops)


def _optional_ids(body: dict, name: str) -> tuple[int, ...]:
    return read_ids(body[name], name) if body.get(name) else ()


def _optional_text(body: dict, name: str) -> str | None:
    value = body.get(name)
    if value is not None and not isinstance(value, str):
        raise _wrong(name, value, "text")
    return value


def _switch(body: dict, name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise _wrong(name, value, "true or false")
    return bool(value)


def _wrong(param: str, value: Any, wanted: str) -> ApiError:
    return ApiError(f"{param}: must be {wanted}, not {_short(value)}", param=param)


def _short(value: Any) -> str:
    return f"{type(value).__name__} of {len(value)}" if isinstance(value, (list, dict)) else f"{value!r:.80}"


def _as_json(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments)


def _tidy(value: Any, level: int) -> Any:
    """The same without half surrogates. Raises ApiError for what nests too deep for whoever walks it next."""
    if isinstance(value, str):
        return value if value.isascii() else _SURROGATE.sub("\ufffd", value)
    if isinstance(value, (dict, list)) and level >= _MOST_LEVELS:
        raise ApiError(f"the body nests deeper than {_MOST_LEVELS} levels", code="invalid_json")
    if isinstance(value, dict):
        return {_tidy(key, level): _tidy(item, level + 1) for key, item in value.items()}
    if isinstance(value, list):
        return [_tidy(item, level + 1) if isinstance(item, (str, dict, list)) else item for item in value]
    return value


def usage(num_prompt: int, num_answer: int) -> dict:
    """Of a chat completion."""
    return {"prompt_tokens": num_prompt, "completion_tokens": num_answer, "total_tokens": num_prompt + num_answer}


def logprobs_content(tokens: Sequence[int], logprobs: Sequence[float]) -> list[dict]:
    """One entry a token, named by its id: texts of single tokens are ambiguous."""
    return [
        {"token": f"token_id:{token}", "logprob": logprob, "bytes": None, "top_logprobs": []}
        for token, logprob in zip(tokens, logprobs, strict=True)
    ]
