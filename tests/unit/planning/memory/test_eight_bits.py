"""Bytes of eight-bit engines and of what is sent to them: those of a real model that was quantised."""

from __future__ import annotations

import dataclasses

import pytest
from safetensors.torch import load_file

from slime_like.config.hf_model import model_from_hf, read_hf_config
from slime_like.config.model import ModelConfig
from slime_like.config.quantisation import NONE, SCHEMES
from slime_like.planning.memory.engine_bytes import engine_bytes
from slime_like.planning.placement import make_plan
from slime_like.planning.sync_bound import sync_plan, weight_bytes
from slime_like.weight_sync.quantise import quantise
from tests.helpers.plan_models import LLAMA_70B, plan_config
from tests.helpers.tiny_models import make_tiny_model

#: Heads and widths of whole blocks, so that a fused matrix has as many as its parts.
WHOLE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "moe_intermediate_size": 128}


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "glm4"])
@pytest.mark.parametrize("name", [NONE, *SCHEMES])
def test_what_is_sent_is_counted_to_the_byte(family, name, tmp_path):
    sizes = {key: size for key, size in WHOLE.items() if family == "qwen3_moe" or not key.startswith("moe")}
    folder = make_tiny_model(str(tmp_path), family, num_layers=2, **sizes)
    model, sent = model_from_hf(read_hf_config(folder), ModelConfig()), load_file(f"{folder}/model.safetensors")
    if name != NONE:
        sent = dict(pair for key, tensor in sent.items() for pair in quantise(key, tensor, SCHEMES[name]))
    config = plan_config(model, optimizer={"bf16": False}, sync={"rollout_quantization": name})
    assert weight_bytes(config) == sum(tensor.numel() * tensor.element_size() for tensor in sent.values())


def test_an_engine_of_70_billion_weights_is_nearly_halved():
    gib = 80 << 30
    sizes = {
        name: engine_bytes(plan_config(LLAMA_70B, sync={"rollout_quantization": name}), gib).weights
        for name in (NONE, "int8", "fp8")
    }
    # 80 layers of 2 x 8192² + 2 x 8192 x 1024 + 3 x 8192 x 28672 in eight bits; two embeddings and the norms in bf16
    linear = 80 * (2 * 8192**2 + 2 * 8192 * 1024 + 3 * 8192 * 28672)
    rest = 2 * (2 * 128256 * 8192 + 161 * 8192)
    assert sizes[NONE] == 2 * linear + rest
    assert sizes["fp8"] == pytest.approx(linear * (1 + 4 / 128**2) + rest, rel=1e-12)
    rows = 80 * (2 * 8192 + 2 * 1024 + 2 * 28672 + 8192)
    assert sizes["int8"] == pytest.approx(linear + 4 * rows + rest, rel=1e-12)


def test_the_bound_of_a_sync_is_of_eight_bits():
    placement = {"actor_num_nodes": 2, "actor_num_gpus_per_node": 8, "rollout_num_gpus": 16}
    plain = plan_config(LLAMA_70B, placement=placement | {"rollout_num_gpus_per_engine": 8})
    eight = dataclasses.replace(plain, sync=dataclasses.replace(plain.sync, rollout_quantization="fp8"))
    before, after = (sync_plan(config, make_plan(config)) for config in (plain, eight))
    assert after.bytes == weight_bytes(eight) and after.bound_s / before.bound_s == pytest.approx(0.515, abs=1e-3)
