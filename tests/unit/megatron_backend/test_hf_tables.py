import pytest
from safetensors.numpy import load_file

from slime_like.config.model import ModelConfig
from slime_like.errors import CheckpointError
from slime_like.megatron_backend.hf_convert import hf_names, num_parameters
from slime_like.megatron_backend.hf_tables import TABLES, table_for
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.train_world import make_config

#: transformer-engine's grouped matrices of all experts of a rank.
GROUPED = {"decoder.layers.{layer}.mlp.experts.linear_fc1.weight{expert}", "decoder.layers.{layer}.mlp.experts.linear_fc2.weight{expert}"}
FUSED_NORMS = {"decoder.layers.{layer}.self_attention.linear_qkv.layer_norm_weight", "decoder.layers.{layer}.mlp.linear_fc1.layer_norm_weight"}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", sorted(TABLES))
def test_names_and_sizes_are_hfs(tmp_path, family, tied):
    folder = make_tiny_model(str(tmp_path / "model"), family, tied=tied)
    model = make_config(folder).model
    # The file, not the model: transformers 5 holds the experts of a layer as one tensor in memory and writes them one by one.
    expected = load_file(f"{folder}/model.safetensors")
    assert hf_names(model) == set(expected)
    assert num_parameters(model) == sum(tensor.size for tensor in expected.values())
    assert table_for(model) is TABLES[family]


@pytest.mark.parametrize("family", sorted(TABLES))
def test_no_name_is_given_twice(family):
    for names in ([n for e in TABLES[family] for n in e.megatron_names], [n for e in TABLES[family] for n in e.hf]):
        assert len(names) == len(set(names))


@pytest.mark.parametrize("family", sorted(TABLES))
def test_fused_norms_of_transformer_engine_are_known(family):
    assert {e.transformer_engine for e in TABLES[family]} - {None} == FUSED_NORMS | (GROUPED if family == "qwen3_moe" else set())


def test_other_experts_than_qwen3_moes_are_refused():
    with pytest.raises(CheckpointError, match="only known family with experts is qwen3_moe"):
        table_for(ModelConfig(num_layers=2, num_experts=4, qk_layernorm=True, moe_shared_expert_intermediate_size=8))


def test_mixed_family_is_refused():
    with pytest.raises(CheckpointError, match="no known family"):
        table_for(ModelConfig(qk_layernorm=True, add_qkv_bias=True))
