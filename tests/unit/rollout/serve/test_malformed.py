"""A thousand requests that nobody should send: each is answered in time, in OpenAI's envelope."""

from __future__ import annotations

import copy
import json
import random
import socket
import time
from urllib.parse import urlsplit

import pytest

pytestmark = pytest.mark.slow
PATHS = (
    "/v1/chat/completions",
    "/v1/chat/completions/tokens",
    "/v1/responses",
    "/inference/v1/generate",
    "/tokenize",
    "/detokenize",
)
GOOD: dict[str, dict] = {
    "/v1/chat/completions": {
        "model": "m",
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": None, "tool_calls": [
                {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]},
            {"role": "tool", "tool_call_id": "c", "content": "4"},
        ],
        "stop": ["x"], "max_tokens": 4, "n": 1, "stream": False, "stream_options": {"include_usage": True},
        "chat_template_kwargs": {"enable_thinking": False}, "tool_choice": "none",
        "tools": [{"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}],
    },
    "/v1/responses": {
        "model": "m", "instructions": "i", "max_output_tokens": 4, "tools": [], "stream": False,
        "input": [{"role": "user", "content": "hi"},
                  {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
                  {"type": "function_call_output", "call_id": "c", "output": "4"}],
    },
    "/inference/v1/generate": {
        "token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 4, "stop_token_ids": [5], "logprobs": 1},
    },
    "/tokenize": {"messages": [{"role": "user", "content": "hi"}], "tools": [], "chat_template_kwargs": {}},
    "/detokenize": {"tokens": [1, 2, 3]},
}  # fmt: skip
GOOD["/v1/chat/completions/tokens"] = GOOD["/v1/chat/completions"] | {"tokens": [1, 2, 3]}
JUNK = (
    None, True, 0, -1, 10**400, 1.5, float("nan"), float("inf"), "", "x" * 3000, "\ud800", "\x00", "<|im_end|>", [], {},
    [[]], [None], {"": None}, [{}], {"role": "user"}, [10**9], [-1], ["a"], "{{ 1 }}", {"type": "text"},
)  # fmt: skip


def places(value, path=()):
    """Every place in a body."""
    yield path
    for key, item in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield from places(item, (*path, key))


def mutated(body, rng: random.Random):
    """The body with something else in one to three places, or without them."""
    body = json.loads(json.dumps(body))
    for _ in range(rng.randint(1, 3)):
        *way, last = rng.choice([path for path in places(body) if path] or [("nothing",)])
        target = body
        for key in way:
            target = target[key]
        if rng.random() < 0.2:
            target.pop(last, None) if isinstance(target, dict) else target.pop(last)
        else:
            target[last] = copy.deepcopy(rng.choice(JUNK))
    return body


def broken_bytes(body, rng: random.Random) -> bytes:
    """A body that is cut, stained, nested too deep or no object."""
    data = json.dumps(body).encode()
    place = rng.randrange(len(data))
    return rng.choice(
        [
            data[:place],
            data[:place] + bytes([rng.randrange(256)]) + data[place + 1 :],
            b"[" * rng.choice([100, 20_000]) + b"]" * 20_000,
            b'{"messages": ' * rng.choice([70, 3000]),
            rng.randbytes(rng.randrange(200)),
            b"",
            b"null",
        ]
    )


def test_a_thousand_malformed_requests(server, http):
    rng = random.Random(13)
    statuses: dict[int, int] = {}
    slowest = 0.0
    for number in range(1000):
        path = rng.choice(PATHS)
        if number % 4 == 3:
            content = broken_bytes(GOOD[path], rng)
        else:
            content = json.dumps(mutated(GOOD[path], rng)).encode()
        headers = {"X-Session-ID": f"bad-{number}"} if rng.random() < 0.5 else {}
        begin = time.monotonic()
        answer = http.post(path, content=content, headers={"Content-Type": "application/json"} | headers)
        slowest = max(slowest, time.monotonic() - begin)
        statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
        assert answer.status_code in (200, 400, 404), (path, content[:500], answer.text[:500])
        if answer.status_code != 200:
            error = answer.json()["error"]
            assert set(error) == {"message", "type", "param", "code"} and error["message"], content[:500]
    print(f"{statuses}, slowest {slowest:.2f} s")
    assert statuses[400] > 500 and statuses[200] > 50, "some changes do no harm, most do"
    assert slowest < 10
    assert http.post("/v1/chat/completions", json=GOOD["/v1/chat/completions"]).status_code == 200


def test_broken_http_hangs_nobody(server, http):
    """Lines that are no HTTP, a body that is too long, and one that never comes: its sender waits, nobody else."""
    where = urlsplit(server.url)
    waiting = socket.create_connection((where.hostname, where.port), timeout=10)
    waiting.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
    for data in (
        b"\x00\xff\r\n\r\n",
        b"GET\r\n\r\n",
        b"POST / HTTP/9.9\r\n\r\n",
        b"POST /v1/chat HTTP/1.1\r\nX: " + b"a" * 99_999,
    ):
        with socket.create_connection((where.hostname, where.port), timeout=10) as line:
            line.sendall(data + b"\r\n\r\n")
            assert b"400" in line.recv(4096).split(b"\r\n")[0]
    too_long = http.post("/v1/chat/completions", content=b" " * (17 << 20))
    assert too_long.status_code == 413 and too_long.json()["error"]["type"] == "invalid_request_error"
    assert http.post("/v1/chat/completions", json=GOOD["/v1/chat/completions"]).status_code == 200
    waiting.close()
