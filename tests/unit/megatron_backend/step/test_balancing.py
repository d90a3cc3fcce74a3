"""When routers have a balancing loss; tests/multiprocess/test_experts.py measures it."""

from __future__ import annotations

import dataclasses

import pytest

from slime_like.config.model import ModelConfig
from slime_like.megatron_backend.step.balancing import has_balancing_loss

MODEL = ModelConfig(
    num_layers=2, hidden_size=8, num_attention_heads=2, vocab_size=11, num_experts=4, moe_aux_loss_coeff=0.01
)


@pytest.mark.parametrize(
    ("changes", "has_one"),
    [
        ({}, True),
        ({"num_experts": None}, False),
        ({"moe_aux_loss_coeff": 0.0}, False),
        ({"moe_router_load_balancing_type": "none"}, False),
    ],
)
def test_it_needs_experts_and_a_weight(changes: dict, has_one: bool):
    assert has_balancing_loss(dataclasses.replace(MODEL, **changes)) is has_one
