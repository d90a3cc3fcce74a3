import pytest

from slime_like.config.model import ModelConfig
from slime_like.errors import CheckpointError
from slime_like.megatron_backend.hf_convert import hf_names, num_parameters
from slime_like.megatron_backend.hf_tables import TABLES, table_for
from tests.helpers.hf_truth import load_model
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.train_world import make_config

FUSED_NORMS = {"decoder.layers.{layer}.self_attention.linear_qkv.layer_norm_weight", "decoder.layers.{layer}.mlp.linear_fc1.layer_norm_weight"}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", sorted(TABLES))
def test_names_and_sizes_are_hfs(tmp_path, family, tied):
    folder = make_tiny_model(str(tmp_path / "model"), family, tied=tied)
    model = make_config(folder).model
    expected = dict(load_model(folder).named_parameters())
    assert hf_names(model) == set(expected)
    assert num_parameters(model) == sum(p.numel() for p in expected.values())
    assert table_for(model) is TABLES[family]


@pytest.mark.parametrize("family", sorted(TABLES))
def test_no_name_is_given_twice(family):
    for names in ([n for e in TABLES[family] for n in e.megatron_names], [n for e in TABLES[family] for n in e.hf]):
        assert len(names) == len(set(names))


@pytest.mark.parametrize("family", sorted(TABLES))
def test_fused_norms_of_transformer_engine_are_known(family):
    assert {e.transformer_engine for e in TABLES[family]} - {None} == FUSED_NORMS


def test_mixed_family_is_refused():
    with pytest.raises(CheckpointError, match="no known family"):
        table_for(ModelConfig(qk_layernorm=True, add_qkv_bias=True))
