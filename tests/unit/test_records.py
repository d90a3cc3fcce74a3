"""What is checked about the records themselves."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from slime_like import records
from slime_like.records import DeltaCount, EngineEndpoint, Prompt, Sample, SampleGroup, routing_fault


def experts_of(*tokens) -> np.ndarray:
    """[T, 2 layers, 3 experts]; layer 0 has none and says zeros."""
    return np.array([[[0, 0, 0], token] for token in tokens], dtype=np.int8)


def test_different_experts_of_the_model_are_right():
    assert routing_fault(experts_of([4, 0, 2], [-1, -1, -1], [1, 2, 3]), [1], 5) is None
    assert routing_fault(experts_of([4, 0, 2])[:0], [1], 5) is None
    assert routing_fault(np.zeros((4, 2, 1), np.int8), [0, 1], 5) is None, "one expert a token may be expert 0"


@pytest.mark.parametrize("wrong", [[0, 0, 0], [1, 2, 1], [1, 2, 5], [-1, 1, 2], [3, -1, 2]])
def test_what_is_wrong_is_named(wrong):
    fault = routing_fault(experts_of([4, 0, 2], wrong, [-1, -1, -1], wrong), [1], 5)
    assert (
        fault == f"layer 1, token 1 has the experts {wrong}, not 3 different ones of 0 to 4 (2 such tokens and layers)"
    )


def test_only_layers_with_experts_count():
    whole = experts_of([4, 0, 2])
    assert routing_fault(whole, [0, 1], 5).startswith("layer 0, token 0 has the experts [0, 0, 0]")
    assert routing_fault(whole, [], 5) is None


def sample(*, reward: float | None = None, **arrays) -> Sample:
    """The docstring's example: a prompt of 2 tokens, a response of 3."""
    fields = {
        "tokens": np.array([11, 12, 21, 22, 2], dtype=np.int32),
        "loss_mask": np.array([0, 0, 1, 1, 1], dtype=np.int8),
        "engine_logprobs": np.array([0, 0, -0.3, -0.1, -0.7], dtype=np.float32),
        "weight_versions": np.array([-1, -1, 4, 4, 4], dtype=np.int32),
    }
    return Sample(prompt_index=7, sample_index=1, response="ab", reward=reward, **(fields | arrays))


def group(*rewards: float | None) -> SampleGroup:
    samples = tuple(
        dataclasses.replace(sample(reward=reward), sample_index=index) for index, reward in enumerate(rewards)
    )
    return SampleGroup(prompt=Prompt(index=7, text="q", tokens=np.array([11, 12], dtype=np.int32)), samples=samples)


def test_response_tokens_are_those_that_are_trained_on():
    assert sample().num_response_tokens == 3
    # a tool's answer between
    assert sample(loss_mask=np.array([0, 0, 1, 0, 1], dtype=np.int8)).num_response_tokens == 2


@pytest.mark.parametrize("name", ["loss_mask", "engine_logprobs", "weight_versions", "routed_experts"])
def test_arrays_of_another_length_are_refused_by_name(name):
    with pytest.raises(ValueError, match=rf"sample 7/1: arrays differ in length: .*'{name}': 4"):
        sample(**{name: np.zeros(4)})


def test_the_rewards_of_a_group():
    assert group(1.0, 0.0, 0.5).rewards.tolist() == [1.0, 0.0, 0.5]
    with pytest.raises(ValueError, match=r"prompt 7: samples \[0, 2\] have no reward yet"):
        group(None, 1.0, None).rewards  # noqa: B018 - raises


def test_counts_of_several_engines_add_up():
    one = DeltaCount(num_bytes=10, num_changed=1, num_elements=4, full_engines=frozenset({0}))
    other = DeltaCount(num_bytes=5, num_changed=2, num_elements=4, full_engines=frozenset({2}))
    assert one + other == DeltaCount(num_bytes=15, num_changed=3, num_elements=8, full_engines=frozenset({0, 2}))
    assert (one + other).metrics() == {"sync/delta_bytes": 15.0, "sync/full_engines": 2.0, "sync/changed_share": 3 / 8}


def test_no_share_where_nobody_took_a_difference():
    assert DeltaCount(num_bytes=7, full_engines=frozenset({1})).metrics() == {
        "sync/delta_bytes": 7.0,
        "sync/full_engines": 1.0,
    }


def test_keys_are_not_printed():
    text = repr(EngineEndpoint(index=0, url="http://127.0.0.1:1", api_key="s3cret", receiver_key="s3cret"))
    assert "http://127.0.0.1:1" in text and "s3cret" not in text


def test_records_are_frozen():
    kinds = [kind for kind in vars(records).values() if dataclasses.is_dataclass(kind)]
    assert kinds and all(kind.__dataclass_params__.frozen for kind in kinds)
