"""Which family an architecture belongs to: told by the flags in which they differ."""

from __future__ import annotations

import dataclasses

import pytest

from slime_like.config.families import family_of
from slime_like.config.model import ModelConfig

DENSE = ModelConfig(num_layers=2, hidden_size=8, num_attention_heads=2, vocab_size=11)
EXPERTS = dataclasses.replace(DENSE, num_experts=4, moe_ffn_hidden_size=8)
BIASED_ROUTER = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
GLM4 = {"post_self_attn_layernorm": True, "post_mlp_layernorm": True, "rotary_interleaved": True}


@pytest.mark.parametrize(
    ("base", "flags", "family"),
    [
        (DENSE, {}, "llama"),
        (DENSE, {"add_qkv_bias": True}, "qwen2"),
        (DENSE, {"qk_layernorm": True}, "qwen3"),
        (DENSE, GLM4, "glm4"),
        (DENSE, GLM4 | {"add_qkv_bias": True, "rotary_percent": 0.5}, "glm4"),
        (EXPERTS, {"qk_layernorm": True}, "qwen3_moe"),
        (EXPERTS, BIASED_ROUTER | {"add_qkv_bias": True, "rotary_percent": 0.5}, "glm4_moe"),
        (EXPERTS, BIASED_ROUTER | {"multi_latent_attention": True, "qk_layernorm": True}, "deepseek_v3"),
    ],
)
def test_each_family_by_its_flags(base: ModelConfig, flags: dict, family: str):
    assert family_of(dataclasses.replace(base, **flags)) == family


@pytest.mark.parametrize(
    ("base", "flags"),
    [
        (DENSE, {"qk_layernorm": True, "add_qkv_bias": True}),
        (DENSE, {"rotary_percent": 0.5}),
        (DENSE, {"post_mlp_layernorm": True}),
        (DENSE, GLM4 | {"qk_layernorm": True}),
        (DENSE, {"multi_latent_attention": True, "qk_layernorm": True}),
        (EXPERTS, {}),
        (EXPERTS, {"qk_layernorm": True, "moe_shared_expert_intermediate_size": 8}),
        (EXPERTS, {"qk_layernorm": True, "moe_layer_freq": "[0,1]"}),
        (EXPERTS, BIASED_ROUTER | {"moe_shared_expert_gate": True}),
        (EXPERTS, {"multi_latent_attention": True, "qk_layernorm": True}),
    ],
)
def test_what_no_family_is_built_like(base: ModelConfig, flags: dict):
    assert family_of(dataclasses.replace(base, **flags)) is None
