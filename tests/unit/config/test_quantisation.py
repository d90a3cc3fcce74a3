"""Eight-bit schemes: what engines are told, which flags do not go with them, and which sizes have no whole blocks."""

# Covers slime_like.config.quantisation_rules and .fake_quantisation too.

from __future__ import annotations

import dataclasses
import json

import pytest

from slime_like.config.engine import EngineConfig
from slime_like.config.fake_quantisation import fake_quantisation_problems
from slime_like.config.lora import LoraConfig
from slime_like.config.optimizer import OptimizerConfig
from slime_like.config.placement import PlacementConfig
from slime_like.config.quantisation import (
    LINEAR,
    SCHEMES,
    engine_flags,
    is_served,
    plain_flags,
    scheme_of,
    served_config,
)
from slime_like.config.quantisation_rules import quantisation_problems
from slime_like.config.run import RunConfig
from slime_like.config.slime_flags.notices import notices
from slime_like.config.sync import SyncConfig
from slime_like.sglang_backend.server_args import check_flags
from tests.helpers.plan_models import DEEPSEEK_V3, LLAMA_70B, QWEN3_8B

FP8, INT8 = SCHEMES["fp8"], SCHEMES["int8"]


def config(name: str = "fp8", *, model=QWEN3_8B, gpus: int = 1, sglang=None, lora=None, placement=None, **sync):
    return RunConfig(
        model=model,
        placement=PlacementConfig(rollout_num_gpus_per_engine=gpus, **(placement or {})),
        engine=EngineConfig(sglang=sglang or {}),
        lora=lora or LoraConfig(),
        sync=SyncConfig(rollout_quantization=name, **sync),
    )


@pytest.mark.parametrize("name", SCHEMES)
def test_engines_start_without_weights_and_keep_the_users_overrides(name):
    given = {"json_model_override_args": '{"rope_theta": 5.0}', "mem_fraction_static": "0.5"}
    flags = engine_flags(SCHEMES[name], given)
    assert flags["load_format"] == "dummy" and check_flags(flags)[0] == []
    overrides = json.loads(flags["json_model_override_args"])
    assert overrides == {"rope_theta": 5.0, "quantization_config": dict(SCHEMES[name].engine_config)}
    assert is_served(SCHEMES[name], served_config(flags))
    assert scheme_of(name) is SCHEMES[name] and scheme_of("none") is None


def test_what_an_engine_serves_is_in_its_arguments_or_its_checkpoint(tmp_path):
    assert served_config({}) is None and not is_served(INT8, None)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": dict(FP8.engine_config)}))
    stored = served_config({"model_path": str(tmp_path), "json_model_override_args": "{}"})
    assert is_served(FP8, stored) and not is_served(INT8, stored)
    assert not is_served(FP8, {"quant_method": "fp8"})  # one number a matrix instead of a block
    overridden = {"model_path": str(tmp_path)} | engine_flags(INT8, {})
    assert is_served(INT8, served_config(overridden))


@pytest.mark.parametrize(
    ("name", "matches"),
    [
        ("model.layers.3.self_attn.q_proj.weight", True), ("model.layers.3.self_attn.kv_a_proj_with_mqa.weight", True),
        ("model.layers.3.mlp.experts.12.down_proj.weight", True), ("model.layers.3.mlp.gate_up_proj.weight", True),
        ("model.layers.3.mlp.shared_experts.up_proj.weight", True), ("model.layers.3.mlp.gate.weight", False),
        ("model.layers.3.self_attn.q_proj.bias", False), ("model.layers.3.self_attn.q_norm.weight", False),
        ("model.embed_tokens.weight", False), ("lm_head.weight", False),
        ("model.layers.3.self_attn.q_proj.weight_scale", False),
    ],
)  # fmt: skip
def test_only_linear_layers(name, matches):
    assert bool(LINEAR.search(name)) is matches


def test_none_asks_nothing():
    wrong = config("none", sglang={"quantization": "fp8"}, verify_weight_sync="off")
    assert quantisation_problems(wrong) == []


@pytest.mark.parametrize("name", SCHEMES)
@pytest.mark.parametrize("model", [QWEN3_8B, LLAMA_70B])
def test_public_sizes_go(name, model):
    assert [quantisation_problems(config(name, model=model, gpus=gpus)) for gpus in (1, 2, 8)] == [[]] * 3


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"sglang": {"quantization": "fp8"}}, "--sglang-quantization fp8 does not go with --rollout-quantization"),
        ({"sglang": {"load_format": "auto"}}, "--sglang-load-format auto does not go with --rollout-quantization"),
        ({"sglang": {"json_model_override_args": "{"}}, "is no JSON object"),
        ({"sglang": {"json_model_override_args": "[1]"}}, "is no JSON object"),
        ({"sglang": {"json_model_override_args": '{"quantization_config": {}}'}}, "has a quantization_config"),
        ({"sglang": {"ep_size": "2"}, "gpus": 2}, "--sglang-ep-size above 1: where these engines keep"),
        ({"sglang": {"pp_size": "2"}, "gpus": 2}, "--sglang-pp-size above 1: where these engines keep"),
        ({"sglang": {"dp_size": "2", "enable_dp_attention": True}, "gpus": 2}, "--sglang-enable-dp-attention"),
        ({"verify_weight_sync": "off"}, "only digests show that all were replaced"),
        ({"verify_weight_sync": "probe"}, "only digests show that all were replaced"),
        ({"update_weight_mode": "adapter", "lora": LoraConfig(lora_rank=4)}, "sends no base"),
        ({"placement": {"debug_train_only": True}}, "this run sends no weights"),
        ({"placement": {"debug_rollout_only": True}}, "this run sends no weights"),
    ],
)
def test_what_does_not_go_with_it(changes, expected):
    (problem,) = quantisation_problems(config(**changes))
    assert expected in problem and ("Fix:" in problem or "is no JSON" in problem)
    assert problem in config(**changes).problems()


