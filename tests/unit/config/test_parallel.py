"""How layers are dealt out to pipeline stages and chunks, and splits that are impossible."""

from __future__ import annotations

import dataclasses

import pytest

from slime_like.config.model import ModelConfig
from slime_like.config.parallel import ParallelConfig

MODEL = ModelConfig(num_layers=8, hidden_size=8, num_attention_heads=4, ffn_hidden_size=12, vocab_size=11)
EXPERTS = dataclasses.replace(MODEL, num_experts=4, moe_ffn_hidden_size=8)


def split(stages: int, first: int | None = None, last: int | None = None, **flags) -> ParallelConfig:
    return ParallelConfig(
        pipeline_model_parallel_size=stages,
        decoder_first_pipeline_num_layers=first,
        decoder_last_pipeline_num_layers=last,
        **flags,
    )


@pytest.mark.parametrize(
    ("num_layers", "parallel", "counts"),
    [
        (8, split(1), [8]),
        (8, split(4), [2, 2, 2, 2]),
        (61, split(4, last=13), [16, 16, 16, 13]),
        (10, split(3, first=2), [2, 4, 4]),
        (7, split(2, first=3, last=4), [3, 4]),
    ],
)
def test_layers_of_each_stage(num_layers: int, parallel: ParallelConfig, counts: list[int]):
    assert parallel.layers_per_stage(num_layers) == counts


@pytest.mark.parametrize(
    ("num_layers", "parallel", "message"),
    [
        (8, split(3), "8 layers do not divide by --pipeline-model-parallel-size 3. Fix"),
        (8, split(3, last=1), "8 layers leave 7 for 2 stages"),
        (8, split(2, first=3, last=4), "8 layers leave 1 for 0 stages"),
        (8, split(1, last=4), "one pipeline stage has all 8 layers"),
    ],
)
def test_layers_that_cannot_be_dealt_out(num_layers: int, parallel: ParallelConfig, message: str):
    with pytest.raises(ValueError, match=message):
        parallel.layers_per_stage(num_layers)


def test_chunks_of_an_interleaved_pipeline():
    parallel = split(2, num_virtual_stages_per_pipeline_rank=2)
    assert [parallel.chunks_of_stage(8, stage) for stage in (0, 1)] == [
        [range(0, 2), range(4, 6)],
        [range(2, 4), range(6, 8)],
    ]
    assert split(2, num_layers_per_virtual_pipeline_stage=2).chunks_of_stage(8, 1) == parallel.chunks_of_stage(8, 1)
    assert split(2).chunks_of_stage(8, 1) == [range(4, 8)]
    # one chunk is no interleaving
    assert split(2, num_layers_per_virtual_pipeline_stage=4).virtual_pipeline_size(8) is None


@pytest.mark.parametrize(
    "flags", [{"num_virtual_stages_per_pipeline_rank": 3}, {"num_layers_per_virtual_pipeline_stage": 3}]
)
def test_chunks_that_do_not_divide_a_stage(flags: dict):
    with pytest.raises(ValueError, match="does not divide"):
        split(2, **flags).virtual_pipeline_size(8)


def test_sizes_of_the_experts():
    parallel = ParallelConfig(
        tensor_model_parallel_size=4, expert_model_parallel_size=2, pipeline_model_parallel_size=3
    )
    assert (parallel.expert_tp_size, parallel.expert_parallel_block) == (4, 24)
    assert dataclasses.replace(parallel, expert_tensor_parallel_size=1).expert_parallel_block == 6


@pytest.mark.parametrize(
    ("model", "flags", "message"),
    [
        (MODEL, {"tensor_model_parallel_size": 0}, "--tensor-model-parallel-size 0: must be at least 1."),
        (MODEL, {"tensor_model_parallel_size": 8}, "4 query heads do not divide by --tensor-model-parallel-size 8."),
        (MODEL, {"pipeline_model_parallel_size": 3}, "8 layers do not divide"),
        (MODEL, {"overlap_param_gather": True}, "needs --overlap-grad-reduce"),
        (MODEL, {"recompute_granularity": "full"}, "needs --recompute-method"),
        (MODEL, {"recompute_num_layers": 1}, "are for --recompute-granularity full"),
        (MODEL, {"num_virtual_stages_per_pipeline_rank": 2}, "needs --pipeline-model-parallel-size above 1"),
        (MODEL, {"expert_model_parallel_size": 2}, "needs a model with experts"),
        (EXPERTS, {"expert_model_parallel_size": 3}, "4 experts do not divide by --expert-model-parallel-size 3."),
        (EXPERTS, {"tensor_model_parallel_size": 2}, "need --sequence-parallel"),
        (EXPERTS, {"expert_tensor_parallel_size": 2}, "needs --tensor-model-parallel-size above 1"),
    ],
)
def test_what_is_impossible_is_told(model: ModelConfig, flags: dict, message: str):
    assert any(message in problem for problem in ParallelConfig(**flags).problems(model))
    assert ParallelConfig().problems(model) == []
