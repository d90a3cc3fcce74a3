"""The real router with real engines behind it, keys on both sides."""
# Covers slime_like.sglang_backend.router_server too, which it does not import itself.

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from collections.abc import Iterator

import numpy as np
import pytest
import requests

from slime_like.config.reward import RewardConfig
from slime_like.config.rollout import RolloutConfig
from slime_like.records import COMPLETED, EngineEndpoint, Prompt
from slime_like.rollout.generate import GenerationClient, Sampling
from slime_like.rollout.groups import GroupMaker
from slime_like.rollout.policy import Policy
from slime_like.rollout.rewards.scorer import RewardScorer
from slime_like.rollout.tokenizer import load_tokenizer
from slime_like.sglang_backend.router import Router, attach_router, launch_router
from slime_like.testing.scripted_engine import Fault, ScriptedEngine
from slime_like.utils.guard import group_members
from tests.contract.engines import TINY, hf_logprobs, prompt


@pytest.fixture(scope="module")
def router(tmp_path_factory) -> Iterator[Router]:
    """One router; nothing of it is left afterwards."""
    router = launch_router(
        policy="cache_aware", log_path=str(tmp_path_factory.mktemp("logs") / "router.log"), timeout_s=30
    )
    yield router
    router.close()
    assert router.poll() is not None and group_members(router._process.pid) == []


def generate(router: Router, key: str | None) -> requests.Response:
    body = {
        "input_ids": prompt(1),
        "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True},
        "return_logprob": True,
    }
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    session = requests.Session()
    session.trust_env = False
    return session.post(f"{router.url}/generate", json=body, headers=headers, timeout=30)


def test_generate_through_the_router(router, served, models):
    router.register(served.engine.endpoint, timeout_s=20)
    assert router.engine_urls() == [served.client.url]
    answer = generate(router, router.api_key).json()
    tokens = prompt(1) + answer["output_ids"]
    expected = hf_logprobs(models[1], tokens)[-4:]
    reported = [item[0] for item in answer["meta_info"]["output_token_logprobs"]]
    assert max(abs(a - b) for a, b in zip(reported, expected.tolist(), strict=True)) < 1e-4


def test_the_samples_of_a_prompt_find_what_went_ahead_of_them_in_the_cache(router, served):
    """And without it they do not, where they come together."""
    router.register(served.engine.endpoint, timeout_s=20)
    sampling = Sampling.for_training(RolloutConfig(rollout_max_response_len=4), max_context_tokens=1000, seed="1")

    async def cached(share: str, seed: int) -> list[int]:
        asked = Prompt(index=seed, text="", label="", tokens=np.array(prompt(seed, length=200), dtype=np.int32))
        rollout, lengths = RolloutConfig(share_prefill=share), []
        client = GenerationClient(router.url, router.api_key, rollout, concurrency=8, weight_version=lambda: 0)
        read = client._read
        client._read = lambda body, **more: (
            lengths.append(json.loads(body)["meta_info"]["cached_tokens"]) or read(body, **more)
        )
        scorer = RewardScorer(RewardConfig(rm_type="exact"), None, None)
        maker = GroupMaker(
            client, scorer, Policy(), plugin_args=None, custom_generate=None, custom_timeout_s=60.0
        )  # fmt: skip
        outcome = await maker.group(asked, 8, sampling)
        await client.close()
        assert not outcome.failed and outcome.num_failures == 0
        return lengths

    assert min(asyncio.run(cached("on", 31))) >= 199
    assert min(asyncio.run(cached("off", 32))) == 0


def test_text_has_the_stop_string_that_ended_it(router, served):
    """As the tokens have it; and as rewards need it, who look for a closing tag."""
    router.register(served.engine.endpoint, timeout_s=20)
    tokenizer = load_tokenizer(str(TINY))
    sampling = Sampling.for_training(RolloutConfig(rollout_max_response_len=24), max_context_tokens=1000, seed="1")
    asked = Prompt(index=0, text="", tokens=np.array(prompt(5), dtype=np.int32))

    async def run():
        client = GenerationClient(router.url, router.api_key, RolloutConfig(), concurrency=1, weight_version=lambda: 0)
        try:
            greedy = dataclasses.replace(sampling, temperature=0.0)
            free = await client.generate(asked.tokens, greedy.request(asked, 0))
            stop = re.search(r"[!-~]+", free.text[3:])[0][:3]
            params = dataclasses.replace(greedy, stop=[stop]).request(asked, 0)
            return (
                free,
                stop,
                await client.generate(asked.tokens, params),
                await client.generate(asked.tokens, params | {"no_stop_trim": False}),
            )
        finally:
            await client.close()

    free, stop, stopped, trimmed = asyncio.run(run())
    assert (stopped.status, trimmed.status) == (COMPLETED, COMPLETED)
    assert stopped.tokens == trimmed.tokens == free.tokens[: len(stopped.tokens)]
    assert stopped.text.endswith(stop) and trimmed.text == stopped.text.removesuffix(stop)
    assert tokenizer.decode(stopped.tokens, skip_special_tokens=True).startswith(stopped.text)