def test_sizes_that_make_no_sense_are_told_first():
    assert quantisation_problems(config(sglang={"pp_size": "two"})) == []


@pytest.mark.parametrize("transport", ["delta", "full"])
@pytest.mark.parametrize("lora", [None, LoraConfig(lora_rank=4)])
def test_deltas_and_merged_adapters_go(transport, lora):
    assert quantisation_problems(config("int8", update_weight_mode=transport, lora=lora)) == []


@pytest.mark.parametrize(
    ("changes", "gpus", "numbers"),
    [
        ({"num_query_groups": 1, "kv_channels": 64}, 1, "1 key heads x 64 is 64."),
        ({"ffn_hidden_size": 12160}, 1, None),  # 95 blocks of 128
        ({"ffn_hidden_size": 12160}, 2, "--ffn-hidden-size is 12160 on 2 GPUs."),
        ({"ffn_hidden_size": 12200}, 1, "--ffn-hidden-size is 12200."),
        ({"hidden_size": 4128, "kv_channels": 128}, 1, "the hidden size is 4128."),
        ({"kv_channels": 96}, 2, None),  # 32 x 96 and 8 x 96 of both GPUs: 12 and 3 blocks each
        ({"kv_channels": 96}, 4, "8 key heads x 96 is 768 on 4 GPUs."),
        ({"kv_channels": 64}, 16, "8 key heads x 64 is 1024 on 16 GPUs."),  # two GPUs have the same head
        ({"num_experts": 8, "moe_ffn_hidden_size": 700}, 1, "--moe-ffn-hidden-size is 700."),
    ],
)
def test_blocks_must_be_whole_on_each_gpu(changes, gpus, numbers):
    model = dataclasses.replace(QWEN3_8B, **changes)
    problems = quantisation_problems(config("fp8", model=model, gpus=gpus))
    assert len(problems) == (numbers is not None)
    if numbers is not None:
        assert numbers in problems[0] and "int8" in problems[0]
        assert ("--rollout-num-gpus-per-engine" in problems[0]) == (gpus > 1)
    assert quantisation_problems(config("int8", model=model, gpus=gpus)) == []


def test_latent_attention_in_fp8_only():
    assert quantisation_problems(config("fp8", model=DEEPSEEK_V3, gpus=8)) == []
    (problem,) = quantisation_problems(config("int8", model=DEEPSEEK_V3, gpus=8))
    assert "multi-head latent attention take no int8" in problem
    narrow = dataclasses.replace(DEEPSEEK_V3, q_lora_rank=1500, kv_lora_rank=500)
    (problem,) = quantisation_problems(config("fp8", model=narrow, gpus=8))
    assert "--q-lora-rank is 1500; --kv-lora-rank is 500." in problem


def test_rounded_weights_without_a_correction_are_said_aloud():
    plain = config("fp8")
    (line,) = [line for line in notices(plain) if "--rollout-quantization fp8" in line]
    assert "--use-tis" in line
    for changes in ({"use_tis": True}, {"use_rollout_logprobs": True}, {"loss_type": "sft_loss"}):
        corrected = dataclasses.replace(plain, loss=dataclasses.replace(plain.loss, **changes))
        assert not any("--rollout-quantization" in line for line in notices(corrected))
    assert not any("--rollout-quantization" in line for line in notices(config("none")))


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_an_engine_that_is_sent_plain_weights_forgets_the_checkpoints_format(key):
    given = {"json_model_override_args": '{"rope_theta": 1.0}', "tp_size": 2}
    flags = plain_flags({"hidden_size": 8, key: dict(FP8.engine_config)}, given)
    assert flags["load_format"] == "dummy" and set(flags) == {"load_format", "json_model_override_args"}
    assert json.loads(flags["json_model_override_args"]) == {"rope_theta": 1.0, key: None}


@pytest.mark.parametrize("stored", [{}, {"quantization_config": None}])
def test_a_plain_checkpoint_is_loaded_as_it_is(stored):
    assert plain_flags({"hidden_size": 8, **stored}, {}) == {}


@pytest.mark.parametrize(
    ("groups", "reason"),
    [
        (
            {"sync": SyncConfig(rollout_quantization="int8")},
            "with --rollout-quantization int8: engines would round once",
        ),
        ({"lora": LoraConfig(lora_rank=8)}, "with --lora-rank: an adapter's base is not trained"),
        ({"sync": SyncConfig(custom_weight_transform_path="a.b")}, "with --custom-weight-transform-path"),
        ({}, None),
    ],
)
def test_what_fake_quantisation_does_not_go_with(groups, reason):
    rounds = RunConfig(optimizer=OptimizerConfig(fake_quantization="int4"), **groups)
    problems = fake_quantisation_problems(rounds)
    assert len(problems) == (reason is not None) and all(reason in problem for problem in problems)
    assert [problem for problem in rounds.problems() if "--fake-quantization" in problem] == problems
    assert rounds.optimizer.int4_group_size == 128
    plain = dataclasses.replace(rounds, optimizer=OptimizerConfig())
    assert fake_quantisation_problems(plain) == [] and plain.optimizer.int4_group_size is None
