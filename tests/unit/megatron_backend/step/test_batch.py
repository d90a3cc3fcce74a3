"""A train step's records as a batch: what is refused, and its columns; how it is cut, tests/multiprocess says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from slime_like.algorithms.reduce import token_weights
from slime_like.config.run import RunConfig
from slime_like.errors import DataError
from slime_like.megatron_backend.step.batch import StepBatch, StepCutter
from slime_like.megatron_backend.step.packing import PackLayout, pack
from slime_like.records import TrainSample

CPU = torch.device("cpu")


def sample(length: int, index: int = 0) -> TrainSample:
    """The first token is the prompt."""
    mask = np.array([0] + [1] * (length - 1), dtype=np.int8)[:length]
    ones = np.ones(length, dtype=np.float32)
    return TrainSample(
        prompt_index=3, sample_index=index, tokens=np.arange(length), loss_mask=mask, engine_logprobs=-ones,
        weight_versions=np.zeros(length, dtype=np.int32), reward=1.0, advantages=ones, weights=ones,
    )  # fmt: skip


def batch_of(*samples: TrainSample) -> StepBatch:
    lengths = [len(one.tokens) for one in samples]
    weights = token_weights([length - 1 for length in lengths], reduction="sample", rollouts=[(0, 0)], divisor=None)
    packs = (pack(samples, range(len(samples)), weights, layout=PackLayout(), device=CPU),)
    return StepBatch(
        packs=packs,
        num_samples=len(samples),
        num_tokens=sum(lengths),
        num_computed_tokens=0,
        num_trained_tokens=sum(lengths),
    )


@pytest.mark.parametrize(("samples", "named"), [([sample(4), sample(1, 5)], r"3/5"), ([], "there are none")])
def test_too_short_samples_are_refused(samples, named):
    with pytest.raises(DataError, match=f"at least 2 tokens.*{named}"):
        StepCutter(RunConfig(), device=CPU)(samples)


def test_what_is_cut_stays_as_it_is():
    batch = batch_of(sample(4))
    assert StepCutter(RunConfig(), device=CPU)(batch) is batch


def test_columns_are_read_at_the_trained_tokens():
    batch = batch_of(sample(4)).with_columns(old=[torch.tensor([-1.0, -2.0, -3.0, 0.0])], reference=None)
    assert batch.column("old", 0).tolist() == [-1.0, -2.0, -3.0]
    assert batch.column("reference", 0) is None and set(batch.columns) == {"old"}
