"""The endpoint as clients see it: openai's own client and bare requests, against python -m slime_like.rollout.serve."""

from __future__ import annotations

import concurrent.futures
import json

import httpx
import openai
import pytest

from slime_like.rollout.generate import SESSION_HEADER
from slime_like.testing.scripted_engine import Fault, ScriptedEngine
from tests.unit.rollout.serve.served import says, served

pytestmark = pytest.mark.slow  # a process with a tokenizer
HELLO = [{"role": "user", "content": "2+2?"}]


def ask(*words: str) -> list[dict]:
    """A conversation: user, assistant, user …"""
    return [{"role": "assistant" if place % 2 else "user", "content": word} for place, word in enumerate(words)]


def tool(name: str) -> dict:
    """A function that may be called."""
    function = {"name": name, "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
    return {"type": "function", "function": function}


def test_openai_client_plays_two_turns_that_become_one_row(server, http, openai_client, tokenizer):
    server.engine.script = says(tokenizer, "four", "yes")
    client = openai_client("two-turns")
    first = client.chat.completions.create(model="any", messages=HELLO, temperature=0.1, top_p=0.5, seed=1)
    assert first.choices[0].message.content == "four" and first.choices[0].finish_reason == "stop"
    second = client.chat.completions.create(model="any", messages=[*HELLO, *ask("", "four", "sure?")[1:]])
    assert second.choices[0].message.content == "yes"
    sent = [request["input_ids"] for request in server.engine.requests]
    choice = first.choices[0].to_dict()
    assert first.to_dict()["prompt_token_ids"] == choice["prompt_token_ids"] == sent[0]
    assert sent[1][: len(sent[0]) + len(choice["token_ids"])] == sent[0] + choice["token_ids"]
    assert choice["token_ids"][-1] == tokenizer.eos_token_id and choice["weight_versions"] == [0] * 5
    assert [entry.token for entry in first.choices[0].logprobs.content] == [
        f"token_id:{token}" for token in choice["token_ids"]
    ]
    params = server.engine.requests[0]["sampling_params"]
    assert (params["temperature"], params["top_p"], params["top_k"]) == (1.0, 1.0, -1), "the run's, not the client's"
    finished = http.post("/sessions/two-turns/finish", json={"reward": 0.5, "metadata": {"a": 1}}).json()
    (sample,) = finished["samples"]
    assert sample["reward"] == 0.5 and sample["metadata"] == {"a": 1} and finished["violations"] == []
    trained = [token for token, mask in zip(sample["tokens"], sample["loss_mask"], strict=True) if mask]
    assert trained == choice["token_ids"] + second.choices[0].to_dict()["token_ids"]
    logprobs = [value for value, mask in zip(sample["engine_logprobs"], sample["loss_mask"], strict=True) if mask]
    assert logprobs == pytest.approx([-0.5, -0.51, -0.52, -0.53, -0.54, -0.5, -0.51, -0.52, -0.53], abs=1e-6)
    assert http.get("/sessions/two-turns").json()["num_turns"] == 0, "the name may be used anew"


def test_a_session_keeps_to_its_engine(server, http, openai_client, tokenizer):
    """The router goes by this header; what the engine is sent is all that it sees."""
    server.engine.script = says(tokenizer, "yes")
    openai_client("sticky").chat.completions.create(model="m", messages=HELLO)
    assert server.engine.headers[-1].get(SESSION_HEADER) == "sticky"


def test_a_stream_says_what_the_answer_says(server, http, openai_client, tokenizer):
    server.engine.script = says(tokenizer, "four and more")
    stream = openai_client("stream").chat.completions.create(
        model="m", messages=HELLO, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == "four and more"
    last = chunks[-2].choices[0]
    assert last.finish_reason == "stop" and last.to_dict()["token_ids"][-1] == tokenizer.eos_token_id
    assert chunks[-1].usage.completion_tokens == len(last.logprobs.content) == len(last.to_dict()["token_ids"])
    with http.stream("POST", "/v1/chat/completions", json={"messages": HELLO, "stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.read().endswith(b"data: [DONE]\n\n")


def test_responses_go_on_from_a_previous_one(server, http, openai_client, tokenizer):
    server.engine.script = says(tokenizer, "four", "yes", "no")
    client = openai_client("responses")
    first = client.responses.create(model="m", input="2+2?", instructions="be good")
    assert first.output_text == "four" and first.status == "completed"
    second = client.responses.create(model="m", input="sure?", previous_response_id=first.id)
    assert second.output_text == "yes"
    sent = [request["input_ids"] for request in server.engine.requests]
    assert sent[1][: len(sent[0])] == sent[0], "the first turn's tokens go on"
    with client.responses.stream(model="m", input=[*HELLO, *first.output, *HELLO]) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert "".join(deltas) == "no" == stream.get_final_response().output_text
    with pytest.raises(openai.NotFoundError):
        client.responses.create(model="m", input="x", previous_response_id="resp_nobody")


def test_ids_that_the_model_has_and_the_tokenizer_has_not_come_back(http):
    """Embeddings are padded: 320 rows, 304 ids; an untrained policy samples them all."""
    for path, name in (("/inference/v1/generate", "token_ids"), ("/detokenize", "tokens")):
        assert http.post(path, json={name: [5, 319]}).status_code == 200
        refused = http.post(path, json={name: [5, 320]})
        assert refused.status_code == 400 and "id 320 is not in the vocabulary of 320" in refused.text


def test_ids_in_ids_out(server, http, tokenizer):
    server.engine.script = says(tokenizer, "four", "yes")
    headers = {"X-Session-ID": "ids"}
    prompt = tokenizer("hello", add_special_tokens=False)["input_ids"]
    first = http.post("/inference/v1/generate", json={"token_ids": prompt}, headers=headers).json()
    choice = first["choices"][0]
    assert first["prompt_token_ids"] == prompt and choice["token_ids"][-1] == tokenizer.eos_token_id
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    more = [*prompt, *choice["token_ids"], *prompt]
    limits = {"max_tokens": 2, "stop_token_ids": [7], "temperature": 9}
    http.post("/inference/v1/generate", json={"token_ids": more, "sampling_params": limits}, headers=headers)
    params = server.engine.requests[1]["sampling_params"]
    assert params["max_new_tokens"] == 2 and params["stop_token_ids"] == [7] and params["temperature"] == 1.0
    (sample,) = http.post("/sessions/ids/finish").json()["samples"]
    assert sample["tokens"][: len(more)] == more and sample["status"] == "truncated"
    assert sum(sample["loss_mask"]) == len(choice["token_ids"]) + 2


def test_chat_with_ids_of_the_client(server, http, tokenizer):
    """As verifiers 0.2: the first turn is chat, the next sends the ids that it wants sent, made with /tokenize."""
    server.engine.script = says(tokenizer, "four", "yes", "no")
    headers = {"X-Session-ID": "chat-ids"}
    first = http.post("/v1/chat/completions", json={"messages": HELLO}, headers=headers).json()
    messages = [*HELLO, {"role": "assistant", "content": "four"}, *HELLO]
    tokens = http.post("/tokenize", json={"messages": messages}, headers=headers).json()["tokens"]
    body = {"messages": messages, "tokens": tokens}
    second = http.post("/v1/chat/completions/tokens", json=body, headers=headers).json()
    assert second["prompt_token_ids"] == tokens == server.engine.requests[1]["input_ids"]
    other = [*first["prompt_token_ids"], 3]
    http.post("/v1/chat/completions/tokens", json={"messages": HELLO, "tokens": other}, headers=headers)
    finished = http.post("/sessions/chat-ids/finish").json()
    assert len(finished["samples"]) == 2 and finished["violations"] == [], (
        "the ids of the third are on a root of theirs"
    )
    assert sum(finished["samples"][0]["loss_mask"]) == 5 + 4


def test_tokenize_and_back(http, tokenizer):
    whole = http.post("/v1/tokenize", json={"messages": HELLO}).json()
    bare = http.post("/tokenize", json={"messages": HELLO, "add_generation_prompt": False}).json()
    assert tokenizer.decode(whole["tokens"]) == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert whole["tokens"][: bare["count"]] == bare["tokens"] and whole["max_model_len"] == 4096
    assert http.post("/detokenize", json={"tokens": bare["tokens"]}).json()["prompt"].endswith("2+2?<|im_end|>\n")
    text = http.post("/tokenize", json={"prompt": "2+2?", "add_special_tokens": False}).json()
    assert text["tokens"] == tokenizer("2+2?", add_special_tokens=False)["input_ids"]


def test_models_say_how_long_a_context_is(server, openai_client):
    (model,) = openai_client("models").models.list().data
    assert model.id == "tiny-qwen3" and model.to_dict()["max_model_len"] == 4096
    assert openai_client("models").models.retrieve("gpt-4o").id == "gpt-4o"


def test_stop_texts_end_an_answer_and_stay_in_its_tokens(server, http, tokenizer):
    server.engine.script = says(tokenizer, "four Observation: five")
    answer = http.post("/v1/chat/completions", json={"messages": HELLO, "stop": ["Observation:"]}).json()
    assert answer["choices"][0]["message"]["content"] == "four "
    assert server.engine.requests[0]["sampling_params"]["stop"] == ["Observation:"]
    assert "Observation" in tokenizer.decode(answer["choices"][0]["token_ids"])


def test_a_conversation_that_is_too_long_is_the_clients_error(server, http, openai_client):
    with pytest.raises(openai.BadRequestError) as refusal:
        openai_client("long").chat.completions.create(model="m", messages=ask("a" * 5000))
    assert refusal.value.code == "context_length_exceeded" and "maximum context length is 4096" in str(refusal.value)
    assert server.engine.requests == [], "nothing was asked of the engine"
    ids = {"token_ids": [1] * 4090}
    assert http.post("/inference/v1/generate", json=ids).json()["error"]["code"] == "context_length_exceeded"


def test_an_engine_that_fails_is_a_503_that_may_be_tried_again(server, http):
    server.engine.script = lambda ids: ([], [])
    answer = http.post("/v1/chat/completions", json={"messages": HELLO})
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["type"] == "server_error" and "no token" in answer.json()["error"]["message"]


def test_a_finished_session_may_be_used_anew_but_a_wrong_result_does_not_finish_it(http):
    for result in ({"reward": "high"}, {"reward": True}, {"score": 1}, {"metadata": 3}):
        assert http.post("/sessions/result/finish", json=result).status_code == 400
    assert http.post("/sessions/result/finish", content=b'{"reward": NaN}').status_code == 400
    assert http.post("/sessions/result/finish", json={"reward": 1}).json()["samples"] == []


def test_unknown_routes_have_the_envelope(http):
    for method, path, status in (("GET", "/v1/nothing", 404), ("GET", "/v1/chat/completions", 405)):
        answer = http.request(method, path)
        assert answer.status_code == status and set(answer.json()["error"]) == {"message", "type", "param", "code"}
    assert http.post("/sessions").status_code == 404, "only a run gives out episodes"
    assert http.post("/sessions/a%20b/v1/chat/completions", json={"messages": HELLO}).status_code == 400


def test_tool_calls_are_read_and_their_results_are_one_conversation(server, http, openai_client, tokenizer):
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'
    server.engine.script = says(tokenizer, call, "It is 4")
    tools = [tool("add")]
    client = openai_client("tools")
    first = client.chat.completions.create(model="m", messages=HELLO, tools=tools, stream=True)
    deltas = [chunk.choices[0] for chunk in first]
    pieces = [piece for delta in deltas for piece in delta.delta.tool_calls or []]
    assert pieces[0].function.name == "add" and deltas[-1].finish_reason == "tool_calls"
    arguments = "".join(piece.function.arguments for piece in pieces)
    assert json.loads(arguments) == {"a": 2, "b": 2}
    said = {"id": pieces[0].id, "type": "function", "function": {"name": "add", "arguments": '{"b":2,"a":2}'}}
    history = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [said]},
        {"role": "tool", "tool_call_id": pieces[0].id, "content": "4"},
    ]
    second = client.chat.completions.create(model="m", messages=history, tools=tools)
    assert second.choices[0].message.content == "It is 4"
    finished = http.post("/sessions/tools/finish").json()
    assert len(finished["samples"]) == 1 and finished["violations"] == []
    assert finished["samples"][0]["tokens"].count(tokenizer.eos_token_id) == 4, "one row has both turns"


@pytest.mark.parametrize(
    ("choice", "names", "opening"),
    [
        ({"type": "function", "function": {"name": "add"}}, ("add", "sub"), '<tool_call>\n{"name":"add", "arguments":'),
        ("required", ("add",), '<tool_call>\n{"name":"add", "arguments":'),
        ("required", ("add", "sub"), '<tool_call>\n{"name":"'),
    ],
)
def test_a_forced_call_begins_with_words_that_are_not_trained(
    server, http, openai_client, tokenizer, choice, names, opening
):
    call = '<tool_call>\n{"name":"add", "arguments": {"a": 2, "b": 2}}\n</tool_call>'
    server.engine.script = says(tokenizer, call.removeprefix(opening), "It is 4")
    client, tools = openai_client("forced"), [tool(name) for name in names]
    first = client.chat.completions.create(model="m", messages=HELLO, tools=tools, tool_choice=choice).choices[0]
    (made_call,) = first.message.tool_calls
    assert made_call.function.name == "add" and json.loads(made_call.function.arguments) == {"a": 2, "b": 2}
    assert tokenizer.decode(server.engine.requests[0]["input_ids"]).endswith(f"assistant\n{opening}")
    history = [*HELLO, first.message.to_dict(), {"role": "tool", "tool_call_id": made_call.id, "content": "4"}]
    client.chat.completions.create(model="m", messages=history, tools=tools)
    finished = http.post("/sessions/forced/finish").json()
    (sample,) = finished["samples"]
    trained = [token for token, mask in zip(sample["tokens"], sample["loss_mask"], strict=True) if mask]
    assert tokenizer.decode(trained) == call.removeprefix(opening) + "<|im_end|>It is 4<|im_end|>"
    assert finished["violations"] == []


def test_keys_and_sessions_by_bearer(tokenizer):
    with (
        ScriptedEngine(says(tokenizer, "yes")) as engine,
        served(engine, "--serve-host", "127.0.0.1", SLIME_LIKE_SERVE_API_KEY="secret-key") as running,
        httpx.Client(base_url=running.url, timeout=30) as http,
    ):
        body = {"messages": HELLO}
        assert http.get("/health").status_code == 200
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"X-Api-Key": "schlüssel".encode()}):
            refused = http.post("/v1/chat/completions", json=body, headers=headers)
            assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
        for headers in ({"Authorization": "Bearer secret-key"}, {"X-Api-Key": "secret-key"}):
            assert http.post("/v1/chat/completions", json=body, headers=headers).status_code == 200
        both = {"Authorization": "Bearer session-7", "X-Api-Key": "secret-key"}
        assert http.post("/v1/chat/completions", json=body, headers=both).status_code == 200
        assert http.get("/sessions/session-7", headers=both).json()["num_turns"] == 1


