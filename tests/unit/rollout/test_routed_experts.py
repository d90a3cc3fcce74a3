"""The experts that an engine reports: read, checked, asked of the engines themselves, and missed where they are
missing.
"""

from __future__ import annotations

import asyncio
import base64
import dataclasses
import types

import numpy as np
import pytest

from slime_like.config.model import ModelConfig
from slime_like.config.reward import RewardConfig
from slime_like.config.rollout import RolloutConfig
from slime_like.errors import EngineError, RunError
from slime_like.records import EngineEndpoint, Prompt
from slime_like.rollout.generate import GenerationClient, Sampling
from slime_like.rollout.groups import GroupMaker
from slime_like.rollout.policy import Policy
from slime_like.rollout.routed_experts import RoutingShape
from slime_like.rollout.sample_builder import SampleBuilder
from slime_like.testing.scripted_engine import Fault, ScriptedEngine

SHAPE = RoutingShape(num_layers=2, topk=2, num_experts=8, expert_layers=(0, 1))
PROMPT = Prompt(index=3, text="p", tokens=np.array([11, 12], dtype=np.int32))


def experts_of(ids):
    """Layer 0: the token's last digit and the next one; layer 1: always 7 and 0."""
    return [[[token % 8, (token + 1) % 8], [7, 0]] for token in ids[:-1]]


def encoded(rows) -> str:
    return base64.b64encode(np.asarray(rows, dtype=np.int32).tobytes()).decode()


def test_the_last_token_has_no_experts():
    read = SHAPE.read(encoded(experts_of([11, 12, 21])), num_tokens=3)
    assert read.tolist() == [[[3, 4], [7, 0]], [[4, 5], [7, 0]], [[-1, -1], [-1, -1]]]
    assert read.dtype == np.int8


def test_the_smallest_numbers_that_hold_every_expert():
    for num_experts, dtype in ((128, np.int8), (129, np.int16), (512, np.int16)):
        shape = dataclasses.replace(SHAPE, num_experts=num_experts)
        read = shape.read(encoded([[[num_experts - 1, 0], [1, 2]]]), num_tokens=2)
        assert read.dtype == dtype and read.max() == num_experts - 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "reported no routed experts.*--enable-return-routed-experts"),
        ("not base64!", "no base64 of 32-bit numbers"),
        (base64.b64encode(b"12345").decode(), "no base64 of 32-bit numbers"),
        (encoded(experts_of([1, 2])), "reported 4 routed experts for 3 tokens, but 2 x 2 layers x 2"),
        (encoded([[[0, 8], [7, 0]], [[0, 1], [7, 0]]]), "experts 0 to 8, but the model has 0 to 7"),
        (encoded([[[0, -1], [7, 0]], [[0, 1], [7, 0]]]), "experts -1 to 7"),
        (
            encoded([[[0, 1], [7, 0]], [[3, 3], [7, 0]]]),
            r"layer 0, token 1 has the experts \[3, 3\], not 2 different ones of 0 to 7 \(1 such tokens and layers\)",
        ),
        (
            encoded([[[0, 1], [0, 0]], [[0, 1], [0, 0]]]),
            r"layer 1, token 0 has the experts \[0, 0\], .* \(2 such tokens and layers\)",
        ),
    ],
)
def test_what_is_not_an_answer(text, message):
    with pytest.raises(EngineError, match=message):
        SHAPE.read(text, num_tokens=3)


def test_shape_of_a_model():
    model = ModelConfig(num_layers=5, num_experts=64, moe_router_topk=6)
    assert RoutingShape.of(model) == RoutingShape(num_layers=5, topk=6, num_experts=64, expert_layers=(0, 1, 2, 3, 4))
    dense_first = dataclasses.replace(model, moe_layer_freq="[0]*2+[1]*3")
    assert RoutingShape.of(dense_first).expert_layers == (2, 3, 4)


def test_layers_without_experts_may_say_anything():
    dense_first = dataclasses.replace(SHAPE, expert_layers=(1,))
    assert dense_first.read(encoded([[[0, 0], [7, 0]]]), num_tokens=2)[0].tolist() == [[0, 0], [7, 0]]
    with pytest.raises(EngineError, match="layer 1, token 0 has the experts"):
        dense_first.read(encoded([[[0, 0], [0, 0]]]), num_tokens=2)


