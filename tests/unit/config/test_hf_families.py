"""config.json of the larger families: it says the same as the flags in scripts/models, and what it cannot say is
refused.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from arguments import parse_args
from slime_like.config.base import add_flags, from_namespace, make_parser, parse
from slime_like.config.hf_model import disagreements, hf_notes, model_from_hf
from slime_like.config.model import ModelConfig
from slime_like.errors import ConfigError

DEEPSEEK = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168, "intermediate_size": 18432,
    "num_attention_heads": 128,
    "num_key_value_heads": 128, "vocab_size": 129280, "rms_norm_eps": 1e-6, "rope_theta": 10000, "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256, "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4,
    "routed_scaling_factor": 2.5, "norm_topk_prob": True,
    "scoring_func": "sigmoid", "num_nextn_predict_layers": 1, "tie_word_embeddings": False, "attention_bias": False,
    "hidden_act": "silu",
    "rope_scaling": {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096},
}  # fmt: skip
MOONLIGHT = DEEPSEEK | {
    "num_hidden_layers": 27, "hidden_size": 2048, "intermediate_size": 11264, "num_attention_heads": 16,
    "num_key_value_heads": 16, "vocab_size": 163840,
    "rms_norm_eps": 1e-5, "rope_theta": 50000.0, "q_lora_rank": None, "n_routed_experts": 64, "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "routed_scaling_factor": 2.446, "rope_scaling": None,
    "num_nextn_predict_layers": 0,
}  # fmt: skip
KIMI = DEEPSEEK | {
    "model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64, "vocab_size": 163840,
    "rope_theta": 50000.0, "n_routed_experts": 384,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827,
    "rope_scaling": {
        "type": "yarn", "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
        "beta_fast": 1.0, "beta_slow": 1.0,
    },
}  # fmt: skip
GLM45_AIR = {
    "model_type": "glm4_moe", "num_hidden_layers": 46, "hidden_size": 4096, "intermediate_size": 10944,
    "num_attention_heads": 96,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151552, "rms_norm_eps": 1e-5, "rope_theta": 1000000,
    "partial_rotary_factor": 0.5,
    "attention_bias": True, "use_qk_norm": False, "n_routed_experts": 128, "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "routed_scaling_factor": 1.0, "norm_topk_prob": True,
    "num_nextn_predict_layers": 1, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
GLM45 = GLM45_AIR | {
    "num_hidden_layers": 92, "hidden_size": 5120, "intermediate_size": 12288, "use_qk_norm": True,
    "n_routed_experts": 160,
    "moe_intermediate_size": 1536, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5,
}  # fmt: skip
GLM4 = {
    "model_type": "glm4", "num_hidden_layers": 40, "hidden_size": 4096, "intermediate_size": 13696,
    "num_attention_heads": 32, "num_key_value_heads": 2,
    "head_dim": 128, "vocab_size": 151552, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
GLM4_32B = GLM4 | {
    "num_hidden_layers": 61,
    "hidden_size": 6144,
    "intermediate_size": 23040,
    "num_attention_heads": 48,
    "attention_bias": False,
}
QWEN3_MOE = {
    "model_type": "qwen3_moe", "num_hidden_layers": 48, "hidden_size": 2048, "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
    "num_experts": 128,
    "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "tie_word_embeddings": False, "attention_bias": False, "hidden_act": "silu", "use_sliding_window": False,
}  # fmt: skip
MIMO = {
    "model_type": "mimo", "num_hidden_layers": 36, "hidden_size": 4096, "intermediate_size": 11008,
    "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 151680, "rms_norm_eps": 1e-5, "rope_theta": 640000, "attention_bias": True,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
SCRIPTS = {
    "deepseek-v3": DEEPSEEK, "moonlight-16B-A3B": MOONLIGHT, "kimi-k2": KIMI, "glm4.5-106B-A12B": GLM45_AIR,
    "glm4.5-355B-A32B": GLM45,
    "glm4-9B": GLM4, "glm4-32B": GLM4_32B, "qwen3-30B-A3B": QWEN3_MOE, "mimo-7B": MIMO,
}  # fmt: skip


def script_model(root: Path, name: str, drop: str = "") -> ModelConfig:
    """The flags of scripts/models/<name>.sh, without the switch `drop`."""
    command = [
        "bash",
        "-euc",
        'source "$1"; printf "%s\\n" "${MODEL_ARGS[@]}"',
        "bash",
        str(root / "scripts/models" / f"{name}.sh"),
    ]
    flags = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()
    parser = make_parser("model flags only")
    add_flags(parser, ModelConfig)
    return from_namespace(ModelConfig, parse(parser, [text for text in flags if text != drop]))


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_script_and_checkpoint_say_the_same(repo_root: Path, name: str):
    assert disagreements(script_model(repo_root, name), model_from_hf(SCRIPTS[name], ModelConfig())) == []


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_the_architecture_of_the_checkpoint_is_possible(name: str):
    assert model_from_hf(SCRIPTS[name], ModelConfig()).problems() == []


@pytest.mark.parametrize(
    ("name", "switch"),
    [
        ("glm4-9B", "--post-mlp-layernorm"),
        ("glm4-9B", "--rotary-interleaved"),
        ("deepseek-v3", "--qk-layernorm"),
        ("mimo-7B", "--add-qkv-bias"),
    ],
)
def test_a_forgotten_switch_is_named(repo_root: Path, name: str, switch: str):
    problems = disagreements(script_model(repo_root, name, drop=switch), model_from_hf(SCRIPTS[name], ModelConfig()))
    assert len(problems) == 1 and problems[0].startswith(
        f"{switch}: the command line says False, --hf-checkpoint says True"
    )


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"n_routed_experts": 128}, "--num-experts"),
        ({"first_k_dense_replace": 1}, "--moe-layer-freq"),
        ({"kv_lora_rank": 256}, "--kv-lora-rank"),
        ({"q_lora_rank": None}, "--q-lora-rank"),
        ({"n_shared_experts": 2}, "--moe-shared-expert-intermediate-size"),
        ({"routed_scaling_factor": 1.0}, "--moe-router-topk-scaling-factor"),
        ({"rope_scaling": None}, "--rotary-scaling-factor"),
        ({"rope_scaling": DEEPSEEK["rope_scaling"] | {"beta_fast": 16.0}}, "--beta-fast"),
        (
            {"rope_scaling": DEEPSEEK["rope_scaling"] | {"original_max_position_embeddings": 8192}},
            "--original-max-position-embeddings",
        ),
        ({"rope_scaling": DEEPSEEK["rope_scaling"] | {"mscale_all_dim": 0.7}}, "--mscale-all-dim"),
    ],
)
def test_a_checkpoint_that_differs_is_named(repo_root: Path, change: dict, flag: str):
    problems = disagreements(script_model(repo_root, "deepseek-v3"), model_from_hf(DEEPSEEK | change, ModelConfig()))
    assert [problem.split(":")[0] for problem in problems] == [flag]


@pytest.mark.parametrize(
    ("hf", "message"),
    [
        (QWEN3_MOE | {"mlp_only_layers": [0]}, "layers without experts"),
        (QWEN3_MOE | {"rope_scaling": {"rope_type": "yarn", "factor": 4}}, "rope type 'yarn'"),
        ({k: v for k, v in DEEPSEEK.items() if k != "kv_lora_rank"}, "lacks kv_lora_rank"),
        (QWEN3_MOE | {"attention_bias": True}, "attention_bias"),
        (DEEPSEEK | {"topk_group": 8}, "ranks them by their best 1"),
        (DEEPSEEK | {"norm_topk_prob": False}, "divided by their sum"),
        (GLM45 | {"scoring_func": "softmax"}, "sigmoid scores"),
        (DEEPSEEK | {"rope_interleave": False}, "rope_interleave"),
        (DEEPSEEK | {"rope_scaling": DEEPSEEK["rope_scaling"] | {"truncate": False}}, "truncate"),
        (DEEPSEEK | {"rope_scaling": {"type": "yarn", "factor": 40, "mscale_all_dim": 1.0}}, "without mscale"),
    ],
)
def test_what_is_not_supported_is_named(hf: dict, message: str):
    with pytest.raises(ConfigError, match=message):
        model_from_hf(hf, ModelConfig())


def test_another_order_of_softmax_and_choice_is_named(repo_root: Path):
    flags = script_model(repo_root, "qwen3-30B-A3B")
    (problem,) = disagreements(flags, model_from_hf(QWEN3_MOE | {"norm_topk_prob": False}, ModelConfig()))
    assert problem.startswith("--moe-router-pre-softmax: the command line says False, --hf-checkpoint says True")


def test_layers_that_predict_further_are_left_out_with_a_note():
    assert "1 layer for tokens beyond the next" in hf_notes(MIMO)[0]
    assert hf_notes(MOONLIGHT) == []


def test_a_run_is_told_of_such_layers_too(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MIMO))
    data = tmp_path / "data.jsonl"
    data.write_text('{"input": "hi"}')
    argv = [
        "--hf-checkpoint",
        str(tmp_path),
        "--prompt-data",
        str(data),
        "--rm-type",
        "math",
        "--num-rollout",
        "1",
        "--colocate",
    ]
    assert any("1 layer for tokens beyond the next" in note for note in parse_args(argv).notes)


def test_transformers_5_keys():
    """It nests rope in rope_parameters and calls Qwen3's experts num_local_experts."""
    hf = {k: v for k, v in GLM4.items() if k not in ("rope_theta", "partial_rotary_factor")}
    hf["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    assert model_from_hf(hf, ModelConfig()) == model_from_hf(GLM4, ModelConfig())
    moe = {k: v for k, v in QWEN3_MOE.items() if k != "num_experts"} | {"num_local_experts": 128}
    assert model_from_hf(moe, ModelConfig()).num_experts == 128
