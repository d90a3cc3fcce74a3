"""The client library reads our answers as they were meant."""

from __future__ import annotations

import numpy as np
import pytest
from tinker.proto.response_conv import deserialize_forward_backward_output, deserialize_sample_response

from slime_like.records import PassResult
from slime_like.tinker.api.wire.answers import (
    metric_names,
    pass_to_json,
    pass_to_protobuf,
    sample_to_json,
    sample_to_protobuf,
    to_json_answer,
)
from slime_like.tinker.records import CallResult, Kind, SampledSequence, SampleResult, TopLogprobs


def draw_rows(rng: np.random.Generator) -> list[np.ndarray]:
    shapes = [(int(rng.integers(1, 9)), *([int(rng.integers(1, 4))] * int(rng.integers(0, 2)))) for _ in range(9)]
    return [rng.normal(size=shape).astype(np.float32) for shape in shapes]


def test_log_probs_of_rows_of_any_shapes():
    rng = np.random.default_rng(1)
    for _ in range(20):
        rows = draw_rows(rng)
        output = deserialize_forward_backward_output(
            pass_to_protobuf(PassResult(log_probs=rows, metrics={"loss": 2.5, "tokens:mean": 3.0}))
        )
        assert output.metrics == {"loss:sum": 2.5, "tokens:mean": 3.0}
        assert len(output.loss_fn_outputs) == len(rows)
        for datum, row in zip(output.loss_fn_outputs, rows, strict=True):
            np.testing.assert_array_equal(datum["logprobs"].to_numpy(), row, strict=True)


def test_names_that_clients_take():
    assert metric_names({"loss": 1, "entropy": 2, "a:b": 3, "clip:max": 4, ":sum": 5, "x:y:sum": 6}) == {
        "loss:sum": 1,
        "entropy:sum": 2,
        "a_b:sum": 3,
        "clip:max": 4,
        "_sum:sum": 5,
        "x_y_sum:sum": 6,
    }


def a_sample() -> SampleResult:
    rng = np.random.default_rng(2)

    def top(length: int) -> TopLogprobs:
        return TopLogprobs(
            token_ids=rng.integers(0, 99, size=(length, 3)).astype(np.int32),
            logprobs=rng.normal(size=(length, 3)).astype(np.float32),
        )

    topk_prompt = top(4)
    topk_prompt.logprobs[0] = np.nan
    sequences = tuple(
        SampledSequence(
            tokens=rng.integers(0, 99, size=5).astype(np.int32),
            logprobs=rng.normal(size=5).astype(np.float32),
            stop_reason=reason,
            topk=top(5),
        )
        for reason in ("stop", "length")
    )
    return SampleResult(
        sequences=sequences,
        prompt_logprobs=np.array([np.nan, -1, -2, -3], np.float32),
        topk_prompt=topk_prompt,
        prompt_cache_hit_tokens=2,
    )


def test_samples_with_all_that_can_be_asked_for():
    ours = a_sample()
    theirs = deserialize_sample_response(sample_to_protobuf(ours))
    assert theirs.prompt_logprobs == [None, -1, -2, -3] and theirs.prompt_cache_hit_tokens == 2
    for mine, other in zip(ours.sequences, theirs.sequences, strict=True):
        assert other.stop_reason == mine.stop_reason
        np.testing.assert_array_equal(other.tokens_np, mine.tokens)
        np.testing.assert_array_equal(other.logprobs_np, mine.logprobs)
        np.testing.assert_array_equal(other.topk_logprobs_np.token_ids, mine.topk.token_ids)
        np.testing.assert_array_equal(other.topk_logprobs_np.logprobs, mine.topk.logprobs)
    top = theirs.topk_prompt_logprobs_np
    assert top.token_ids[0].tolist() == [0, 0, 0] and (top.logprobs[0] == -99999).all()
    np.testing.assert_array_equal(top.token_ids[1:], ours.topk_prompt.token_ids[1:])
    np.testing.assert_array_equal(top.logprobs[1:], ours.topk_prompt.logprobs[1:])


def test_a_sample_that_asks_for_nothing_has_nothing():
    ours = a_sample()
    bare = SampleResult(sequences=ours.sequences[:1])
    theirs = deserialize_sample_response(sample_to_protobuf(bare))
    assert theirs.prompt_logprobs is None and theirs.topk_prompt_logprobs_np is None
    assert set(sample_to_json(bare)) == {"type", "sequences"}


def test_json_of_old_clients():
    ours = a_sample()
    answer = sample_to_json(ours)
    assert answer["prompt_logprobs"] == [None, -1, -2, -3]
    assert answer["topk_prompt_logprobs"][0] is None and len(answer["topk_prompt_logprobs"][1]) == 3
    assert answer["sequences"][0] == {
        "tokens": ours.sequences[0].tokens.tolist(),
        "logprobs": pytest.approx(ours.sequences[0].logprobs.tolist()),
        "stop_reason": "stop",
    }
    rows = [np.array([1.0, -2.0], np.float32)]
    assert pass_to_json(PassResult(log_probs=rows, metrics={"loss": 1.0})) == {
        "loss_fn_output_type": "ArrayRecord",
        "loss_fn_outputs": [{"logprobs": {"data": [1.0, -2.0], "dtype": "float32", "shape": [2]}}],
        "metrics": {"loss:sum": 1.0},
    }


@pytest.mark.parametrize(
    ("kind", "result", "answer"),
    [
        (Kind.OPTIM_STEP, {"metrics": {"a": 1}}, {"type": "optim_step", "metrics": {"a": 1}}),
        (Kind.SAVE_WEIGHTS, {"path": "p"}, {"type": "save_weights", "path": "p"}),
        (Kind.SAVE_FOR_SAMPLER, {"path": "p"}, {"type": "save_weights_for_sampler", "path": "p"}),
        (
            Kind.SAVE_FOR_SAMPLER,
            {"sampler_id": "s"},
            {"type": "save_weights_for_sampler", "sampling_session_id": "s"},
        ),
        (Kind.CREATE_FROM_STATE, {"model_id": "m"}, {"type": "load_weights", "model_id": "m"}),
    ],
)
def test_answers_without_arrays(kind: Kind, result: dict, answer: dict):
    assert to_json_answer(CallResult(kind=kind, result=result)) == answer
