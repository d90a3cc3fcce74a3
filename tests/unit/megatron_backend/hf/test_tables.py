import pytest
from safetensors.numpy import load_file

from slime_like.config.families import family_of
from slime_like.config.model import ModelConfig
from slime_like.errors import CheckpointError
from slime_like.megatron_backend.hf.names_and_shards import hf_names, num_parameters
from slime_like.megatron_backend.hf.tables import TABLES, table_for
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.train_world import make_config

#: transformer-engine's grouped matrices of all experts of a rank.
GROUPED = {
    "decoder.layers.{layer}.mlp.experts.linear_fc1.weight{expert}",
    "decoder.layers.{layer}.mlp.experts.linear_fc2.weight{expert}",
}
_ATTENTION = "decoder.layers.{layer}.self_attention."
BEFORE_MLP = "decoder.layers.{layer}.mlp.linear_fc1.layer_norm_weight"
FUSED_NORMS = {_ATTENTION + "linear_qkv.layer_norm_weight", BEFORE_MLP}
FUSED_LATENT_NORMS = {
    _ATTENTION + "linear_q_up_proj.layer_norm_weight",
    _ATTENTION + "linear_kv_up_proj.layer_norm_weight",
    BEFORE_MLP,
}
#: Models of tests/helpers/tiny_models that are another shape of a family.
MODELS = {name: name for name in TABLES} | {"moonlight": "deepseek_v3", "glm4_moe bare": "glm4_moe"}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_names_and_sizes_are_hfs(tmp_path, name, tied):
    bare = {"use_qk_norm": False, "attention_bias": False} if name.endswith(" bare") else {}
    folder = make_tiny_model(str(tmp_path / "model"), name.removesuffix(" bare"), tied=tied, **bare)
    model = make_config(folder).model
    # The file, not the model: transformers 5 holds the experts of a layer as one tensor in memory and writes them one
    # by one.
    expected = load_file(f"{folder}/model.safetensors")
    assert hf_names(model) == set(expected)
    assert num_parameters(model) == sum(
        tensor.size for key, tensor in expected.items() if not key.endswith("e_score_correction_bias")
    )
    assert family_of(model) == MODELS[name]
    assert set(table_for(model)) <= set(TABLES[MODELS[name]])


@pytest.mark.parametrize("family", sorted(TABLES))
def test_no_name_is_given_twice(family):
    for names in ([n for e in TABLES[family] for n in e.megatron_names], [n for e in TABLES[family] for n in e.hf]):
        assert len(names) == len(set(names))


@pytest.mark.parametrize("family", sorted(TABLES))
def test_fused_norms_of_transformer_engine_are_known(family):
    norms = FUSED_LATENT_NORMS if family == "deepseek_v3" else FUSED_NORMS
    grouped = GROUPED if family in ("qwen3_moe", "glm4_moe", "deepseek_v3") else set()
    assert {e.transformer_engine for e in TABLES[family]} - {None} == norms | grouped


SIGMOID = {
    "num_layers": 2,
    "num_experts": 4,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}


@pytest.mark.parametrize(
    "flags",
    [
        {"qk_layernorm": True, "add_qkv_bias": True},
        {"num_layers": 2, "num_experts": 4, "qk_layernorm": True, "moe_shared_expert_intermediate_size": 8},
        {"post_mlp_layernorm": True},
        {"rotary_interleaved": True},
        {"rotary_percent": 0.5},
        {"multi_latent_attention": True, "qk_layernorm": True},
        {"multi_latent_attention": True, **SIGMOID},
        {"moe_shared_expert_gate": True, **SIGMOID},
    ],
)
def test_mixed_family_is_refused(flags):
    with pytest.raises(CheckpointError, match="no known family"):
        table_for(ModelConfig(**flags))
