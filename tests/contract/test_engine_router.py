"""The real router with real engines behind it, keys on both sides."""
# Covers slime_like.sglang_backend.router_server too, which it does not import itself.

from __future__ import annotations

from collections.abc import Iterator

import pytest
import requests

from slime_like.sglang_backend.router import Router, attach_router, launch_router
from slime_like.utils.guard import group_members
from tests.contract.engines import hf_logprobs, prompt


@pytest.fixture(scope="module")
def router(tmp_path_factory) -> Iterator[Router]:
    """One router; nothing of it is left afterwards."""
    router = launch_router(policy="cache_aware", log_path=str(tmp_path_factory.mktemp("logs") / "router.log"), timeout_s=30)
    yield router
    router.close()
    assert router.poll() is not None and group_members(router._process.pid) == []


def generate(router: Router, key: str | None) -> requests.Response:
    body = {"input_ids": prompt(1), "sampling_params": {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}, "return_logprob": True}
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
