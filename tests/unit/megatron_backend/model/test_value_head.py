"""A critic's last layer starts at nothing, and is put only where a stage has an output layer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from slime_like.megatron_backend.model.value_head import OUTPUT_WEIGHT, ValueHead, has_value_head, put_value_head


@pytest.fixture
def config():
    from megatron.core.transformer import TransformerConfig

    return TransformerConfig(num_layers=1, hidden_size=3, num_attention_heads=1)


def test_a_fresh_critic_expects_nothing(config):
    values, bias = ValueHead(config)(torch.randn(4, 1, 3))
    assert values.shape == (4, 1, 1) and not values.any() and bias is None


def test_a_value_is_one_product_a_token(config):
    head = ValueHead(config)
    head.weight.data.copy_(torch.tensor([[1.0, 2.0, 3.0]]))
    values, _ = head(torch.tensor([[[1.0, 0.0, 0.0]], [[1.0, 1.0, 1.0]]]))
    assert values.flatten().tolist() == [1.0, 6.0]
    assert [name for name, _ in head.named_parameters(prefix="output_layer")] == [OUTPUT_WEIGHT]


def test_only_the_last_stage_gets_one(config):
    last, first = SimpleNamespace(post_process=True, config=config), SimpleNamespace(post_process=False, config=config)
    for stage in (last, first):
        assert not has_value_head(stage)
        put_value_head(stage)
    assert has_value_head(last) and not has_value_head(first)
