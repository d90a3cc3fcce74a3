"""Weights that are swapped in and out, and log-probs that samples brought."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from slime_like.errors import DataError
from slime_like.megatron_backend.reference import HeldWeights, checked_row, copy_weights, put_weights
from slime_like.records import BASE, REFERENCE, TEACHER, TrainSample, WeightsRef

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


def holding(stage: torch.nn.Module, **frozen: float) -> HeldWeights:
    """What the stage holds, and frozen weights beside it, all of one number."""
    held = HeldWeights(stage)
    for name, value in frozen.items():
        held.keep(WeightsRef(name=name), lambda value=value: torch.nn.init.constant_(stage.weight, value))
    return held


class Copies(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts copies from one tensor to another."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function._schema.name == "aten::copy_"
        return function(*args, **(kwargs or {}))


def test_its_own_weights_come_back_also_after_an_error():
    stage = layer(1.0)
    held = holding(stage, reference=3.0)
    with pytest.raises(RuntimeError, match="inside"), held.using(REFERENCE):
        assert stage.weight.tolist() == [[3.0, 3.0]]
        raise RuntimeError("inside")
    assert stage.weight.tolist() == [[1.0, 1.0]] and held.has_base


def test_its_own_weights_are_copied_once_for_a_reference_and_a_teacher():
    stage = layer(1.0)
    held = holding(stage, reference=3.0, teacher=4.0)
    held.base_changes()
    with Copies() as copies:
        for weights, value in ((REFERENCE, 3.0), (TEACHER, 4.0)):
            with held.using(weights):
                assert stage.weight.tolist() == [[value, value]]
            assert stage.weight.tolist() == [[1.0, 1.0]]
    assert copies.count == 1 + 2 * 2  # own out; each in, own back


def test_own_weights_that_changed_are_copied_again_to_the_same_memory():
    stage = layer(1.0)
    held = holding(stage, reference=3.0)
    memory = held._base["weight"].data_ptr()
    held.base_changes()
    put_weights(stage, {"weight": torch.full((1, 2), 2.0)})
    with held.using(REFERENCE):
        pass
    assert stage.weight.tolist() == [[2.0, 2.0]] and held._base["weight"].data_ptr() == memory


def test_a_copy_is_one_piece_of_host_memory_and_can_be_used_again():
    stage = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1)).to(torch.bfloat16)
    copy = copy_weights(stage)
    assert {name: weight.tolist() for name, weight in copy.items()} == {
        name: weight.tolist() for name, weight in stage.named_parameters()
    }
    assert len({weight.untyped_storage().data_ptr() for weight in copy.values()}) == 1
    first = min(weight.data_ptr() for weight in copy.values())
    assert all((weight.data_ptr() - first) % 64 == 0 for weight in copy.values())
    torch.nn.init.constant_(stage[1].bias, 5.0)
    again = copy_weights(stage, into=copy)
    assert again is copy and copy["1.bias"].tolist() == [5.0]


def test_a_model_knows_whose_weights_it_holds():
    stage = layer(1.0)
    held = HeldWeights(stage)
    assert BASE in held and REFERENCE not in held and held.has_base
    held.copy(BASE, REFERENCE)
    held.keep(TEACHER, lambda: torch.nn.init.constant_(stage.weight, 3.0))
    held.base_changes()
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


def test_a_copy_that_is_still_what_is_trained_is_not_swapped_in():
    stage = layer(1.0)
    held = holding(stage, teacher=3.0)
    held.keep_start(REFERENCE)
    assert held.is_base(REFERENCE) and not held.is_base(TEACHER)
    with Copies() as copies, held.using(REFERENCE):
        assert stage.weight.tolist() == [[1.0, 1.0]] and not held.has_base
    assert copies.count == 0 and held.has_base
    held.base_changes()
    torch.nn.init.constant_(stage.weight, 2.0)  # a train step
    assert not held.is_base(REFERENCE)
    with held.using(REFERENCE):
        assert stage.weight.tolist() == [[1.0, 1.0]]
    held.copy(BASE, REFERENCE)
    assert held.is_base(REFERENCE)
    held.copy(REFERENCE, TEACHER)
    assert held.is_base(TEACHER)
    held.keep(REFERENCE, lambda: torch.nn.init.constant_(stage.weight, 4.0))
    assert not held.is_base(REFERENCE) and held.is_base(TEACHER)


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
