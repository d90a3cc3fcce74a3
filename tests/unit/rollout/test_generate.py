"""One request: what is sent, what comes back as a Sample, and what happens when it goes wrong."""

from __future__ import annotations

import asyncio
import json
import sys
import time

import numpy as np
import pytest

from slime_like.config.rollout import RolloutConfig
from slime_like.errors import EngineError
from slime_like.records import ABORTED, COMPLETED, TRUNCATED, EngineEndpoint, Prompt, WeightsRef
from slime_like.rollout.generate import GenerationClient, Sampling, sample_seed, token_versions
from slime_like.rollout.policy import Policy
from slime_like.rollout.sample_builder import SampleBuilder
from slime_like.testing.scripted_engine import Fault, ScriptedEngine

PROMPT = Prompt(index=3, text="p", tokens=np.array([11, 12], dtype=np.int32), label="x", metadata={"k": 1})


def three_tokens(_):
    return [21, 22, 2], [-0.3, -0.1, -0.7]


def ask(engine, *, sampling_params=None, api_key=None, num=1, concurrency=8, **options):
    """`num` requests at once; results or the errors, in order."""

    async def run():
        client = GenerationClient(
            engine.url, api_key, RolloutConfig(**options), concurrency=concurrency, weight_version=lambda: 9
        )
        try:
            requests = [client.generate(PROMPT.tokens, sampling_params or {"max_new_tokens": 8}) for _ in range(num)]
            return await asyncio.gather(*requests, return_exceptions=True)
        finally:
            await client.close()

    return asyncio.run(run())


def test_a_request_names_the_adapters_of_its_version():
    """The engine tells its newest version, also where that came under the answer; the request's own counts. What waits
    for a slot, or is asked again, names the adapters of when it is sent. Those that are named are in use meanwhile.
    """
    policy, in_use = Policy(WeightsRef("policy", 3)), []

    def tokens(_):
        in_use.append(policy.in_use)
        policy.changed(policy.weights.next())
        return [21, 22, 2], [-0.3, -0.1, -0.7]

    async def run(engine):
        options = {"concurrency": 1, "weight_version": lambda: 3, "adapter": policy.request}
        client = GenerationClient(engine.url, None, RolloutConfig(), **options)
        try:
            return await asyncio.gather(*(client.generate(PROMPT.tokens, {"max_new_tokens": 8}) for _ in range(3)))
        finally:
            await client.close()

    with ScriptedEngine(tokens, faults=[None, Fault(status=503), None, None]) as engine:
        engine.weight_version = "9"
        generations = asyncio.run(run(engine))
        assert [body["lora_path"] for body in engine.requests] == ["policy@3", "policy@4", "policy@4", "policy@5"]
    assert [generation.weight_version for generation in generations] == [3, 4, 5]
    assert in_use == [{WeightsRef("policy", version)} for version in (3, 4, 5)] and not policy.in_use


def test_requests_to_engines_themselves_go_to_the_least_busy_one():
    """The router, which is nobody here, hears of none."""

    async def run(*groups) -> None:
        client = GenerationClient("http://127.0.0.1:1", None, RolloutConfig(), concurrency=8, weight_version=lambda: 1)
        try:
            for engines in groups:
                client.ask_only([EngineEndpoint(index=0, url=engine.url) for engine in engines])
                await asyncio.gather(*(client.generate(PROMPT.tokens, {"max_new_tokens": 8}) for _ in range(4)))
        finally:
            await client.close()

    slow = {"fault_for": lambda _: Fault(delay_s=0.1)}
    with ScriptedEngine(three_tokens, **slow) as first, ScriptedEngine(three_tokens, **slow) as second:
        asyncio.run(run([first, second], [second]))
        assert (len(first.requests), len(second.requests)) == (2, 6)


