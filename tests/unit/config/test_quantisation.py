"""What engines are told of a checkpoint in eight bits."""

from __future__ import annotations

import json

import pytest

from slime_like.config.quantisation import plain_flags

FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_an_engine_that_is_sent_plain_weights_forgets_the_checkpoints_format(key):
    given = {"json_model_override_args": '{"rope_theta": 1.0}', "tp_size": 2}
    flags = plain_flags({"hidden_size": 8, key: FP8}, given)
    assert flags["load_format"] == "dummy" and set(flags) == {"load_format", "json_model_override_args"}
    assert json.loads(flags["json_model_override_args"]) == {"rope_theta": 1.0, key: None}


@pytest.mark.parametrize("config", [{}, {"quantization_config": None}])
def test_a_plain_checkpoint_is_loaded_as_it_is(config):
    assert plain_flags({"hidden_size": 8, **config}, {}) == {}
