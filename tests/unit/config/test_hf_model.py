"""config.json of the supported families, and what must not train silently wrong."""

import pytest

from slime_like.config.hf_model import disagreements, model_from_hf, read_hf_config
from slime_like.config.model import ModelConfig
from slime_like.errors import ConfigError

LLAMA3 = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 100, "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192},
}  # fmt: skip


def test_llama3_rope_scaling():
    model = model_from_hf(LLAMA3, ModelConfig())
    assert (model.use_rope_scaling, model.rope_scaling_factor, model.rotary_base) == (True, 32.0, 5e5)
    assert model.untie_embeddings_and_output_weights and not model.group_query_attention and model.head_size == 16


@pytest.mark.parametrize("name", ["low_freq_factor", "high_freq_factor", "original_max_position_embeddings"])
def test_rope_scaling_that_megatron_does_not_have_is_refused(name):
    rope = LLAMA3["rope_scaling"] | {name: 3}
    with pytest.raises(ConfigError, match=name):
        model_from_hf(LLAMA3 | {"rope_scaling": rope}, ModelConfig())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"attention_bias": True}, "attention_bias"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"model_type": "gpt2"}, "model_type 'gpt2' is not supported. Known: deepseek_v3, glm4, .*, qwen3_moe"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope type 'yarn'"),
    ],
)
def test_what_is_not_supported_is_named(change, message):
    with pytest.raises(ConfigError, match=message):
        model_from_hf(LLAMA3 | change, ModelConfig())


def test_missing_keys_are_named():
    with pytest.raises(ConfigError, match="config.json lacks rms_norm_eps"):
        model_from_hf({k: v for k, v in LLAMA3.items() if k != "rms_norm_eps"}, ModelConfig())


def test_unreadable_config_json(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_hf_config(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match="no JSON object"):
        read_hf_config(str(tmp_path))


def test_a_checkpoint_agrees_with_itself():
    model = model_from_hf(LLAMA3, ModelConfig())
    assert disagreements(model, model) == []


def test_padded_vocabulary_is_a_multiple_for_every_tensor_parallel_size():
    model = ModelConfig(vocab_size=101, make_vocab_size_divisible_by=16)
    assert [model.padded_vocab_size(tp) for tp in (1, 2, 4)] == [112, 128, 128]
