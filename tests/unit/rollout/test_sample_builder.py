"""One builder for every kind of generation: who chose a token, under which weights, and how the whole ended."""

from __future__ import annotations

import numpy as np
import pytest

from slime_like.records import ABORTED, COMPLETED, FAILED, TRUNCATED, Prompt
from slime_like.rollout.generate import Generation
from slime_like.rollout.sample_builder import SampleBuilder

PROMPT = Prompt(index=7, text="p", tokens=np.array([11, 12], dtype=np.int32), label="l", metadata={"level": 3})


def answer(*tokens: int, version: int = 4, status: str = COMPLETED, text: str = "a", experts=None) -> Generation:
    return Generation(
        tokens=list(tokens),
        logprobs=[-0.5] * len(tokens),
        text=text,
        status=status,
        weight_version=version,
        routed_experts=experts,
    )


def test_one_turn():
    sample = SampleBuilder(PROMPT, 1).generated(answer(21, 2)).finish()
    assert (sample.prompt_index, sample.sample_index, sample.segment_index) == (7, 1, 0)
    assert sample.tokens.tolist() == [11, 12, 21, 2] and sample.loss_mask.tolist() == [0, 0, 1, 1]
    assert sample.engine_logprobs.tolist() == [0, 0, -0.5, -0.5] and sample.weight_versions.tolist() == [-1, -1, 4, 4]
    assert (sample.response, sample.status, sample.label, sample.metadata) == ("a", COMPLETED, "l", {"level": 3})
    assert [array.dtype for array in (sample.tokens, sample.loss_mask, sample.engine_logprobs)] == [
        np.int32,
        np.int8,
        np.float32,
    ]


def test_two_turns_with_a_tool_between_them_under_two_versions():
    builder = SampleBuilder(PROMPT).generated(answer(21, version=4, text="call"))
    builder.observe([31, 32])
    assert builder.tokens.tolist() == [11, 12, 21, 31, 32]
    sample = builder.generated(answer(22, 2, version=5, text=" done")).finish()
    assert sample.loss_mask.tolist() == [0, 0, 1, 0, 0, 1, 1]
    assert sample.weight_versions.tolist() == [-1, -1, 4, -1, -1, 5, 5] and sample.response == "call done"


@pytest.mark.parametrize(
    ("turns", "status"),
    [((TRUNCATED, COMPLETED), TRUNCATED), ((COMPLETED, ABORTED), ABORTED), ((COMPLETED,), COMPLETED)],
)
def test_the_worst_turn_says_how_it_ended(turns, status):
    builder = SampleBuilder(PROMPT)
    for turn in turns:
        builder.generated(answer(21, status=turn))
    assert builder.finish().status == status and builder.finish(TRUNCATED).status == TRUNCATED


def test_experts_are_those_of_the_last_answer_and_unknown_behind_it():
    experts = np.arange(6, dtype=np.int8).reshape(3, 1, 2)
    sample = SampleBuilder(PROMPT).generated(answer(21, experts=experts)).observe([31]).finish()
    assert sample.routed_experts[:3].tolist() == experts.tolist() and sample.routed_experts[3].tolist() == [[-1, -1]]


def test_a_failure_keeps_nothing_of_what_came_before():
    sample = SampleBuilder(PROMPT, 2).generated(answer(21)).fail("gone")
    assert sample.tokens.tolist() == [11, 12] and not sample.loss_mask.any() and sample.reward == 0.0
    assert (sample.status, sample.error, sample.response, sample.sample_index) == (FAILED, "gone", "", 2)


def test_tokens_without_log_probs_are_refused():
    with pytest.raises(ValueError, match="1 tokens with 0 log-probs"):
        SampleBuilder(PROMPT).generated(
            Generation(tokens=[1], logprobs=[], text="", status=COMPLETED, weight_version=1)
        )
