from slime_like.algorithms.flops import TokenFlops, forward_flops
from slime_like.config.model import ModelConfig

SIZES = {
    "num_layers": 2,
    "hidden_size": 6,
    "ffn_hidden_size": 10,
    "num_attention_heads": 4,
    "kv_channels": 3,
    "vocab_size": 7,
}
SIZES |= {
    "group_query_attention": True,
    "num_query_groups": 2,
    "swiglu": True,
    "disable_bias_linear": True,
    "normalization": "RMSNorm",
}


def test_a_sequence_by_hand():
    assert TokenFlops(linear=100, quadratic=2).of(10) == 1200


def test_a_dense_model_by_hand():
    # A layer: q 6x12, k and v 6x6 each, out 12x6; three matrices of 6x10. Then the output layer 6x7. Scores: 4 heads, 3
    # channels, twice.
    layer = 72 + 36 + 36 + 72 + 3 * 60
    assert forward_flops(ModelConfig(**SIZES)) == TokenFlops(linear=2 * (2 * layer + 42), quadratic=2 * 4 * (3 + 3))


def test_only_chosen_experts_count():
    # One dense layer, one with a router 6x8, two of eight experts of 3x6x5, and shared ones of 3x6x4.
    experts = {
        "num_experts": 8,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 5,
        "moe_shared_expert_intermediate_size": 4,
        "moe_layer_freq": "[0,1]",
    }
    attention = 72 + 36 + 36 + 72
    expected = 2 * (2 * attention + 180 + 48 + 2 * 90 + 72 + 42)
    assert forward_flops(ModelConfig(**SIZES, **experts)).linear == expected


def test_latent_attention_by_hand():
    # Queries 6x5 then 5x4x(3+2); keys and values 6x(4+2) then 4x4x(3+1); out 4x1x6.
    latent = {
        "multi_latent_attention": True,
        "q_lora_rank": 5,
        "kv_lora_rank": 4,
        "qk_head_dim": 3,
        "qk_pos_emb_head_dim": 2,
        "v_head_dim": 1,
    }
    sizes = {
        name: value
        for name, value in SIZES.items()
        if name not in ("group_query_attention", "num_query_groups", "kv_channels")
    }
    layer = (30 + 100) + (36 + 64) + 24 + 180
    assert forward_flops(ModelConfig(**sizes, **latent)) == TokenFlops(
        linear=2 * (2 * layer + 42), quadratic=2 * 4 * (3 + 2 + 1)
    )
