"""Calls and answers come back as they were, bitwise."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from slime_like.records import LossRow, PassResult
from slime_like.tinker.records import Call, CallResult, Kind, SampledSequence, SampleJob, SampleResult, TopLogprobs
from slime_like.tinker.store.bodies import pack_call, pack_result, unpack_call, unpack_result

ODD = np.array([np.nan, -0.0, np.inf, 5e-324, 1.1], dtype=np.float32)


def same(left: object, right: object) -> bool:
    """Equal in type, shape and every bit."""
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if dataclasses.is_dataclass(left):
        fields = dataclasses.fields(left)
        return type(left) is type(right) and all(same(getattr(left, f.name), getattr(right, f.name)) for f in fields)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(value, right[key]) for key, value in left.items())
    if isinstance(left, tuple | list):
        return len(left) == len(right) and all(map(same, left, right))
    return repr(left) == repr(right)  # NaN equals NaN here, and -0.0 is not 0.0


def row(num_tokens: int, wide: int = 0) -> LossRow:
    shape = (num_tokens, wide) if wide else (num_tokens,)
    targets = np.arange(num_tokens * max(1, wide)).reshape(shape)
    inputs = {"a.b": np.resize(ODD, shape), "weights": np.ones(shape, np.float32)}
    return LossRow(tokens=np.arange(num_tokens, dtype=np.int32), targets=targets, inputs=inputs)


@pytest.mark.parametrize(
    "call",
    [
        Call(kind=Kind.OPTIM_STEP, tenant="a", session_id="s", model_id="m", seq_id=3, fields={"adam": {"eps": 1e-12}}),
        Call(
            kind=Kind.FORWARD_BACKWARD,
            tenant="ä",
            session_id="s",
            model_id="m",
            seq_id=2**31 - 1,
            fields={"loss": "ppo", "config": {"clip": float("inf")}},
            rows=tuple([row(5), row(3, wide=4), row(0)] + [row(1)] * 11),
        ),
        Call(
            kind=Kind.SAMPLE,
            tenant="a",
            session_id="s",
            sampler_id="x",
            seq_id=2_000_000_001,
            sample=SampleJob(sampler_id="x", prompt=np.zeros(0, np.int32), stop=(), temperature=0.1, seed=2**40),
        ),
        Call(
            kind=Kind.SAMPLE,
            tenant="a",
            session_id="s",
            sample=SampleJob(
                sampler_id="x",
                prompt=np.arange(9, dtype=np.int32),
                stop=("a", "\n"),
                max_tokens=3,
                prompt_logprobs_last_n=2,
                prompt_targets=np.arange(16).reshape(8, 2),
            ),
        ),
    ],
)
def test_a_call_comes_back(call: Call):
    assert same(unpack_call(pack_call(call)), call)


@pytest.mark.parametrize(
    ("kind", "result"),
    [
        (Kind.OPTIM_STEP, {"metrics": {"grad_norm": float("nan")}}),
        (Kind.FORWARD, PassResult(log_probs=[ODD, ODD[:0]] * 6, metrics={"loss": 0.1 + 0.2})),
        (Kind.FORWARD, PassResult(log_probs=[], metrics={})),
        (
            Kind.SAMPLE,
            SampleResult(
                sequences=(
                    SampledSequence(tokens=np.arange(5, dtype=np.int32), logprobs=ODD, stop_reason="stop"),
                    SampledSequence(
                        tokens=np.arange(1, dtype=np.int32),
                        logprobs=ODD[:1],
                        stop_reason="length",
                        topk=TopLogprobs(token_ids=np.ones((1, 2), np.int32), logprobs=np.zeros((1, 2), np.float32)),
                    ),
                ),
                prompt_logprobs=ODD,
                prompt_targets=np.stack([ODD, ODD], 1),
                topk_prompt=TopLogprobs(token_ids=np.ones((5, 3), np.int32), logprobs=np.zeros((5, 3), np.float32)),
                prompt_cache_hit_tokens=4,
                weights="policy@7",
            ),
        ),
        (Kind.SAMPLE, SampleResult(sequences=())),
    ],
)
def test_an_answer_comes_back(kind: Kind, result: object):
    answer = CallResult(kind=kind, result=result)
    assert same(unpack_result(pack_result(answer)), answer)


def test_nothing_is_pickled():
    with pytest.raises(Exception, match="(?i)type|unsupported|dtype|object"):
        pack_result(CallResult(kind=Kind.FORWARD, result=PassResult(log_probs=[np.array([object()])], metrics={})))
