"""A prompt's own pass comes before its samples, once a group, and its failure is nobody's."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import time
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest

from slime_like.config.observability import ObservabilityConfig
from slime_like.config.reward import RewardConfig
from slime_like.config.rollout import RolloutConfig
from slime_like.config.run import RunConfig
from slime_like.records import COMPLETED, Prompt
from slime_like.rollout.generate import GenerationClient, Sampling
from slime_like.rollout.groups import GroupMaker, GroupOutcome
from slime_like.rollout.policy import Policy
from slime_like.rollout.prefill import with_prefill
from slime_like.rollout.rewards.scorer import RewardScorer
from slime_like.testing.scripted_engine import Fault, ScriptedEngine

LONG = Prompt(index=0, text="q", tokens=np.arange(100, dtype=np.int32), label="")
SHORT = dataclasses.replace(LONG, tokens=np.arange(9, dtype=np.int32))


def is_prefill(body: dict) -> bool:
    return body["sampling_params"]["max_new_tokens"] == 0


def engine(fault: Fault | None = None, *, seconds: float = 0.2) -> ScriptedEngine:
    """Prefills take so long, or fail as `fault` says."""
    slow = fault or Fault(delay_s=seconds)
    return ScriptedEngine(
        lambda prompt: ([7, 2], [-0.5, -0.5]), fault_for=lambda body: slow if is_prefill(body) else None,
        stop_token_ids=(2,),
    )  # fmt: skip


@contextlib.asynccontextmanager
async def group_maker(url: str, *, share: str = "on", slots: int = 64) -> AsyncIterator[Callable]:
    """(prompt, number of samples) -> its group."""
    rollout = RolloutConfig(share_prefill=share, rollout_request_timeout_s=20.0)
    client = GenerationClient(url, None, rollout, concurrency=slots, weight_version=lambda: 1)
    maker = GroupMaker(
        client, RewardScorer(RewardConfig(rm_type="exact"), None, None), Policy(), plugin_args=None,
        custom_generate=None, custom_timeout_s=60.0,
    )  # fmt: skip
    yield functools.partial(maker.group, sampling=Sampling.for_training(rollout, max_context_tokens=4096, seed="0"))
    await client.close()


def groups_of(url: str, *prompts: Prompt, samples: int = 8, **options) -> list[GroupOutcome]:
    """The groups of all prompts at once."""

    async def make() -> list[GroupOutcome]:
        async with group_maker(url, **options) as group:
            return await asyncio.gather(*(group(prompt, samples) for prompt in prompts))

    return asyncio.run(make())


def whole(outcomes: list[GroupOutcome]) -> bool:
    return all(sample.status == COMPLETED for outcome in outcomes for sample in outcome.group.samples)


def test_the_prompt_is_there_before_any_of_its_samples():
    with engine() as one:
        other = dataclasses.replace(LONG, index=1, tokens=LONG.tokens + 1)
        assert whole(groups_of(one.url, LONG, other))
        assert [is_prefill(body) for body in one.requests] == [True] * 2 + [False] * 16
        assert {tuple(body["input_ids"]) for body in one.requests[:2]} == {
            tuple(prompt.tokens.tolist()) for prompt in (LONG, other)
        }
        assert not any(body.get("return_logprob") for body in one.requests[:2])


@pytest.mark.parametrize(
    ("prompt", "samples", "share"), [(LONG, 8, "off"), (LONG, 8, "auto"), (SHORT, 8, "on"), (LONG, 1, "on")]
)
def test_where_it_is_not_worth_it_or_not_decided_nothing_is_sent(prompt, samples, share):
    with engine() as one:
        assert whole(groups_of(one.url, prompt, samples=samples, share=share))
        assert not any(map(is_prefill, one.requests)) and len(one.requests) == samples


@pytest.mark.parametrize("fault", [Fault(drop=True), Fault(status=500), Fault(status=400), Fault(body="no JSON")])
def test_one_that_fails_is_not_tried_again_and_costs_no_sample(fault):
    with engine(fault) as one:
        (outcome,) = groups_of(one.url, LONG)
        assert whole([outcome]) and outcome.num_failures == 0
        assert sum(map(is_prefill, one.requests)) == 1


def test_with_few_slots_groups_still_come_one_after_the_other():
    with engine(seconds=0.02) as one:
        prompts = [dataclasses.replace(LONG, index=i, tokens=LONG.tokens + i) for i in range(4)]
        assert whole(groups_of(one.url, *prompts, slots=2))
        first = [body["input_ids"][0] for body in one.requests]
        assert sum(map(is_prefill, one.requests)) == 4 and one.most_in_flight <= 2
        assert first.index(3) > len(first) / 2  # no prompt takes a cache's room long before its samples come


def test_a_group_that_is_given_up_asks_nothing_any_more():
    async def cancelled(url: str) -> None:
        async with group_maker(url) as group:
            making = asyncio.ensure_future(group(LONG, 8))
            await asyncio.sleep(0.3)
            making.cancel()
            await asyncio.gather(making, return_exceptions=True)
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1

    with engine(seconds=30.0) as one:
        started = time.monotonic()
        asyncio.run(cancelled(one.url))
        assert [is_prefill(body) for body in one.requests] == [True] and time.monotonic() - started < 10


def test_auto_needs_one_place_for_all_samples_and_a_cache():
    config = RunConfig()

    def decided(num_engines: int, **changes) -> str:
        changed = dataclasses.replace(config, **changes)
        return with_prefill(changed, num_engines).share_prefill

    def of_engine(**changes):
        return {"engine": dataclasses.replace(config.engine, **changes)}

    assert decided(1) == decided(4) == "on"
    assert decided(4, **of_engine(sglang_router_policy="round_robin")) == "off"
    assert decided(1, **of_engine(sglang_router_policy="round_robin")) == "on"
    assert decided(1, **of_engine(sglang={"disable_radix_cache": True})) == "off"
    assert decided(1, observability=ObservabilityConfig(deterministic=True)) == "off"
    replay = dataclasses.replace(config.loss, use_rollout_routing_replay=True)
    assert decided(2, loss=replay) == "off" and decided(1, loss=replay) == "on"
    assert decided(1, rollout=RolloutConfig(share_prefill="off")) == "off"
