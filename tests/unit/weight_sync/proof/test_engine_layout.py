"""Where an engine keeps each HF tensor, on cases small enough to count by hand.

Against the real engine: tests/contract/test_receipts.py.
"""

from __future__ import annotations

import dataclasses

import pytest

from slime_like.config.model import ModelConfig
from slime_like.weight_sync.proof.engine_layout import Cut, pieces

LAYER = "model.layers.3."


def cut(rank=0, size=1, heads=4, kv_heads=2, on_cpu=False):
    return Cut(rank=rank, size=size, num_heads=heads, num_kv_heads=kv_heads, head_size=16, on_cpu=on_cpu)


def only(name, shape, where):
    (piece,) = pieces(name, shape, where)
    return piece.parameter, piece.dim, piece.start, piece.stop, piece.first


@pytest.mark.parametrize(
    ("part", "rank", "size", "expected"),
    [
        ("q", 0, 1, (0, 64, 0)), ("k", 0, 1, (0, 32, 64)), ("v", 0, 1, (0, 32, 96)),
        ("q", 1, 2, (32, 64, 0)), ("k", 1, 2, (16, 32, 32)), ("v", 1, 2, (16, 32, 48)),
        ("q", 3, 4, (48, 64, 0)), ("k", 3, 4, (16, 32, 16)), ("v", 1, 4, (0, 16, 32)),  # two ranks hold each key head
    ],
)  # fmt: skip
def test_queries_keys_and_values(part, rank, size, expected):
    rows = 64 if part == "q" else 32
    piece = only(f"{LAYER}self_attn.{part}_proj.weight", (rows, 48), cut(rank, size))
    assert piece == (f"{LAYER}self_attn.qkv_proj.weight", 0, *expected)


def test_gate_comes_before_up():
    assert only(f"{LAYER}mlp.gate_proj.weight", (80, 48), cut(1, 2)) == (
        f"{LAYER}mlp.gate_up_proj.weight",
        0,
        40,
        80,
        0,
    )
    assert only(f"{LAYER}mlp.up_proj.weight", (80, 48), cut(1, 2)) == (f"{LAYER}mlp.gate_up_proj.weight", 0, 40, 80, 40)


def test_on_a_cpu_shares_are_rounded_up_and_the_last_one_is_short():
    # 80 rows over two ranks: 64 each with padding, of which the second has 16.
    assert only(f"{LAYER}mlp.up_proj.weight", (80, 48), cut(0, 2, on_cpu=True)) == (
        f"{LAYER}mlp.gate_up_proj.weight",
        0,
        0,
        64,
        64,
    )
    assert only(f"{LAYER}mlp.up_proj.weight", (80, 48), cut(1, 2, on_cpu=True)) == (
        f"{LAYER}mlp.gate_up_proj.weight",
        0,
        64,
        80,
        64,
    )
    assert only(f"{LAYER}mlp.down_proj.weight", (48, 80), cut(1, 2, on_cpu=True)) == (
        f"{LAYER}mlp.down_proj.weight",
        1,
        64,
        80,
        0,
    )


def test_fused_gate_and_up_of_glm4():
    halves = pieces(f"{LAYER}mlp.gate_up_proj.weight", (160, 48), cut(1, 2))
    assert [(p.start, p.stop, p.first) for p in halves] == [(40, 80, 0), (120, 160, 40)]


def test_experts_lie_in_two_stacks():
    (gate,) = pieces(f"{LAYER}mlp.experts.5.gate_proj.weight", (32, 48), cut(1, 2))
    (up,) = pieces(f"{LAYER}mlp.experts.5.up_proj.weight", (32, 48), cut(1, 2))
    (down,) = pieces(f"{LAYER}mlp.experts.5.down_proj.weight", (48, 32), cut(1, 2))
    assert {p.expert for p in (gate, up, down)} == {5}
    assert (gate.parameter, gate.first, up.first) == (f"{LAYER}mlp.experts.w13_weight", 0, 16)
    assert (down.parameter, down.dim, down.start, down.stop) == (f"{LAYER}mlp.experts.w2_weight", 1, 16, 32)


def test_vocabulary_is_padded_to_64():
    # 101 rows are padded to 128: 64 each, the second with 37 real ones.
    assert only("lm_head.weight", (101, 48), cut(0, 2))[2:] == (0, 64, 0)
    assert only("model.embed_tokens.weight", (101, 48), cut(1, 2))[2:] == (64, 101, 0)
    assert pieces("lm_head.weight", (10, 48), cut(1, 2)) == []


