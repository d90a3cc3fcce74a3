"""Layers dealt out to pipeline stages, layers with experts, sizes that must divide each other."""

from __future__ import annotations

import dataclasses

import pytest

from slime_like.config.model import ModelConfig, parse_layer_pattern
from slime_like.config.parallel import ParallelConfig

DENSE = ModelConfig(
    num_layers=48,
    hidden_size=1024,
    num_attention_heads=16,
    num_query_groups=8,
    group_query_attention=True,
    vocab_size=1000,
)
MOE = dataclasses.replace(DENSE, num_experts=64, moe_ffn_hidden_size=96, moe_router_topk=4)


def split(stages, first=None, last=None):
    return ParallelConfig(
        pipeline_model_parallel_size=stages,
        decoder_first_pipeline_num_layers=first,
        decoder_last_pipeline_num_layers=last,
    )


@pytest.mark.parametrize(
    ("num_layers", "layout", "counts"),
    [
        (8, split(1), [8]),
        (8, split(4), [2, 2, 2, 2]),
        (61, split(4, last=13), [16, 16, 16, 13]),
        (78, split(5, first=14), [14, 16, 16, 16, 16]),
        (10, split(4, first=1, last=3), [1, 3, 3, 3]),
        (7, split(2, first=3, last=4), [3, 4]),
        (7, split(2, last=4), [3, 4]),
        (8, split(1, first=8), [8]),
    ],
)
def test_layers_per_stage(num_layers, layout, counts):
    assert layout.layers_per_stage(num_layers) == counts


@pytest.mark.parametrize(
    ("num_layers", "layout", "message"),
    [
        (
            7,
            split(2),
            "7 layers do not divide by --pipeline-model-parallel-size 2. Fix: .*--decoder-last-pipeline-num-layers",
        ),
        (61, split(4, last=12), "61 layers leave 49 for 3 stages"),
        (7, split(2, first=3, last=3), "leave 1 for 0 stages"),
        (4, split(4, first=3), "leave 1 for 3 stages"),
        (8, split(1, first=4), "one pipeline stage has all 8 layers"),
    ],
)
def test_layers_that_cannot_be_dealt_out(num_layers, layout, message):
    with pytest.raises(ValueError, match=message):
        layout.layers_per_stage(num_layers)


@pytest.mark.parametrize(
    ("num_layers", "options", "chunks"),
    [
        (8, {}, [[range(0, 4)], [range(4, 8)]]),
        (8, {"num_virtual_stages_per_pipeline_rank": 1}, [[range(0, 4)], [range(4, 8)]]),
        (8, {"num_virtual_stages_per_pipeline_rank": 2}, [[range(0, 2), range(4, 6)], [range(2, 4), range(6, 8)]]),
        (4, {"num_layers_per_virtual_pipeline_stage": 1}, [[range(0, 1), range(2, 3)], [range(1, 2), range(3, 4)]]),
        (8, {"num_layers_per_virtual_pipeline_stage": 4}, [[range(0, 4)], [range(4, 8)]]),
        (
            6,
            {"num_virtual_stages_per_pipeline_rank": 2, "decoder_last_pipeline_num_layers": 2},
            [[range(0, 2), range(3, 5)], [range(2, 3), range(5, 6)]],
        ),
    ],
)
def test_chunks_are_dealt_out_in_turn(num_layers, options, chunks):
    layout = ParallelConfig(pipeline_model_parallel_size=2, **options)
    assert [layout.chunks_of_stage(num_layers, stage) for stage in range(2)] == chunks
    assert layout.virtual_pipeline_size(num_layers) == (len(chunks[0]) if len(chunks[0]) > 1 else None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 5},
            "does not divide every stage's layers: [24, 24]",
        ),
        (
            {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 5},
            "does not divide a stage's 24 layers",
        ),
        ({"num_virtual_stages_per_pipeline_rank": 2}, "needs --pipeline-model-parallel-size above 1"),
        (
            {
                "pipeline_model_parallel_size": 2,
                "num_virtual_stages_per_pipeline_rank": 2,
                "num_layers_per_virtual_pipeline_stage": 12,
            },
            "in two ways",
        ),
        ({"pipeline_model_parallel_size": 2, "num_virtual_stages_per_pipeline_rank": 0}, "must be at least 1"),
        (
            {
                "pipeline_model_parallel_size": 2,
                "num_layers_per_virtual_pipeline_stage": 2,
                "decoder_last_pipeline_num_layers": 20,
            },
            "needs as many layers on every stage, not [28, 20]",
        ),
    ],
)
def test_impossible_chunks_are_named(options, message):
    problems = ParallelConfig(**options).problems(DENSE)
    assert len(problems) == 1 and message in problems[0], problems


