"""config.json with values of a wrong type or range: the file, the key, the value and what is expected are named."""

from __future__ import annotations

import json

import pytest

from slime_like.config.hf_keys import key_problems
from slime_like.config.hf_model import model_from_hf, read_hf_config
from slime_like.config.model import ModelConfig
from slime_like.errors import ConfigError
from tests.unit.config.test_hf_model import LLAMA3


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_hidden_layers", "two", "num_hidden_layers is 'two': must be a whole number."),
        ("num_hidden_layers", 2.0, "num_hidden_layers is 2.0: must be a whole number."),
        ("num_hidden_layers", True, "num_hidden_layers is True: must be a whole number."),
        ("num_hidden_layers", 10**9, "num_hidden_layers is 1000000000: must be at least 1 and at most 10000."),
        ("hidden_size", -64, "hidden_size is -64: must be at least 1."),
        ("vocab_size", None, "vocab_size is None: must be a whole number."),
        ("num_attention_heads", 0, "num_attention_heads is 0: must be at least 1 and at most 10000."),
        ("rms_norm_eps", "1e-5", "rms_norm_eps is '1e-5': must be a number."),
        ("rope_theta", float("nan"), "rope_theta is nan: must be a finite number."),
        ("rope_scaling", [1], "rope_scaling is [1]: must be an object."),
        ("rope_scaling", {"factor": "8"}, "rope_scaling.factor is '8': must be a number."),
        ("model_type", ["llama"], "model_type is ['llama']: must be a text."),
        ("tie_word_embeddings", "no", "tie_word_embeddings is 'no': must be true or false."),
    ],
)
def test_a_wrong_value_is_named(tmp_path, key, value, message):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA3 | {key: value}))
    with pytest.raises(ConfigError) as error:
        read_hf_config(str(tmp_path))
    assert error.value.problems == [f"{path}: {message}"]


def test_null_is_an_absent_key_where_the_key_is_optional():
    absent = ("num_key_value_heads", "head_dim", "rope_scaling", "max_position_embeddings", "tie_word_embeddings")
    config = LLAMA3 | dict.fromkeys(absent)
    assert key_problems(config) == []
    assert model_from_hf(config, ModelConfig()).num_kv_heads == 4


def test_deep_and_large_files(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    with pytest.raises(ConfigError, match="nested too deeply"):
        read_hf_config(str(tmp_path))
    path.write_text('{"a": "' + "x" * 2**21 + '"}')
    with pytest.raises(ConfigError, match="2097161 bytes; a config has at most"):
        read_hf_config(str(tmp_path))


def test_experts_need_their_sizes():
    config = LLAMA3 | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "rope_scaling": None}
    with pytest.raises(ConfigError, match="config.json lacks moe_intermediate_size"):
        model_from_hf(config, ModelConfig())
    with pytest.raises(ConfigError, match="lacks num_experts"):
        model_from_hf({k: v for k, v in config.items() if k != "num_experts"}, ModelConfig())
