"""The architecture's derived sizes, and what is impossible about it."""

from __future__ import annotations

import dataclasses

import pytest

from slime_like.config.model import ModelConfig, parse_layer_pattern

TINY = ModelConfig(
    num_layers=4, hidden_size=8, num_attention_heads=2, vocab_size=11, swiglu=True, normalization="RMSNorm",
    disable_bias_linear=True,
)  # fmt: skip


@pytest.mark.parametrize(
    ("text", "num_layers", "layers"),
    [
        ("1", 3, [0, 1, 2]),
        ("2", 5, [0, 2, 4]),
        ("[0]*2+[1]*2", 4, [2, 3]),
        ("([0]*1+[1]*2)", 3, [1, 2]),
        ("'[0, 1, 1]'", 3, [1, 2]),
        ("([0]*1)+([1]*1)", 2, [1]),
    ],
)
def test_layers_with_experts(text: str, num_layers: int, layers: list[int]):
    pattern = parse_layer_pattern(text, num_layers)
    assert len(pattern) == num_layers and [layer for layer, has_experts in enumerate(pattern) if has_experts] == layers


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0", "must be at least 1"),
        ("[0]*2", "describes 2 layers, the model has 3"),
        ("[2]*3", "is no list of 0 and 1"),
        ("every", "is no list of 0 and 1"),
    ],
)
def test_patterns_that_make_no_sense(text: str, message: str):
    with pytest.raises(ValueError, match=message):
        parse_layer_pattern(text, 3)


def test_derived_sizes():
    assert (TINY.num_kv_heads, TINY.head_size, TINY.mlp_size, TINY.context_tokens) == (2, 4, 32, 32768)
    model = dataclasses.replace(
        TINY,
        group_query_attention=True,
        num_query_groups=1,
        kv_channels=16,
        ffn_hidden_size=20,
        max_position_embeddings=512,
    )
    assert (model.num_kv_heads, model.head_size, model.mlp_size, model.context_tokens) == (1, 16, 20, 512)
    assert TINY.expert_layers == (False,) * 4
    assert dataclasses.replace(TINY, num_experts=2, moe_layer_freq="[0]+[1]*3").expert_layers == (
        False,
        True,
        True,
        True,
    )


def test_the_vocabulary_is_padded_for_the_tensor_parallel_ranks():
    model = dataclasses.replace(TINY, vocab_size=130, make_vocab_size_divisible_by=64)
    assert [model.padded_vocab_size(ranks) for ranks in (1, 2, 4)] == [192, 256, 256]
    assert dataclasses.replace(model, vocab_size=128).padded_vocab_size(2) == 128


def test_a_possible_model_has_no_problems():
    assert TINY.problems() == []


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"vocab_size": None}, "--vocab-size is missing"),
        ({"group_query_attention": True}, "needs --num-query-groups"),
        (
            {"num_attention_heads": 4, "group_query_attention": True, "num_query_groups": 3},
            "4 heads do not divide into 3 groups",
        ),
        ({"num_attention_heads": 3, "kv_channels": None}, "hidden size 8 is not a multiple of 3 heads"),
        ({"attention_dropout": 0.1}, "log-probs must be reproducible"),
        ({"swiglu": False}, "Fix: --swiglu"),
        ({"normalization": "LayerNorm"}, "Fix: --normalization RMSNorm"),
        ({"disable_bias_linear": False}, "Fix: --disable-bias-linear"),
        ({"rotary_percent": 0.0}, "--rotary-percent 0.0: must be in (0, 1]"),
        ({"moe_router_topk": 4}, "--moe-router-topk 4 does nothing without --num-experts"),
        ({"q_lora_rank": 4}, "--q-lora-rank 4 does nothing without --multi-latent-attention"),
        ({"num_experts": 2, "moe_router_topk": 3}, "--moe-router-topk 3: must be from 1 to --num-experts 2"),
        ({"num_experts": 2, "moe_router_topk": 1}, "a softmax over one chosen expert is always 1"),
        ({"num_experts": 2, "moe_layer_freq": "[1]*3"}, "describes 3 layers, the model has 4"),
        ({"num_experts": 2, "moe_enable_deepep": True}, "needs --moe-token-dispatcher-type flex"),
        ({"num_experts": 4, "moe_router_num_groups": 3}, "must divide --num-experts 4"),
    ],
)
def test_what_is_impossible_is_told(flags: dict, message: str):
    (problem,) = dataclasses.replace(TINY, **flags).problems()
    assert message in problem
