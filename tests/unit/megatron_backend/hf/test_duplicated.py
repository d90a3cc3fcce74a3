"""Matrices that every tensor parallel rank holds whole, under transformer-engine, which marks all of them as split."""

from __future__ import annotations

import pytest
import torch

from slime_like.config.model import ModelConfig
from slime_like.megatron_backend.hf.names_and_shards import mark_duplicated, shards
from tests.helpers.parallel_sizes import parallel_sizes
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.train_world import make_config

ATTENTION = "decoder.layers.0.self_attention."
#: Two ranks: a split matrix has half of its rows or columns here, a whole one all of them.
SHAPES = {
    "linear_q_down_proj.weight": None,
    "linear_kv_down_proj.weight": None,
    "linear_q_up_proj.weight": 0,
    "linear_kv_up_proj.weight": 0,
    "linear_proj.weight": 1,
}


class Chunk(torch.nn.Module):
    """A stage's parameters by their names, each with the attributes that transformer-engine's layers give them
    (Linear.reset_parameters, 2.9 to 2.20): split over the rows, but the output projection's over the columns.
    """

    config, vp_stage = None, None

    def __init__(self):
        super().__init__()
        for name in SHAPES:
            weight = torch.nn.Parameter(torch.zeros(4, 4))
            weight.tensor_model_parallel, weight.partition_dim = True, int(name == "linear_proj.weight")
            module: torch.nn.Module = self
            *path, last = (ATTENTION + name).split(".")
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, torch.nn.Module())
                module = getattr(module, part)
            module.register_parameter(last, weight)


@pytest.fixture
def latent_model(tmp_path) -> ModelConfig:
    return make_config(make_tiny_model(str(tmp_path / "model"), "deepseek_v3")).model


class _Config:
    """What Megatron asks of a stage's config to number its layers: one stage."""

    pipeline_model_parallel_size, virtual_pipeline_model_parallel_size, pipeline_model_parallel_layout = 1, None, None


def test_down_projections_are_whole_whatever_their_attribute_says(latent_model):
    chunk = Chunk()
    chunk.config = _Config()
    with parallel_sizes(tensor=2):
        dims = {shard.templates[0]: shard.dim for shard in shards([chunk], latent_model)}
    layer = "model.layers.0.self_attn."
    assert dims == {
        layer + "q_a_proj.weight": None,
        layer + "kv_a_proj_with_mqa.weight": None,
        layer + "q_b_proj.weight": 0,
        layer + "kv_b_proj.weight": 0,
        layer + "o_proj.weight": 1,
    }


def test_their_gradients_count_once_in_the_norm(latent_model):
    # Megatron's param_is_not_tensor_parallel_duplicate: a parameter with the mark counts on every rank.
    chunk = Chunk()
    mark_duplicated(chunk, latent_model)
    counted_by_each = {
        name.removeprefix(ATTENTION) for name, weight in chunk.named_parameters() if weight.tensor_model_parallel
    }
    assert counted_by_each == {name for name, dim in SHAPES.items() if dim is not None}