def test_both_keys_are_needed(router, served):
    router.register(served.engine.endpoint, timeout_s=20)
    assert generate(router, None).status_code == 401
    assert generate(router, "wrong").status_code == 401
    assert generate(router, served.engine.endpoint.api_key).status_code == 401


def test_deregistered_engine_gets_nothing(router, served):
    router.register(served.engine.endpoint, timeout_s=20)
    router.deregister(served.engine.endpoint)
    router.deregister(served.engine.endpoint)
    assert router.engine_urls() == []
    assert generate(router, router.api_key).status_code >= 500


def test_two_engines_and_a_second_router_on_one_host(router, tp1, tp2, tmp_path):
    second = launch_router(policy="round_robin", log_path=str(tmp_path / "router.log"), timeout_s=30)
    try:
        for one in (tp1, tp2):
            second.register(one.engine.endpoint, timeout_s=20)
        assert sorted(second.engine_urls()) == sorted([tp1.client.url, tp2.client.url])
        assert all(generate(second, second.api_key).status_code == 200 for _ in range(4))
    finally:
        second.close()


def test_all_turns_of_a_session_go_to_one_engine_and_stay_when_another_is_lost(tmp_path):
    """The policy that --env and --serve-rollout take by default; scripted engines, so that each knows what it was
    asked. Sessions that begin at a time are spread evenly, and engines answer them late enough for that.
    """
    router = launch_router(policy="manual", log_path=str(tmp_path / "router.log"), timeout_s=30)
    late = [Fault(delay_s=4.0)] * 8
    engines = [ScriptedEngine(lambda prompt: ([7, 2], [-0.1, -0.2]), faults=list(late)).start() for _ in range(3)]

    async def play(num_turns: int) -> None:
        client = GenerationClient(router.url, router.api_key, RolloutConfig(), concurrency=32, weight_version=lambda: 0)

        async def episode(number: int) -> None:
            for turn in range(num_turns):
                await client.generate([number, turn], {"max_new_tokens": 2}, session=f"0/{number}")

        try:
            await asyncio.gather(*map(episode, range(24)))
        finally:
            await client.close()

    def where() -> dict[int, set[int]]:
        places: dict[int, set[int]] = {}
        for index, engine in enumerate(engines):
            for request in engine.requests:
                places.setdefault(request["input_ids"][0], set()).add(index)
            engine.requests.clear()
        return places

    try:
        for index, engine in enumerate(engines):
            router.register(EngineEndpoint(index=index, url=engine.url), timeout_s=20)
        asyncio.run(play(4))
        first = where()
        assert len(first) == 24 and all(len(places) == 1 for places in first.values())
        num_sessions = [sum(place in places for places in first.values()) for place in range(3)]
        assert min(num_sessions) >= 7, num_sessions
        router.deregister(EngineEndpoint(index=0, url=engines[0].url))
        asyncio.run(play(4))
        second = where()
        assert all(len(places) == 1 and 0 not in places for places in second.values())
        assert all(second[number] == places for number, places in first.items() if 0 not in places)
    finally:
        router.close()
        for engine in engines:
            engine.close()


def test_connections_that_end_at_once_do_not_shut_an_engine_out(tmp_path):
    """An engine closes connections that were idle for 5 s (uvicorn): a router that sends into many of them then gets as
    many errors in a moment from an engine in good health.
    """
    router = launch_router(policy="cache_aware", log_path=str(tmp_path / "router.log"), timeout_s=30)
    dropped = [Fault(drop=True)] * 24
    engine = ScriptedEngine(lambda prompt: ([7, 2], [-0.1, -0.2]), faults=dropped).start()

    async def ask_all() -> list:
        client = GenerationClient(router.url, router.api_key, RolloutConfig(), concurrency=32, weight_version=lambda: 0)
        try:
            return await asyncio.gather(*(client.generate([number], {"max_new_tokens": 2}) for number in range(24)))
        finally:
            await client.close()

    try:
        router.register(EngineEndpoint(index=0, url=engine.url), timeout_s=20)
        assert [answer.tokens for answer in asyncio.run(ask_all())] == [[7, 2]] * 24
    finally:
        router.close()
        engine.close()


def test_attached_router_goes_on_without_our_engines(router, tp1):
    attached = attach_router(router.url, timeout_s=10, api_key=router.api_key)
    attached.register(tp1.engine.endpoint, timeout_s=20)
    attached.close()
    assert router.engine_urls() == []
    router.check()


def test_key_is_neither_in_the_log_nor_on_the_command_line(router):
    with open(router._process.log_path) as file:
        assert router.api_key not in file.read()
    with open(f"/proc/{router._process.pid}/cmdline") as file:
        assert router.api_key not in file.read()