@pytest.mark.parametrize(
    "name",
    [
        "model.norm.weight",
        f"{LAYER}input_layernorm.weight",
        f"{LAYER}self_attn.q_norm.weight",
        f"{LAYER}mlp.gate.weight",
    ],
)
def test_whole_on_every_rank(name):
    shape = (48, 16) if name.endswith("gate.weight") else (48,)
    assert only(name, shape, cut(1, 2)) == (name, 0, 0, 48, 0)


def test_what_is_not_known_gives_nothing():
    assert pieces(f"{LAYER}mamba.in_proj.weight", (48, 48), cut()) == []


def latent(queries, rank=0, size=1, **more):
    return Cut(
        rank=rank, size=size, num_heads=4, num_kv_heads=4, head_size=16, is_latent=True, latent_queries=queries, **more
    )


def test_compressed_attention_lies_whole_on_every_rank_and_heads_are_shared():
    attention = f"{LAYER}self_attn."
    fused = attention + "fused_qkv_a_proj_with_mqa.weight"
    assert only(attention + "q_a_proj.weight", (20, 48), latent(20, 1, 2)) == (fused, 0, 0, 20, 0)
    # behind the queries
    assert only(attention + "kv_a_proj_with_mqa.weight", (32, 48), latent(20, 1, 2)) == (fused, 0, 0, 32, 20)
    assert only(attention + "q_b_proj.weight", (80, 20), latent(20, 1, 2)) == (
        attention + "q_b_proj.weight",
        0,
        40,
        80,
        0,
    )
    assert only(attention + "kv_b_proj.weight", (88, 24), latent(20, 1, 2)) == (
        attention + "kv_b_proj.weight",
        0,
        44,
        88,
        0,
    )
    # Without compressed queries nothing is fused, and q_proj is no part of a qkv_proj.
    assert only(attention + "q_proj.weight", (80, 48), latent(0, 1, 2)) == (attention + "q_proj.weight", 0, 40, 80, 0)
    assert only(attention + "kv_a_proj_with_mqa.weight", (32, 48), latent(0, 1, 2)) == (
        attention + "kv_a_proj_with_mqa.weight",
        0,
        0,
        32,
        0,
    )


def test_a_shared_expert_that_may_lie_among_the_others_is_unknown():
    name = f"{LAYER}mlp.shared_experts.up_proj.weight"
    assert pieces(name, (32, 48), latent(0, fuses_shared=True)) == []
    assert only(name, (32, 48), latent(0)) == (f"{LAYER}mlp.shared_experts.gate_up_proj.weight", 0, 0, 32, 32)


@pytest.mark.parametrize(
    ("shared", "may_fuse", "expected"), [(32, True, True), (64, True, False), (None, True, False), (32, False, False)]
)
def test_only_a_single_shared_expert_is_fused(shared, may_fuse, expected):
    model = ModelConfig(
        num_attention_heads=4, hidden_size=64, moe_ffn_hidden_size=32, moe_shared_expert_intermediate_size=shared
    )
    assert Cut.of(model, 0, 1, on_cpu=False, may_fuse_shared=may_fuse).fuses_shared is expected


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (f"{LAYER}self_attn.q_proj.weight", (8, 48)), (f"{LAYER}self_attn.k_proj.weight", (64, 48)),
        (f"{LAYER}self_attn.v_proj.bias", (32, 1)),
        (f"{LAYER}self_attn.o_proj.weight", (3072,)), (f"{LAYER}mlp.down_proj.weight", ()),
        (f"{LAYER}mlp.gate_proj.weight", (2, 3, 4)),
        (f"{LAYER}mlp.experts.5.down_proj.weight", (64,)), (f"{LAYER}mlp.experts.5.up_proj.weight", ()),
        ("model.embed_tokens.weight", ()),
        ("model.norm.weight", ()), (f"{LAYER}self_attn.kv_a_proj_with_mqa.weight", (4,)),
        (f"{LAYER}mlp.gate_up_proj.weight", (8,)),
        (f"{LAYER}self_attn.q_proj.weight_scale_inv", (1, 1)), (f"{LAYER}mlp.down_proj.weight_packed", (48, 8)),
        ("anything", ()), ("", (1,)),
    ],
)  # fmt: skip
def test_other_names_and_shapes_than_a_models_are_not_known(name, shape):
    """As a transform may send them: quantised, packed, with scales."""
    for where in (cut(), cut(1, 2)):
        assert pieces(name, shape, dataclasses.replace(where, is_latent=".kv_a_" in name, latent_queries=8)) == []


INT8, FP8 = 1, 128