def test_a_sample_is_prompt_and_response_in_flat_arrays():
    with ScriptedEngine(three_tokens) as engine:
        engine.weight_version = "4"
        sample = SampleBuilder(PROMPT, 1).generated(ask(engine)[0]).finish()
    assert sample.tokens.tolist() == [11, 12, 21, 22, 2]
    assert sample.loss_mask.tolist() == [0, 0, 1, 1, 1]
    np.testing.assert_array_equal(sample.engine_logprobs, np.array([0, 0, -0.3, -0.1, -0.7], dtype=np.float32))
    assert sample.weight_versions.tolist() == [-1, -1, 4, 4, 4]
    assert [sample.tokens.dtype, sample.loss_mask.dtype, sample.weight_versions.dtype] == [np.int32, np.int8, np.int32]
    assert (sample.prompt_index, sample.sample_index, sample.status, sample.label, sample.metadata) == (
        3,
        1,
        COMPLETED,
        "x",
        {"k": 1},
    )
    assert sample.reward is None and sample.num_response_tokens == 3


def test_an_engine_without_a_numbered_version_gets_the_managers():
    with ScriptedEngine(three_tokens) as engine:  # its version is "default"
        assert ask(engine)[0].weight_version == 9


def test_what_is_sent():
    stops = {"rollout_stop": ["\n"], "rollout_stop_token_ids": [2]}
    rollout = RolloutConfig(
        rollout_max_response_len=50, rollout_temperature=0.7, rollout_top_p=0.9, rollout_top_k=5, **stops
    )
    sampling = Sampling.for_training(rollout, max_context_tokens=40, seed="42")
    with ScriptedEngine(three_tokens, api_key="secret") as engine:
        assert isinstance(ask(engine, sampling_params=sampling.request(PROMPT, 1), api_key="secret")[0].tokens, list)
        body = engine.requests[0]
    assert body["input_ids"] == [11, 12] and body["return_logprob"] is True
    assert body["sampling_params"] == {
        "max_new_tokens": 38,  # the context leaves less than --rollout-max-response-len
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "stop": ["\n"],
        "stop_token_ids": [2],
        "skip_special_tokens": True,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
        "sampling_seed": sample_seed("42", 3, 1),
    }


def test_every_sample_has_a_seed_of_its_own_that_never_changes():
    seeds = {sample_seed(run, prompt, sample) for run in ("1", "2") for prompt in range(50) for sample in range(8)}
    assert len(seeds) == 800 and all(0 <= seed < 2**31 for seed in seeds)
    assert sample_seed("42", 0, 0) == 566654716  # resumed runs rely on it


def test_the_key_is_needed_and_a_refusal_is_not_tried_again():
    with ScriptedEngine(three_tokens, api_key="secret") as engine:
        error = ask(engine, api_key="wrong")[0]
    assert isinstance(error, EngineError) and "HTTP 401" in str(error)
    assert "wrong" not in str(error) and "secret" not in str(error)
    for status in (400, 408, 429):
        with ScriptedEngine(three_tokens, faults=[Fault(status=status)]) as engine:
            assert f"refused the request: HTTP {status}" in str(ask(engine)[0])
            assert len(engine.requests) == 1


@pytest.mark.parametrize("fault", [Fault(status=500), Fault(status=503), Fault(drop=True)])
def test_a_failure_that_may_pass_is_tried_again(fault):
    with ScriptedEngine(three_tokens, faults=[fault]) as engine:
        assert ask(engine)[0].tokens == [21, 22, 2]
        assert len(engine.requests) == 2


def test_tries_are_bounded_and_the_last_answer_is_named():
    with ScriptedEngine(three_tokens, fault_for=lambda _: Fault(status=503)) as engine:
        error = ask(engine, rollout_request_retries=2)[0]
        assert len(engine.requests) == 2
    assert isinstance(error, EngineError)
    assert "failed 2 times (--rollout-request-retries). Last: HTTP 503" in str(error)


def test_nobody_listening_is_an_engine_error():
    with ScriptedEngine(three_tokens) as engine:
        pass
    error = ask(engine, rollout_request_retries=2)[0]
    assert isinstance(error, EngineError) and "Cannot connect" in str(error)


