"""Beside adapters the base is a reference for nothing, earlier adapters another, a whole other model a third."""

from __future__ import annotations

import pytest
import torch

from slime_like.megatron_backend.lora.held import HeldAdapters, held_beside
from slime_like.megatron_backend.reference import HeldWeights
from slime_like.records import BASE, REFERENCE, TEACHER, WeightsRef
from tests.unit.megatron_backend.lora.toy import adapter_on, group_of_one, stage_with


@pytest.fixture
def held():
    with group_of_one() as group:
        adapter, switch = adapter_on(group, (4,), {0: "o_proj"})
        stage = stage_with(adapter, 3, 4)
        yield HeldAdapters(stage, switch), stage[0][0], adapter


HIDDEN = torch.ones(1, 1, 3)


def outputs(held, linear, *refs) -> list[torch.Tensor]:
    answers = []
    for ref in refs:
        with held.using(ref):
            assert held.has_base == (ref == BASE)
            answers.append(linear(HIDDEN)[0].detach().clone())
    return answers


def test_the_bare_base_is_the_reference_and_is_not_copied(held):
    holder, linear, _ = held
    assert REFERENCE not in holder
    holder.keep_start(REFERENCE)
    memory = linear.weight.data_ptr()
    with_adapter, bare, again = outputs(holder, linear, BASE, REFERENCE, BASE)
    assert torch.equal(bare, torch.nn.functional.linear(HIDDEN, linear.weight))
    assert torch.equal(with_adapter, again) and not torch.equal(with_adapter, bare)
    assert linear.weight.data_ptr() == memory and not holder._frozen


def test_a_reference_that_follows_is_an_earlier_set_of_adapters(held):
    holder, linear, adapter = held
    holder.keep_start(REFERENCE)
    (earlier,) = outputs(holder, linear, BASE)
    holder.copy(BASE, REFERENCE)
    with torch.no_grad():
        adapter.parts[0].lora_b.mul_(2)
    now, reference, again = outputs(holder, linear, BASE, REFERENCE, BASE)
    assert torch.equal(reference, earlier) and torch.equal(now, again) and not torch.equal(now, earlier)


def test_another_whole_model_scores_without_adapters(held):
    holder, linear, _ = held
    own = linear.weight.detach().clone()
    holder.keep(TEACHER, lambda: torch.nn.init.constant_(linear.weight, 2.0))
    assert torch.equal(linear.weight, own)
    before, teacher, after = outputs(holder, linear, BASE, TEACHER, BASE)
    assert teacher.flatten().tolist() == [6.0] * 4
    assert torch.equal(before, after) and torch.equal(linear.weight, own)


def test_names_that_are_not_held(held):
    holder, linear, _ = held
    with pytest.raises(ValueError, match="'nobody' are not loaded"):
        outputs(holder, linear, WeightsRef("nobody"))
    assert type(held_beside(torch.nn.ModuleList([torch.nn.Linear(2, 2)]), None)) is HeldWeights
