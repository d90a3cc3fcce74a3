"""Parameter counts against published sizes and by hand.

tests/multiprocess/test_plan_memory.py compares with real models.
"""

import dataclasses

import pytest

from slime_like.config.optimizer import OptimizerConfig
from slime_like.config.parallel import ParallelConfig
from slime_like.planning.memory.parameters import Variant, model_parameters, stage_parameters
from slime_like.planning.memory.trainer_bytes import Precision, StageBytes
from tests.helpers.plan_models import DEEPSEEK_V3, LLAMA_70B, TINY


def test_llama_70b_has_its_published_size():
    # transformers' num_parameters of meta-llama/Llama-3.1-70B.
    assert model_parameters(LLAMA_70B) == 70_553_706_496


def test_deepseek_v3_has_its_published_size():
    # 671B in its report; counted from the shapes of its config.json, without the multi-token prediction layer.
    assert model_parameters(DEEPSEEK_V3) == pytest.approx(671e9, rel=1e-3)


def test_a_layer_by_hand():
    # embedding 11*8, per layer: 2 norms of 8, qkv 24*8, projection 8*8, fc1 20*8, fc2 8*10; final norm 8, output 11*8.
    assert model_parameters(TINY) == 88 + 3 * (16 + 192 + 64 + 160 + 80) + 8 + 88


def test_a_tied_embedding_counts_once_and_is_held_twice_with_stages():
    tied = dataclasses.replace(TINY, untie_embeddings_and_output_weights=False)
    assert model_parameters(tied) == model_parameters(TINY) - 88
    split = ParallelConfig(pipeline_model_parallel_size=3)
    held = sum(p.numel for stage in range(3) for p in stage_parameters(tied, split, stage))
    assert held == model_parameters(tied) + 88


def test_glm_norms_add_two_vectors_a_layer():
    glm = dataclasses.replace(TINY, post_self_attn_layernorm=True, post_mlp_layernorm=True)
    assert model_parameters(glm) == model_parameters(TINY) + 3 * 2 * 8


def test_down_projections_are_whole_on_each_rank():
    latent = dataclasses.replace(
        TINY,
        multi_latent_attention=True,
        q_lora_rank=6,
        kv_lora_rank=4,
        qk_head_dim=4,
        qk_pos_emb_head_dim=2,
        v_head_dim=4,
    )
    shapes = {p.name: p.shape for p in stage_parameters(latent, ParallelConfig(tensor_model_parallel_size=2), 0)}
    assert shapes["decoder.layers.0.self_attention.linear_q_down_proj.weight"] == (6, 8)
    assert shapes["decoder.layers.0.self_attention.linear_kv_down_proj.weight"] == (4 + 2, 8)


def test_a_critic_has_one_output():
    names = {p.name: p.shape for p in stage_parameters(TINY, ParallelConfig(), 0, Variant(value_head=True))}
    assert names["output_layer.weight"] == (1, 8)


def test_buffers_are_padded_and_owned_in_equal_slices():
    # One parameter of 88 elements starts at 0, 64-aligned neighbours follow; the end goes up to a multiple of lcm(4,
    # 128).
    stage = StageBytes(
        [stage_parameters(TINY, ParallelConfig(), 0)],
        ParallelConfig(),
        Precision.of(OptimizerConfig(bf16=True)),
        dp_size=4,
        expert_dp_size=4,
    )
    assert stage.buffer_elements % 128 == 0
    owned = [stage.of(rank, rank).optimizer for rank in range(4)]
    assert sum(owned) == 12 * model_parameters(TINY)
    assert stage.of(0, 0).weights == 2 * stage.buffer_elements
    assert stage.of(0, 0).gradients == 4 * stage.buffer_elements


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({"bf16": True}, (2, 4, 12, 0)),
        ({"bf16": False}, (4, 4, 8, 0)),
        ({"bf16": True, "accumulate_allreduce_grads_in_fp32": False}, (2, 2, 12, 0)),
        ({"bf16": True, "use_precision_aware_optimizer": True}, (2, 4, 10, 0)),
        ({"bf16": True, "optimizer_cpu_offload": True}, (2, 4, 0, 12)),
    ],
)
def test_bytes_of_an_element(flags, expected):
    assert dataclasses.astuple(Precision.of(OptimizerConfig(**flags))) == expected