def test_too_many_requests_are_told_to_come_again(tokenizer):
    slow = ScriptedEngine(says(tokenizer, "yes"), fault_for=lambda body: Fault(delay_s=2.0))
    flags = ("--serve-max-requests", "2", "--serve-max-sessions", "2", "--agent-max-turns", "1")
    with slow as engine, served(engine, *flags) as running:
        url = f"{running.url}/v1/chat/completions"
        with concurrent.futures.ThreadPoolExecutor(5) as pool:
            answers = list(pool.map(lambda _: httpx.post(url, json={"messages": HELLO}, timeout=30), range(5)))
        codes = sorted(answer.status_code for answer in answers)
        assert codes == [200, 200, 429, 429, 429]
        refused = next(answer for answer in answers if answer.status_code == 429)
        assert refused.headers["retry-after"] == "1" and refused.json()["error"]["type"] == "rate_limit_error"
        codes = [
            httpx.post(f"{running.url}/sessions/{name}/v1/chat/completions", json={"messages": HELLO}, timeout=30)
            for name in ("a", "a", "b", "c")
        ]
        assert [(answer.status_code, answer.json().get("error", {}).get("code")) for answer in codes] == [
            (200, None),
            (400, "max_turns"),
            (200, None),
            (429, "too_many_sessions"),
        ]


def test_a_client_that_hangs_up_ends_its_request(tokenizer):
    slow = ScriptedEngine(says(tokenizer, "yes"), fault_for=lambda body: Fault(delay_s=1.0))
    with slow as engine, served(engine) as running:
        path = f"{running.url}/sessions/gone"
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{path}/v1/chat/completions", json={"messages": HELLO}, timeout=0.3)
        assert httpx.post(f"{path}/v1/chat/completions", json={"messages": HELLO}, timeout=30).status_code == 200
        assert httpx.get(path).json()["num_turns"] == 1, "only the answer that somebody has"
