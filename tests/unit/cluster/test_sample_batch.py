"""What a rank makes of a batch's parts; how they travel is in tests/multiprocess/test_train_group.py."""

from __future__ import annotations

import dataclasses
import pickle

import numpy as np

from slime_like.cluster.sample_batch import JoinedRows, merged, packed, packed_column
from slime_like.records import TrainSample
from tests.helpers.train_world import make_samples


def assert_equal(one: TrainSample, other: TrainSample) -> None:
    for field in dataclasses.fields(TrainSample):
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype and a.shape == b.shape and (a == b).all(), field.name
        else:
            assert a == b, field.name


def test_columns_are_in_the_records_that_a_rank_sees():
    samples = make_samples(2)
    rows = [np.arange(len(sample.tokens), dtype=np.float32) for sample in samples]
    first, second = merged(("kl", "values"), packed(samples), packed_column(rows), [-row for row in rows])
    assert first.kl.tolist() == rows[0].tolist() and second.values.tolist() == (-rows[1]).tolist()
    assert first.tokens.tolist() == samples[0].tokens.tolist() and samples[0].kl is None


def test_samples_come_out_as_they_went_in():
    """Of other lengths, none at all, with experts of another type, with metadata, with something of some samples
    only.
    """
    samples = make_samples(4)
    experts = [
        np.ones((len(sample.tokens), 2, 3), np.int16 if number else np.int8) for number, sample in enumerate(samples)
    ]
    more = [
        dataclasses.replace(samples[0], metadata={"a": [1]}, routed_experts=experts[0]),
        dataclasses.replace(samples[1], reference_logprobs=np.zeros(len(samples[1].tokens), np.float32)),
        dataclasses.replace(samples[2], advantages=samples[2].advantages.astype(np.float64)),
        dataclasses.replace(samples[3], tokens=np.arange(20, dtype=np.int32)[::2]),
    ]
    for these in (samples, more, samples[:1], [dataclasses.replace(s, routed_experts=experts[1]) for s in samples], []):
        back = merged((), packed(these))
        assert len(back) == len(these)
        for one, other in zip(back, these, strict=True):
            assert_equal(one, other)


def test_many_samples_travel_in_few_buffers():
    buffers: list = []
    pickle.dumps(packed(make_samples(100)), protocol=5, buffer_callback=buffers.append)
    assert len(buffers) == 2 * 6  # of each array that they have, and their lengths
    assert isinstance(packed_column([np.zeros(2), np.zeros(3)]), JoinedRows)
    large = [np.zeros(1 << 16), np.zeros(2)]
    assert packed_column(large) is large, "joining them would take their memory twice"