@pytest.mark.parametrize(
    ("name", "shape", "block", "rank", "expected"),
    [
        # a number a row: those of the rank's heads, behind those of q (2 x 16) and k (1 x 16)
        ("self_attn.v_proj.weight_scale", (32, 1), INT8, 1, ("self_attn.qkv_proj.weight_scale", 0, 16, 32, 48)),
        ("mlp.up_proj.weight_scale", (128, 1), INT8, 1, ("mlp.gate_up_proj.weight_scale", 0, 64, 128, 64)),
        # which are whole where the rank has some columns of all rows
        ("self_attn.o_proj.weight_scale", (48, 1), INT8, 1, ("self_attn.o_proj.weight_scale", 0, 0, 48, 0)),
        ("mlp.down_proj.weight_scale", (48, 1), INT8, 0, ("mlp.down_proj.weight_scale", 0, 0, 48, 0)),
        # a number a block: of 512 rows and columns the second half's two
        ("mlp.up_proj.weight_scale_inv", (4, 3), FP8, 1, ("mlp.gate_up_proj.weight_scale_inv", 0, 2, 4, 2)),
        ("mlp.down_proj.weight_scale_inv", (3, 4), FP8, 1, ("mlp.down_proj.weight_scale_inv", 1, 2, 4, 0)),
    ],
)
def test_scales_lie_as_their_weights_do(name, shape, block, rank, expected):
    where = dataclasses.replace(cut(rank, 2), block=block)
    parameter, *place = expected
    assert only(LAYER + name, shape, where) == (LAYER + parameter, *place)


def test_scales_of_blocks_of_heads():
    where = Cut(rank=1, size=2, num_heads=8, num_kv_heads=4, head_size=64, block=FP8)
    # of q 4 x 64 rows are two blocks, of k 2 x 64 are one
    assert only(f"{LAYER}self_attn.q_proj.weight_scale_inv", (4, 2), where)[2:] == (2, 4, 0)
    assert only(f"{LAYER}self_attn.k_proj.weight_scale_inv", (2, 2), where)[2:] == (1, 2, 2)
    assert only(f"{LAYER}self_attn.v_proj.weight_scale_inv", (2, 2), where)[2:] == (1, 2, 3)
    # 32 rows of a head are no block: it is not known where their scale lies
    uneven = dataclasses.replace(where, num_kv_heads=1, head_size=32)
    assert pieces(f"{LAYER}self_attn.k_proj.weight_scale_inv", (1, 2), uneven) == []


@pytest.mark.parametrize(("suffix", "block"), [("_scale", INT8), ("_scale_inv", FP8)])
def test_scales_of_experts(suffix, block):
    where = dataclasses.replace(cut(1, 2), block=block)
    rows, columns = (512, 1) if block == INT8 else (4, 4)
    (up,) = pieces(f"{LAYER}mlp.experts.5.up_proj.weight{suffix}", (rows, columns), where)
    assert (up.parameter, up.expert, up.dim) == (f"{LAYER}mlp.experts.w13_weight{suffix}", 5, 0)
    assert (up.start, up.stop, up.first) == (rows // 2, rows, rows // 2)
    (down,) = pieces(f"{LAYER}mlp.experts.5.down_proj.weight{suffix}", (rows, columns), where)
    assert (down.parameter, down.expert) == (f"{LAYER}mlp.experts.w2_weight{suffix}", 5)
    # int8: every rank has all rows; fp8: the second half of the blocks across
    assert (down.dim, down.start, down.stop) == ((0, 0, 512) if block == INT8 else (1, 2, 4))


def test_compressed_queries_and_keys_are_fused_with_their_scales():
    name = f"{LAYER}self_attn.kv_a_proj_with_mqa.weight_scale_inv"
    fused = f"{LAYER}self_attn.fused_qkv_a_proj_with_mqa.weight_scale_inv"
    # 576 rows of keys are five blocks, the last one half full, behind the two of 256 rows of queries
    assert only(name, (5, 8), latent(256, block=FP8)) == (fused, 0, 0, 5, 2)


def test_on_a_cpu_shares_of_blocks_are_rounded_up_to_whole_ones():
    # 384 rows over two ranks: two blocks each with padding, of which the second has one.
    where = dataclasses.replace(cut(1, 2, on_cpu=True), block=FP8)
    assert only(f"{LAYER}mlp.up_proj.weight", (384, 48), where)[2:] == (256, 384, 256)
    assert only(f"{LAYER}mlp.up_proj.weight_scale_inv", (3, 1), where)[2:] == (2, 3, 2)


@pytest.mark.parametrize(("suffix", "block"), [("_scale", FP8), ("_scale_inv", INT8), ("_scale", 0), ("_scale_inv", 0)])
def test_scales_of_another_scheme_are_not_known(suffix, block):
    where = dataclasses.replace(cut(), block=block)
    assert pieces(f"{LAYER}mlp.down_proj.weight{suffix}", (4, 1), where) == []