def test_a_hanging_engine_meets_the_deadline():
    with ScriptedEngine(three_tokens, fault_for=lambda _: Fault(delay_s=60)) as engine:
        start = time.monotonic()
        error = ask(engine, rollout_request_timeout_s=0.3)[0]
        assert time.monotonic() - start < 3
    assert isinstance(error, EngineError) and "no answer within 0.3 s (--rollout-request-timeout-s)" in str(error)


def test_the_deadline_covers_all_tries():
    with ScriptedEngine(three_tokens, fault_for=lambda _: Fault(status=500)) as engine:
        error = ask(engine, rollout_request_timeout_s=0.5, rollout_request_retries=100)[0]
    assert "no answer within 0.5 s" in str(error) and "Last heard: HTTP 500" in str(error)


def test_length_and_abort_are_told_apart():
    with ScriptedEngine(three_tokens, faults=[None, Fault(abort=1)]) as engine:
        cut = ask(engine, sampling_params={"max_new_tokens": 2})[0]
        aborted = ask(engine)[0]
    assert (cut.status, cut.tokens) == (TRUNCATED, [21, 22])
    assert (aborted.status, aborted.tokens) == (ABORTED, [21])


def test_requests_in_flight_are_limited():
    with ScriptedEngine(three_tokens, fault_for=lambda _: Fault(delay_s=0.05)) as engine:
        assert all(answer.tokens == [21, 22, 2] for answer in ask(engine, num=12, concurrency=3))
        assert engine.most_in_flight == 3


def answer(**meta) -> str:
    whole = {"output_token_logprobs": [[-0.5, 7, None]], "finish_reason": {"type": "stop"}} | meta
    return json.dumps({"text": "t", "output_ids": [7], "meta_info": whole})


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("not json", "not SGLang's"),
        ('{"text": "x"}', "KeyError: 'meta_info'"),
        ("[]", "not SGLang's"),
        (answer(output_token_logprobs=[]), "1 tokens but log-probs of 0"),
        (answer(output_token_logprobs=[[-0.5, 8, None]]), "or of other tokens"),
        (answer(output_token_logprobs=[[None, 7, None]]), "not finite"),  # how orjson writes NaN
        (answer(output_token_logprobs=[["a", 7, None]]), "not SGLang's"),
        (answer(output_token_logprobs=[[[-0.5], 7, None]]), "or of other tokens"),
        (answer(output_token_logprobs=[[float("nan"), 7, None]]), "not finite"),
        (answer(finish_reason={"type": "tired"}), "finish reason 'tired' is unknown"),
    ],
)
def test_an_answer_that_cannot_be_trained_on_is_refused(body, message):
    with ScriptedEngine(three_tokens, faults=[Fault(body=body)]) as engine:
        error = ask(engine)[0]
    assert isinstance(error, EngineError) and message in str(error)


def test_the_version_of_each_token_where_weights_changed_under_an_answer():
    spans = [{"version": "1", "start": 0, "end": 2}, {"version": "3", "start": 2, "end": 3}]
    versions = token_versions(spans, 3)
    assert versions is not None and versions.tolist() == [1, 1, 3]
    assert token_versions(spans[:1], 2) is None is token_versions(None, 2)  # one version: that of the whole answer
    for wrong in ([spans[1], spans[0]], [spans[0], spans[1] | {"version": "default"}]):
        with pytest.raises(EngineError, match="do not follow one another"):
            token_versions(wrong, 3)
    with pytest.raises(EngineError, match="do not cover 4 tokens"):
        token_versions(spans, 4)


