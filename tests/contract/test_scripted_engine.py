"""One set of tests for the scripted engine and for real SGLang, so that the scripted one cannot lie."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time

import numpy as np
import pytest
import requests

from scripts.make_tiny_model import make_model
from slime_like.config.rollout import RolloutConfig
from slime_like.records import ABORTED, COMPLETED, TRUNCATED, EngineEndpoint, Prompt
from slime_like.rollout.data_source import ENGINE_RESERVED_TOKENS
from slime_like.rollout.generate import GenerationClient, Sampling
from slime_like.rollout.sample_builder import SampleBuilder
from slime_like.sglang_backend.client import EngineClient
from slime_like.sglang_backend.launcher import EngineSpec, launch_engine
from slime_like.sglang_backend.router import launch_router
from slime_like.testing.scripted_engine import Fault, ScriptedEngine
from slime_like.utils.net import wait_until

PROMPT = [298, 258, 198, 277, 220, 22, 18, 15, 17, 299, 198, 298, 266, 198]
CONTEXT = 512
ENDLESS = {"max_new_tokens": 400, "ignore_eos": True, "temperature": 1.0}


@dataclasses.dataclass
class Server:
    """Either engine, to be spoken to in the same words."""

    endpoint: EngineEndpoint

    def post(self, path, body=None, key=None, timeout=30):
        key = self.endpoint.api_key if key is None else key
        return requests.post(
            self.endpoint.url + path, json=body or {}, headers={"Authorization": f"Bearer {key}"}, timeout=timeout
        )

    def get(self, path):
        return requests.get(
            self.endpoint.url + path, headers={"Authorization": f"Bearer {self.endpoint.api_key}"}, timeout=30
        )

    def generate(self, **params):
        return self.post("/generate", {"input_ids": PROMPT, "sampling_params": params, "return_logprob": True})


@pytest.fixture(
    scope="module", params=["scripted", pytest.param("sglang", marks=[pytest.mark.contract, pytest.mark.slow])]
)
def server(request, tmp_path_factory):
    if request.param == "scripted":
        # As long as any test asks for; a real engine would take its time over 400 tokens.
        with ScriptedEngine(
            lambda _: ([7] * 400, [-0.5] * 400), api_key="key", fault_for=_slow_if_long, context_length=CONTEXT
        ) as engine:
            yield Server(EngineEndpoint(index=0, url=engine.url, api_key="key"))
        return
    folder = tmp_path_factory.mktemp("engine")
    make_model(folder / "model", seed=0)
    spec = EngineSpec(
        index=0, model_path=str(folder / "model"), context_length=CONTEXT, seed=1, log_path=str(folder / "engine.log")
    )
    engine = launch_engine(spec, timeout_s=120)
    try:
        yield Server(engine.endpoint)
    finally:
        engine.close()


def _slow_if_long(body):
    return Fault(delay_s=1.0) if body["sampling_params"].get("max_new_tokens") == ENDLESS["max_new_tokens"] else None


def test_it_is_healthy_and_names_its_version(server):
    assert server.get("/health").status_code == 200
    for path in ("/model_info", "/get_model_info"):
        info = server.get(path).json()
        assert {"model_path", "tokenizer_path", "is_generation", "weight_version"} <= info.keys()
    assert {"model_path", "tp_size", "version"} <= server.get("/server_info").json().keys()


def test_a_wrong_key_is_refused(server):
    assert server.post("/generate", {"input_ids": PROMPT}, key="wrong").status_code == 401


def test_the_answer_to_generate(server):
    answer = server.generate(max_new_tokens=5, temperature=1.0, ignore_eos=True).json()
    assert {"text", "output_ids", "meta_info"} <= answer.keys()
    meta = answer["meta_info"]
    assert {
        "id",
        "finish_reason",
        "prompt_tokens",
        "completion_tokens",
        "weight_version",
        "output_token_logprobs",
    } <= meta.keys()
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert meta["prompt_tokens"] == len(PROMPT) and meta["completion_tokens"] == len(answer["output_ids"]) == 5
    assert [token for _, token, _ in meta["output_token_logprobs"]] == answer["output_ids"]
    assert all(logprob <= 0 and text is None for logprob, _, text in meta["output_token_logprobs"])


def test_stop_token_ids_end_the_answer_and_are_part_of_it(server):
    first = server.generate(max_new_tokens=5, temperature=0.0, ignore_eos=True).json()["output_ids"][0]
    answer = server.generate(max_new_tokens=5, temperature=0.0, stop_token_ids=[first]).json()
    assert answer["output_ids"] == [first] and answer["meta_info"]["finish_reason"] == {
        "type": "stop",
        "matched": first,
    }


def test_log_probs_only_on_request(server):
    answer = server.post("/generate", {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 2}}).json()
    assert "output_token_logprobs" not in answer["meta_info"]


def test_a_request_without_a_prompt_is_a_400(server):
    assert server.post("/generate", {"sampling_params": {"max_new_tokens": 2}}).status_code == 400


def test_the_longest_prompt_that_is_taken(server):
    for length, status in ((CONTEXT - ENGINE_RESERVED_TOKENS, 200), (CONTEXT - ENGINE_RESERVED_TOKENS + 1, 400)):
        body = {"input_ids": [7] * length, "sampling_params": {"max_new_tokens": CONTEXT - length, "ignore_eos": True}}
        answer = server.post("/generate", body)
        assert answer.status_code == status, answer.text
        assert status != 200 or len(answer.json()["output_ids"]) >= 1


def test_it_counts_the_requests_that_it_has(server):
    client = EngineClient(server.endpoint)
    assert client.num_requests() == 0
    thread = threading.Thread(target=lambda: server.generate(**ENDLESS))
    thread.start()
    wait_until(
        lambda: None if client.num_requests() == 1 else "none",
        deadline_s=10,
        who="test",
        whom="the request",
        phase="start",
        interval_s=0.02,
    )
    client.abort_all()
    thread.join()
    wait_until(
        lambda: f"{client.num_requests()} are left" if client.num_requests() else None,
        deadline_s=10,
        who="test",
        whom="it",
        phase="end",
    )


def test_closing_a_session_that_is_not_open_is_harmless(server):
    EngineClient(server.endpoint).close_weight_update()
    assert server.post("/begin_weight_update").status_code == 200
    EngineClient(server.endpoint).close_weight_update()
    assert server.post("/end_weight_update").status_code == 400, "nothing is open any more"


def test_weights_need_a_session_and_versions_are_reported(server):
    refused = server.post(
        "/update_weights_from_tensor", {"serialized_named_tensors": [""], "load_format": None, "flush_cache": False}
    )
    assert refused.status_code == 400
    for path in ("/begin_weight_update", "/end_weight_update"):
        assert server.post(path).json()["success"] is True
    answer = server.post("/update_weight_version", {"new_version": "7", "abort_all_requests": False}).json()
    assert answer["success"] is True and answer["new_version"] == "7"
    assert server.get("/model_info").json()["weight_version"] == "7"
    assert server.generate(max_new_tokens=1).json()["meta_info"]["weight_version"] == "7"


@pytest.mark.parametrize("mode", ["abort", "retract"])
def test_pause_flush_continue(server, mode):
    assert server.post("/pause_generation", {"mode": mode}).status_code == 200
    assert server.post("/flush_cache").status_code == 200
    assert server.post("/continue_generation").status_code == 200
    assert server.generate(max_new_tokens=2, ignore_eos=True).json()["meta_info"]["finish_reason"]["type"] == "length"


def test_an_aborted_request_answers_with_reason_abort(server):
    answers = []
    thread = threading.Thread(target=lambda: answers.append(server.generate(**ENDLESS).json()))
    thread.start()
    deadline = time.monotonic() + 20
    while not answers and time.monotonic() < deadline:  # the first abort may come before the request has arrived
        time.sleep(0.1)
        assert server.post("/abort_request", {"rid": "", "abort_all": True}).status_code == 200
    thread.join(timeout=20)
    assert answers[0]["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(answers[0]["output_ids"]) < 400


def test_memory_can_be_released_and_taken_again(server):
    for tags in (["kv_cache"], ["weights"]):
        assert server.post("/release_memory_occupation", {"tags": tags}).status_code == 200
    for tags in (["weights"], ["kv_cache"]):
        assert server.post("/resume_memory_occupation", {"tags": tags}).status_code == 200
    assert server.generate(max_new_tokens=1, ignore_eos=True).status_code == 200


def test_our_client_makes_a_sample_of_the_answer(server):
    """All that we send is taken, and the answer is long enough to train on."""
    rollout = RolloutConfig(
        rollout_max_response_len=6,
        rollout_top_p=0.9,
        rollout_top_k=20,
        rollout_stop=["\n\n"],
        rollout_stop_token_ids=[299],
    )
    prompt = Prompt(index=0, text="", tokens=np.array(PROMPT, dtype=np.int32))

    async def run():
        client = GenerationClient(
            server.endpoint.url, server.endpoint.api_key, rollout, concurrency=4, weight_version=lambda: 5
        )
        try:
            params = Sampling.for_training(rollout, max_context_tokens=CONTEXT, seed="1").request(prompt, 0)
            return await client.generate(prompt.tokens, params)
        finally:
            await client.close()

    server.post("/update_weight_version", {"new_version": "11", "abort_all_requests": False})
    sample = SampleBuilder(prompt, 0).generated(asyncio.run(run())).finish()
    assert 1 <= sample.num_response_tokens <= 6 and sample.status in (COMPLETED, TRUNCATED) and sample.status != ABORTED
    assert set(sample.weight_versions.tolist()) == {-1, 11}
    assert (sample.engine_logprobs[sample.loss_mask == 1] <= 0).all()


@pytest.mark.contract
def test_the_router_takes_the_scripted_engine_and_our_sampling(tmp_path):
    rollout = RolloutConfig(rollout_stop=["x"], rollout_stop_token_ids=[299])
    prompt = Prompt(index=3, text="", tokens=np.array(PROMPT, dtype=np.int32))
    sampling_params = Sampling.for_training(rollout, max_context_tokens=CONTEXT, seed="1").request(prompt, 1)

    async def run(router):
        client = GenerationClient(router.url, router.api_key, rollout, concurrency=4, weight_version=lambda: 5)
        try:
            return await asyncio.gather(*[client.generate(prompt.tokens, sampling_params) for _ in range(4)])
        finally:
            await client.close()

    router = launch_router(policy="cache_aware", log_path=str(tmp_path / "router.log"), timeout_s=60)
    try:
        with ScriptedEngine(lambda _: ([7, 8], [-0.5, -0.25]), api_key="key") as engine:
            engine.weight_version = "4"
            router.register(EngineEndpoint(index=0, url=engine.url, api_key="key"), timeout_s=30)
            answers = asyncio.run(run(router))
            assert all(
                (answer.tokens, answer.logprobs, answer.weight_version) == ([7, 8], [-0.5, -0.25], 4)
                for answer in answers
            )
            body = engine.requests[-1]
            assert body["input_ids"] == PROMPT and body["return_logprob"] is True
            # sglang-router 0.3.2 drops this one field; fast tokenizers decode the same without it.
            sent = {name: value for name, value in sampling_params.items() if name != "spaces_between_special_tokens"}
            assert {name: body["sampling_params"].get(name) for name in sent} == sent
    finally:
        router.close()
