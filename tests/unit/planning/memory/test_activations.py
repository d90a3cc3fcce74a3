"""What a layer keeps, counted by hand for a tiny model: 3 layers, hidden 8, MLP 10, 2 heads of 4 channels, bf16."""

from __future__ import annotations

import dataclasses

import pytest

from slime_like.config.parallel import ParallelConfig
from slime_like.planning.memory.activations import ActivationSizes
from tests.helpers.plan_models import TINY

NORM, ATTENTION, MLP = 2 * 8 + 4, 4 * 2 + 2 * (8 + 8 + 8 + 8), 5 * 2 * 10
#: Two norms, the inputs of attention's and the MLP's first matrices, and both parts.
LAYER = 2 * NORM + 2 * 2 * 8 + ATTENTION + MLP


def sizes(transformer_engine: bool = True, **parallel) -> ActivationSizes:
    return ActivationSizes(
        model=TINY, parallel=ParallelConfig(**parallel), width=2, transformer_engine=transformer_engine
    )


def test_the_parts_of_a_layer():
    assert (sizes().norm(8), sizes().attention(), sizes().mlp(10)) == (NORM, ATTENTION, MLP) == (20, 72, 100)
    assert sizes().layer(has_experts=False) == LAYER == 244


def test_torchs_own_norm_and_attention_keep_more():
    """fp32 input and normalised input; repeated keys and values, the joined output, and cosines and sines twice."""
    torch = sizes(transformer_engine=False)
    assert (torch.norm(8), torch.attention()) == (8 * 8 + 4, 4 * 2 + 2 * (5 * 8 + 4 * 4))


def test_tensor_and_sequence_parallel_ranks_share_a_layer():
    assert sizes(tensor_model_parallel_size=2, sequence_parallel=True).layer(has_experts=False) == LAYER / 2
    whole_tokens = 2 * NORM + 2 * 2 * 8  # which sequence parallelism would split
    assert sizes(tensor_model_parallel_size=2).layer(has_experts=False) == LAYER / 2 + whole_tokens / 2


def test_a_stage_keeps_its_layers_and_its_end():
    last_norm = NORM + 2 * 8
    assert sizes().stage(0) == 3 * LAYER + 8 + last_norm
    split = sizes(pipeline_model_parallel_size=3)
    assert [split.stage(stage) for stage in range(3)] == [LAYER + 8, LAYER, LAYER + last_norm]


@pytest.mark.parametrize(
    ("recompute", "every", "once"),
    [
        ({}, 3 * LAYER + 44, 92),
        ({"recompute_granularity": "selective"}, 3 * LAYER + 44 - 3 * 4 * 2, 92),
        # Layers' inputs (16 bytes each) and the rotation angles (4 channels in fp32) stay; one layer comes back.
        (
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
            3 * 16 + 44 + 16,
            92 + LAYER,
        ),
        (
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
            2 * 16 + 44 + 16,
            92 + 2 * LAYER,
        ),
        (
            {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2},
            LAYER + 2 * 16 + 44 + 16,
            92 + LAYER,
        ),
    ],
)
def test_recomputing_keeps_less_of_every_micro_batch_and_more_of_one(recompute: dict, every: float, once: float):
    """44: the ids of a stage's tokens and the last norm.

    92: gradients of a layer's input, twice, and of the MLP's three parts.
    """
    assert sizes(**recompute).kept_bytes(0) == (every, once)


def test_experts_keep_each_tokens_copies():
    model = dataclasses.replace(TINY, num_experts=4, moe_ffn_hidden_size=6, moe_router_topk=2)
    layer = ActivationSizes(model=model, parallel=ParallelConfig(), width=2).layer(has_experts=True)
    assert layer == LAYER - MLP + 2 * 2 * (8 + 6 * 6) + 3 * 4


def test_log_probs_alone_need_one_layer_at_a_time():
    assert sizes().forward_only() == 2 * (3 * 8 + 4 * 10)