@pytest.mark.parametrize(
    ("text", "num_layers", "experts"),
    [
        ("1", 4, "1111"),
        ("2", 5, "10101"),
        ("[0]*1+[1]*3", 4, "0111"),
        ("([0]*3+[1]*2)", 5, "00011"),
        ("'([1]*3)'", 3, "111"),
        ("[0,1,1]", 3, "011"),
    ],
)
def test_layer_pattern(text, num_layers, experts):
    assert "".join(str(int(has_experts)) for has_experts in parse_layer_pattern(text, num_layers)) == experts


@pytest.mark.parametrize("text", ["0", "[0]*3+[1]*2", "[0,2,1,1]", "__import__('os')", "[1]*4+", ""])
def test_layer_pattern_that_makes_no_sense(text):
    with pytest.raises(ValueError):
        parse_layer_pattern(text, 4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expert_model_parallel_size": 3}, "64 experts do not divide by --expert-model-parallel-size 3"),
        ({"tensor_model_parallel_size": 2}, "need --sequence-parallel"),
        ({"expert_tensor_parallel_size": 2}, "needs --tensor-model-parallel-size above 1"),
        (
            {"tensor_model_parallel_size": 4, "sequence_parallel": True, "expert_tensor_parallel_size": 5},
            "--moe-ffn-hidden-size 96 does not divide",
        ),
        ({"recompute_granularity": "full"}, "needs --recompute-method and --recompute-num-layers"),
        ({"recompute_granularity": "selective", "recompute_num_layers": 1}, "are for --recompute-granularity full"),
        ({"overlap_param_gather": True}, "needs --overlap-grad-reduce"),
    ],
)
def test_impossible_splits_are_named(changes, message):
    problems = ParallelConfig(**changes).problems(MOE)
    assert len(problems) == 1 and message in problems[0]


def test_experts_need_a_model_with_experts():
    assert "needs a model with experts" in ParallelConfig(expert_model_parallel_size=2).problems(DENSE)[0]
    assert ParallelConfig(expert_model_parallel_size=2).problems(MOE) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"moe_router_topk": 8}, "--moe-router-topk 8 does nothing without --num-experts"),
        ({"moe_grouped_gemm": True}, "--moe-grouped-gemm True does nothing without --num-experts"),
        ({"q_lora_rank": 64}, "--q-lora-rank 64 does nothing without --multi-latent-attention"),
        ({"num_experts": 4, "moe_router_topk": 5}, "must be from 1 to --num-experts 4"),
        ({"num_experts": 4, "moe_layer_freq": "[1]*47"}, "describes 47 layers, the model has 48"),
        ({"num_experts": 4, "moe_enable_deepep": True}, "needs --moe-token-dispatcher-type flex"),
        ({"num_experts": 4, "moe_router_num_groups": 3, "moe_router_group_topk": 1}, "must divide --num-experts 4"),
        ({"rope_fusion": True}, "--rope-fusion is not supported"),
        ({"rotary_percent": 0.0}, "must be in (0, 1]"),
    ],
)
def test_impossible_architectures_are_named(changes, message):
    model = dataclasses.replace(DENSE, swiglu=True, normalization="RMSNorm", disable_bias_linear=True, **changes)
    problems = model.problems()
    assert len(problems) == 1 and message in problems[0], problems


def test_expert_tensor_size_follows_the_tensor_size():
    assert ParallelConfig(tensor_model_parallel_size=4).expert_tp_size == 4
    assert ParallelConfig(tensor_model_parallel_size=4, expert_tensor_parallel_size=1).expert_tp_size == 1
