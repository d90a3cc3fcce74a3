"""A rollout written and read again is the same rollout."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from slime_like.errors import DataError
from slime_like.records import Prompt, Sample, SampleGroup
from slime_like.rollout.debug_data import load_rollout, save_rollout
from slime_like.rollout.sample_builder import SampleBuilder


def group(index: int, num_samples: int) -> SampleGroup:
    prompt = Prompt(index=index, text="ü", tokens=np.array([5, 6], dtype=np.int32), label="42", metadata={"level": [1]})
    good = [
        Sample(
            prompt_index=index,
            sample_index=i,
            tokens=np.arange(3 + i, dtype=np.int32),
            loss_mask=np.array([0, 0, *[1] * (1 + i)], dtype=np.int8),
            engine_logprobs=np.linspace(-1, 0, 3 + i, dtype=np.float32),
            weight_versions=np.full(3 + i, 7, dtype=np.int32),
            response="漢",
            label="42",
            metadata={"level": [1]},
            reward=0.5,
        )
        for i in range(num_samples - 1)
    ]
    return SampleGroup(prompt=prompt, samples=(*good, SampleBuilder(prompt, num_samples - 1).fail("gone")))


def assert_equal(one, other):
    for field in dataclasses.fields(one):
        mine, theirs = getattr(one, field.name), getattr(other, field.name)
        if isinstance(mine, np.ndarray):
            assert mine.dtype == theirs.dtype
            np.testing.assert_array_equal(mine, theirs)
        else:
            assert mine == theirs


def test_round_trip(tmp_path):
    groups = (group(3, 2), group(9, 4))
    path = save_rollout(str(tmp_path / "deep" / "r{rollout_id}.npz"), 12, groups)
    assert path.name == "r12.npz"
    loaded = load_rollout(str(tmp_path / "deep" / "r{rollout_id}.npz"), 12)
    assert [len(one.samples) for one in loaded] == [2, 4]
    for one, other in zip(groups, loaded, strict=True):
        assert_equal(one.prompt, other.prompt)
        for mine, theirs in zip(one.samples, other.samples, strict=True):
            assert_equal(mine, theirs)


def test_experts_come_back_where_there_were_any(tmp_path):
    template, original = str(tmp_path / "{rollout_id}.npz"), group(3, 3)
    experts = np.arange(3 * 2 * 2, dtype=np.int8).reshape(3, 2, 2)
    samples = (dataclasses.replace(original.samples[0], routed_experts=experts), *original.samples[1:])
    save_rollout(template, 0, [dataclasses.replace(original, samples=samples)])
    (loaded,) = load_rollout(template, 0)
    for mine, theirs in zip(samples, loaded.samples, strict=True):
        assert_equal(mine, theirs)
    assert [sample.routed_experts is None for sample in loaded.samples] == [False, True, True]


def test_what_cannot_be_read_is_named(tmp_path):
    template = str(tmp_path / "{rollout_id}.npz")
    with pytest.raises(DataError, match=r"0.npz: no such file \(rollout 0\)"):
        load_rollout(template, 0)
    (tmp_path / "1.npz").write_bytes(b"junk")
    np.savez(tmp_path / "2.npz", other=np.zeros(2))
    np.savez(tmp_path / "3.npz", described=np.array([object()], dtype=object))  # would run code if unpickled
    for number in (1, 2, 3):
        with pytest.raises(DataError, match="is no file of --save-debug-rollout-data"):
            load_rollout(template, number)


def test_a_label_that_json_cannot_hold_is_named(tmp_path):
    bad = dataclasses.replace(group(1, 2), prompt=dataclasses.replace(group(1, 2).prompt, label={1, 2}))
    with pytest.raises(DataError, match="no JSON value"):
        save_rollout(str(tmp_path / "{rollout_id}.npz"), 0, [bad])


def test_no_groups_are_no_groups(tmp_path):
    assert load_rollout(str(save_rollout(str(tmp_path / "none.npz"), 0, ())), 0) == ()
