"""Weights that are swapped in and out, and log-probs that samples brought."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from slime_like.errors import DataError
from slime_like.megatron_backend.reference import HeldWeights, checked_row, copy_weights, put_weights, swapped
from slime_like.records import BASE, REFERENCE, TEACHER, TrainSample

SAMPLE = TrainSample(
    prompt_index=7, sample_index=1, tokens=np.zeros(3), loss_mask=np.zeros(3), engine_logprobs=np.zeros(3),
    weight_versions=np.zeros(3), reward=0.0,
    advantages=np.zeros(3), weights=np.zeros(3),
)  # fmt: skip


def layer(value: float) -> torch.nn.Linear:
    linear = torch.nn.Linear(2, 1, bias=False)
    torch.nn.init.constant_(linear.weight, value)
    return linear


def test_a_copy_does_not_follow():
    stage = layer(1.0)
    copy = copy_weights(stage)
    torch.nn.init.constant_(stage.weight, 2.0)
    assert copy["weight"].tolist() == [[1.0, 1.0]]


def test_weights_are_put_in_place():
    stage = layer(1.0)
    memory = stage.weight.data_ptr()
    put_weights(stage, {"weight": torch.tensor([[3.0, 4.0]])})
    assert stage.weight.tolist() == [[3.0, 4.0]] and stage.weight.data_ptr() == memory


def test_its_own_weights_come_back_also_after_an_error():
    stage = layer(1.0)
    with pytest.raises(RuntimeError, match="inside"), swapped(stage, {"weight": torch.tensor([[3.0, 4.0]])}):
        assert stage.weight.tolist() == [[3.0, 4.0]]
        raise RuntimeError("inside")
    assert stage.weight.tolist() == [[1.0, 1.0]]


def test_a_model_knows_whose_weights_it_holds():
    stage = layer(1.0)
    held = HeldWeights(stage)
    assert BASE in held and REFERENCE not in held and held.has_base
    held.copy(BASE, REFERENCE)
    held.keep(TEACHER, lambda: torch.nn.init.constant_(stage.weight, 3.0))
    torch.nn.init.constant_(stage.weight, 2.0)  # a train step
    with held.using(REFERENCE):
        assert stage.weight.tolist() == [[1.0, 1.0]] and not held.has_base
        with held.using(REFERENCE):  # no second swap, and the outer one goes on
            pass
        with held.using(TEACHER):
            assert stage.weight.tolist() == [[3.0, 3.0]]
        assert stage.weight.tolist() == [[1.0, 1.0]]
    with held.using(BASE):
        assert stage.weight.tolist() == [[2.0, 2.0]] and held.has_base


def test_weights_that_are_not_held_are_refused():
    held = HeldWeights(layer(1.0))
    held.copy(BASE, REFERENCE)
    with pytest.raises(ValueError, match="weights 'teacher' are not loaded. Known: .*reference"), held.using(TEACHER):
        pass
    with pytest.raises(AssertionError, match="what is trained"):
        held.copy(REFERENCE, BASE)


def test_log_probs_that_are_missing_or_too_short_are_told():
    row = np.array([0.0, -1.0, -2.0], dtype=np.float32)
    assert checked_row(dataclasses.replace(SAMPLE, reference_logprobs=row)) is row
    with pytest.raises(DataError, match="sample 7/1 of 3 tokens has no reference log-probs."):
        checked_row(SAMPLE)
    with pytest.raises(DataError, match="sample 7/1 of 3 tokens has 2 reference log-probs."):
        checked_row(dataclasses.replace(SAMPLE, reference_logprobs=row[:2]))