def test_one_expert_a_token_may_be_the_first():
    single = RoutingShape(num_layers=1, topk=1, num_experts=4, expert_layers=(0,))
    assert single.read(encoded([[[0]], [[0]]]), num_tokens=3).tolist() == [[[0]], [[0]], [[-1]]]


def script(_):
    return [21, 22, 2], [-0.3, -0.1, -0.7]


def telling(**options) -> ScriptedEngine:
    """An engine that reports experts."""
    engine = ScriptedEngine(script, **options)
    engine.routing = experts_of
    return engine


def ask(engines, num=1, keys=None):
    """`num` requests at once to several engines, without any router; the generations."""
    endpoints = [
        EngineEndpoint(index=i, url=engine.url, api_key=(keys or {}).get(i)) for i, engine in enumerate(engines)
    ]

    async def run():
        client = GenerationClient(
            "http://127.0.0.1:1",
            "the router's",
            RolloutConfig(),
            concurrency=16,
            weight_version=lambda: 9,
            routing=SHAPE,
            engines=endpoints,
        )
        try:
            return await asyncio.gather(*(client.generate(PROMPT.tokens, {"max_new_tokens": 8}) for _ in range(num)))
        finally:
            await client.close()

    return asyncio.run(run())


def test_a_sample_carries_the_experts_of_its_tokens():
    with telling(api_key="own") as engine:
        sample = SampleBuilder(PROMPT, 0).generated(ask([engine], keys={0: "own"})[0]).finish()
        assert engine.requests[0]["return_routed_experts"] is True
    assert sample.routed_experts[:, 0, 0].tolist() == [11 % 8, 12 % 8, 21 % 8, 22 % 8, -1]
    with pytest.raises(ValueError, match="'routed_experts': 4"):
        dataclasses.replace(sample, routed_experts=sample.routed_experts[:-1])


def test_requests_go_to_the_engine_with_the_fewest():
    slow = {"fault_for": lambda _: Fault(delay_s=0.2)}
    with telling(**slow) as one, telling(**slow) as other:
        ask([one, other], num=10)
        assert [len(one.requests), len(other.requests)] == [5, 5]


def test_an_engine_that_reports_none():
    with ScriptedEngine(script) as engine, pytest.raises(EngineError, match="reported no routed experts"):
        ask([engine])


def test_a_custom_function_must_pass_them_on():
    async def forgets(args, prompt, sampling_params, engine):
        sample = SampleBuilder(prompt, 0).generated(await engine.generate(prompt.tokens, sampling_params)).finish()
        return dataclasses.replace(sample, routed_experts=None)

    async def passes_on(args, prompt, sampling_params, engine):
        return SampleBuilder(prompt, 0).generated(await engine.generate(prompt.tokens, sampling_params)).finish()

    async def trains_nothing(args, prompt, sampling_params, engine):
        sample = await forgets(args, prompt, sampling_params, engine)
        return dataclasses.replace(sample, loss_mask=np.zeros_like(sample.loss_mask))

    async def run(function, engine):
        endpoint = EngineEndpoint(index=0, url=engine.url)
        client = GenerationClient(
            "http://127.0.0.1:1",
            None,
            RolloutConfig(),
            concurrency=1,
            weight_version=lambda: 0,
            routing=SHAPE,
            engines=[endpoint],
        )
        maker = GroupMaker(
            client,
            types.SimpleNamespace(config=RewardConfig(rm_type="exact")),
            Policy(),
            plugin_args=None,
            custom_generate=function,
            custom_timeout_s=10,
        )
        try:
            return (
                await maker._generate(
                    PROMPT, 0, Sampling.for_training(RolloutConfig(), max_context_tokens=100, seed="1")
                )
            )[0]
        finally:
            await client.close()

    with telling() as engine:
        assert asyncio.run(run(passes_on, engine)).routed_experts.shape == (5, 2, 2)
        assert (asyncio.run(run(trains_nothing, engine)).routed_experts == np.full((5, 2, 2), -1)).all()
        with pytest.raises(RunError, match=r"no routed_experts, which --use-rollout-routing-replay trains with"):
            asyncio.run(run(forgets, engine))