def by_hand(body: bytes, prompt: Prompt) -> dict[str, np.ndarray]:
    """The arrays of an answer's sample, token by token with the standard library's parser: the oracle."""
    answer = json.loads(body)
    entries = answer["meta_info"]["output_token_logprobs"]
    version = int(answer["meta_info"]["weight_version"])
    ahead = len(prompt.tokens)
    return {
        "tokens": np.array([*map(int, prompt.tokens), *(int(entry[1]) for entry in entries)], dtype=np.int32),
        "loss_mask": np.array([0] * ahead + [1] * len(entries), dtype=np.int8),
        "engine_logprobs": np.array(
            [np.float32(0.0)] * ahead + [np.float32(float(entry[0])) for entry in entries], dtype=np.float32
        ),
        "weight_versions": np.array([-1] * ahead + [version] * len(entries), dtype=np.int32),
    }


@pytest.mark.parametrize("seed", range(20))
def test_a_sample_has_the_bits_that_the_engine_sent(seed: int):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 700))
    logprobs = -np.exp(rng.normal(-2, 12, count).clip(-100, 80)).astype(np.float32)  # subnormal ones, too
    logprobs[rng.random(count) < 0.1] = rng.choice(np.array([0.0, -0.0, -1e-45, -3.4e38], dtype=np.float32))
    ids = rng.integers(0, 2**31 - 1, count).tolist()
    values = logprobs.astype(float).tolist()
    if seed % 2:
        values = [int(value) if value == 0 else value for value in values]  # as other writers have a zero
    meta = {
        "output_token_logprobs": [[value, token, None] for value, token in zip(values, ids, strict=True)],
        "finish_reason": {"type": "length", "length": count},
        "prompt_tokens": 2,
        "weight_version": str(seed),
    }
    body = json.dumps({"text": 'é\n"\ud83d\ude00\\', "output_ids": ids, "meta_info": meta})
    with ScriptedEngine(three_tokens, faults=[Fault(body=body)]) as engine:
        generation = ask(engine)[0]
    sample = SampleBuilder(PROMPT, 1).generated(generation).finish()
    for name, expected in by_hand(body.encode(), PROMPT).items():
        array = getattr(sample, name)
        assert array.dtype == expected.dtype and array.tobytes() == expected.tobytes(), name
    assert sample.response == json.loads(body)["text"] and sample.status == TRUNCATED
    assert generation.tokens == ids and generation.logprobs == values


def test_parameters_of_a_users_own_may_hold_numpys_numbers_and_keys_that_are_no_text():
    params = {"max_new_tokens": np.int64(8), "temperature": np.float32(0.5), "logit_bias": {17: -1.5}}
    with ScriptedEngine(three_tokens) as engine:
        ask(engine, sampling_params=params)
        sent = engine.requests[0]["sampling_params"]
    assert sent == {"max_new_tokens": 8, "temperature": 0.5, "logit_bias": {"17": -1.5}}


def steps_of_reading(count: int) -> int:
    """Bytecode instructions that Python executes to make a sample of an answer of `count` tokens."""
    entries = [[-0.5, token, None] for token in range(count)]
    meta = {"output_token_logprobs": entries, "finish_reason": {"type": "stop"}, "weight_version": "1"}
    body = json.dumps({"text": "t", "output_ids": list(range(count)), "meta_info": meta})
    steps = 0

    def trace(frame, event, _argument):
        nonlocal steps
        frame.f_trace_opcodes = True
        steps += event == "opcode"
        return trace

    async def run(url: str) -> None:
        client = GenerationClient(url, None, RolloutConfig(), concurrency=1, weight_version=lambda: 1)
        try:
            sys.settrace(trace)
            SampleBuilder(PROMPT, 1).generated(await client.generate(PROMPT.tokens, {"max_new_tokens": 8})).finish()
        finally:
            sys.settrace(None)
            await client.close()

    with ScriptedEngine(three_tokens, faults=[Fault(body=body)]) as engine:
        asyncio.run(run(engine.url))
    return steps


def test_pythons_own_work_on_an_answer_is_two_lists_of_the_parsers_objects():
    """Counted, not timed: seven instructions a token and list (CPython 3.11), and the pieces of a longer body."""
    assert (steps_of_reading(2112) - steps_of_reading(64)) / 2048 <= 15
