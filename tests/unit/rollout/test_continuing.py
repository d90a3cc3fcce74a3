"""An answer that we end and go on with is the answer that nobody ended."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from slime_like.config.rollout import RolloutConfig
from slime_like.errors import EngineError
from slime_like.records import ABORTED, COMPLETED, TRUNCATED, EngineEndpoint, Prompt, WeightsRef
from slime_like.rollout.continuing import ContinuingClient
from slime_like.rollout.generate import Generation
from slime_like.rollout.policy import Policy
from slime_like.rollout.sample_builder import SampleBuilder
from slime_like.testing.scripted_engine import Fault, ScriptedEngine

PROMPT = [11, 12]
END = 2


def greedy_answer(length: int = 9) -> list[int]:
    """What a greedy policy says to PROMPT: each token follows from what is before it."""
    tokens = list(PROMPT)
    for _ in range(length):
        tokens.append(20 + sum(position * token for position, token in enumerate(tokens, 1)) % 5)
    return [*tokens[len(PROMPT) :], END]


def continues(answer: list[int]):
    """A script that says the rest of `answer` to whatever part of it stands behind the prompt."""

    def script(ids: list[int]):
        said = len(ids) - len(PROMPT)
        assert ids == [*PROMPT, *answer[:said]], "the policy never said that"
        return answer[said:], [-0.01 * position for position in range(said, len(answer))]

    return script


def decode(ids: list[int], skip_special_tokens: bool) -> str:
    return "".join(chr(ord("a") + token - 20) for token in ids if not (skip_special_tokens and token == END))


def ask(script, aborts: list[int | None], *, explained: bool = True, **sampling) -> tuple[Generation, list[dict], int]:
    """An answer whose nth request is ended after aborts[n] tokens; what was sent; tokens that were thrown away."""
    policy, positions = Policy(WeightsRef(version=1)), iter(aborts)

    def fault(_: dict) -> Fault | None:
        at = next(positions, None)
        engine.weight_version = str(len(engine.requests))
        policy.num_changes += explained
        return None if at is None else Fault(abort=at)

    async def run(url: str):
        client = ContinuingClient(
            url,
            None,
            RolloutConfig(),
            concurrency=4,
            weight_version=lambda: 1,
            policy=policy,
            decode=decode,
            endpoints=[],
        )
        try:
            return await client.generate(PROMPT, {"max_new_tokens": 32} | sampling), client.thrown_tokens
        finally:
            await client.close()

    with ScriptedEngine(script, fault_for=fault, stop_token_ids=[END], decode=lambda ids: decode(ids, True)) as engine:
        answer, thrown = asyncio.run(run(engine.url))
        return answer, engine.requests, thrown


@pytest.mark.parametrize("budget", [32, 7])
def test_ended_at_every_token_and_gone_on_with_it_is_the_same_answer(budget: int):
    answer = greedy_answer()
    whole, _, _ = ask(continues(answer), [], max_new_tokens=budget)
    assert whole.status == (COMPLETED if budget == 32 else TRUNCATED)
    for position in range(len(answer) + 1):  # also behind the token that ends it, or at the budget's end
        joined, requests, thrown = ask(continues(answer), [position], max_new_tokens=budget)
        assert (joined.tokens, joined.logprobs, joined.text, joined.status) == (
            whole.tokens,
            whole.logprobs,
            whole.text,
            whole.status,
        ), position
        kept = max(0, min(position, budget) - 1)
        assert thrown == (min(position, budget) > 0)
        assert requests[1]["sampling_params"]["max_new_tokens"] == budget - kept
        sample = SampleBuilder(Prompt(index=0, text="", tokens=np.array(PROMPT))).generated(joined).finish()
        assert sample.weight_versions.tolist() == [-1, -1] + [1] * kept + [2] * (len(whole.tokens) - kept)


def test_any_number_of_ends_in_any_order():
    answer, draw = greedy_answer(40), random.Random(0)
    whole, _, _ = ask(continues(answer), [], max_new_tokens=64)
    for _ in range(20):
        aborts = [draw.randrange(12) for _ in range(draw.randrange(1, 6))]
        joined, requests, _ = ask(continues(answer), list(aborts), max_new_tokens=64)
        assert (joined.tokens, joined.logprobs, joined.status) == (whole.tokens, whole.logprobs, COMPLETED), aborts
        assert len(requests) == len(aborts) + 1
        versions = joined.weight_versions
        assert versions is not None and (np.diff(versions) >= 0).all() and versions[-1] == len(requests)


def test_a_stop_string_that_lies_across_an_end_still_ends_the_answer():
    """An engine looks for stop strings in what it says itself."""
    long = [20, 21, 22, 23, 24, 20, 21]  # abcdeab

    def script(ids: list[int]):
        rest = long[len(ids) - len(PROMPT) :]
        at = decode(rest, True).find("cde")
        rest = rest if at < 0 else rest[: at + 3]
        return rest, [-0.5] * len(rest)

    for position in range(6):
        joined, _, _ = ask(script, [position], stop=["cde"])
        assert (joined.tokens, joined.text, joined.status) == (long[:5], "abcde", COMPLETED), position
        assert len(joined.logprobs) == len(joined.weight_versions if position else joined.tokens) == 5


def test_an_end_that_is_not_ours_is_left_to_who_asked():
    answer, requests, _ = ask(continues(greedy_answer()), [3], explained=False)
    assert answer.status == ABORTED and len(answer.tokens) == 3 and len(requests) == 1


def test_holding_ends_what_runs_and_nothing_is_sent_until_it_goes_on():
    async def test(engine: ScriptedEngine):
        policy = Policy(WeightsRef(version=1))
        client = ContinuingClient(
            engine.url,
            None,
            RolloutConfig(),
            concurrency=4,
            weight_version=lambda: 1,
            policy=policy,
            decode=decode,
            endpoints=[EngineEndpoint(index=0, url=engine.url)],
        )
        try:
            asking = [asyncio.ensure_future(client.generate(PROMPT, {"max_new_tokens": 32})) for _ in range(3)]
            await asyncio.sleep(0.3)
            await client.hold(5.0)
            assert len(engine.requests) == 3 and not any(task.done() for task in asking)
            assert [path for path, _ in engine.calls] == ["/abort_request"]
            policy.changing()
            policy.changed(WeightsRef(version=2))
            await asyncio.sleep(0.2)
            assert len(engine.requests) == 3  # weights changed meanwhile; nobody said to go on
            policy.go_on()
            answers = await asyncio.gather(*asking)
            assert [answer.tokens for answer in answers] == [greedy_answer()] * 3 and len(engine.requests) == 6
            assert client.num_continued == 3
        finally:
            await client.close()

    faults = [Fault(delay_s=30.0)] * 3
    with ScriptedEngine(continues(greedy_answer()), faults=faults, stop_token_ids=[END]) as engine:
        asyncio.run(asyncio.wait_for(test(engine), 20))


def test_an_engine_that_cannot_be_asked_to_end_requests_is_named():
    async def test():
        dead = EngineEndpoint(index=0, url="http://127.0.0.1:9")
        client = ContinuingClient(
            dead.url,
            None,
            RolloutConfig(),
            concurrency=1,
            weight_version=lambda: 1,
            policy=Policy(),
            decode=decode,
            endpoints=[dead],
        )
        try:
            client._num_running = 1
            with pytest.raises(EngineError, match="127.0.0.1:9/abort_request does not answer"):
                await client.hold(5.0)
        finally:
            await client.close()

    asyncio.run(test())
