"""The architecture as an HF config.json tells it: fills ModelConfig, or checks flags against it."""

from __future__ import annotations

import dataclasses
import json
import os

from slime_like.config.model import ModelConfig
from slime_like.errors import ConfigError

#: HF `model_type` -> what the family adds to the common Llama layout.
FAMILIES = {
    "llama": {"add_qkv_bias": False, "qk_layernorm": False},
    "qwen2": {"add_qkv_bias": True, "qk_layernorm": False},
    "qwen3": {"add_qkv_bias": False, "qk_layernorm": True},
}

#: Built into Megatron-core 0.16.1; another value would train silently wrong.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

#: What the supported families may say in config.json but do not build otherwise; another value would train silently wrong.
_USUAL = {"attention_bias": False, "mlp_bias": False, "use_sliding_window": False, "hidden_act": "silu", "partial_rotary_factor": 1.0}

#: Fields that must agree between flags and checkpoint; the others are only the trainer's business.
_CHECKED = (
    "num_layers",
    "hidden_size",
    "mlp_size",
    "num_attention_heads",
    "num_kv_heads",
    "head_size",
    "vocab_size",
    "norm_epsilon",
    "rotary_base",
    "add_qkv_bias",
    "qk_layernorm",
    "untie_embeddings_and_output_weights",
    "use_rope_scaling",
)


def read_hf_config(folder: str) -> dict:
    """config.json of an HF folder. Raises ConfigError if it is no JSON object."""
    path = os.path.join(folder, "config.json")
    try:
        with open(path, encoding="utf-8") as file:
            hf = json.load(file)
    except (OSError, ValueError) as error:
        raise ConfigError([f"{path} cannot be read: {error}"]) from None
    if not isinstance(hf, dict):
        raise ConfigError([f"{path} is no JSON object"])
    return hf


def model_from_hf(hf: dict, flags: ModelConfig) -> ModelConfig:
    """The architecture of an HF config; flags that are the trainer's own (padding, attention backend) are kept."""
    family = FAMILIES.get(hf.get("model_type", ""))
    if family is None:
        raise ConfigError([f"model_type {hf.get('model_type')!r} is not supported. Known: {', '.join(sorted(FAMILIES))}."])
    unusual = {k: hf[k] for k, usual in _USUAL.items() if hf.get(k, usual) not in (usual, None)}
    if unusual:
        raise ConfigError([f"config.json has {unusual}, which is not supported. Supported: {_USUAL}."])
    missing = [k for k in ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "rms_norm_eps") if k not in hf]
    if missing:
        raise ConfigError([f"config.json lacks {', '.join(missing)}"])
    # transformers 5 nests rope_theta in rope_parameters; older files have it at the top.
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type not in ("default", "llama3"):
        raise ConfigError([f"rope type {rope_type!r} is not supported. Known: default, llama3."])
    different = {k: rope[k] for k, v in _LLAMA3_ROPE.items() if rope_type == "llama3" and rope.get(k, v) != v}
    if different:
        raise ConfigError([f"llama3 rope scaling with {different} is not supported: Megatron-core 0.16.1 has {_LLAMA3_ROPE} built in."])
    kv_heads = hf.get("num_key_value_heads", hf["num_attention_heads"])
    return dataclasses.replace(
        flags,
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        ffn_hidden_size=hf["intermediate_size"],
        num_attention_heads=hf["num_attention_heads"],
        group_query_attention=kv_heads != hf["num_attention_heads"],
        num_query_groups=kv_heads,
        kv_channels=hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"],
        vocab_size=hf["vocab_size"],
        max_position_embeddings=flags.max_position_embeddings or int(hf.get("max_position_embeddings", 32768)),
        normalization="RMSNorm",
        norm_epsilon=hf["rms_norm_eps"],
        swiglu=True,
        disable_bias_linear=True,
        untie_embeddings_and_output_weights=not hf.get("tie_word_embeddings", False),
        rotary_base=rope.get("rope_theta", hf.get("rope_theta", 10000.0)),
        use_rope_scaling=rope_type == "llama3",
        rope_scaling_factor=rope.get("factor", 8.0) if rope_type == "llama3" else flags.rope_scaling_factor,
        add_qkv_bias=family["add_qkv_bias"],
        qk_layernorm=family["qk_layernorm"],
    )


def disagreements(flags: ModelConfig, hf: ModelConfig) -> list[str]:
    """Where the command line's architecture differs from the checkpoint's."""
    found = []
    for name in _CHECKED:
        ours, theirs = getattr(flags, name), getattr(hf, name)
        if ours != theirs:
            flag = {"mlp_size": "ffn-hidden-size", "num_kv_heads": "num-query-groups", "head_size": "kv-channels"}.get(name, name.replace("_", "-"))
            found.append(
                f"--{flag}: the command line says {ours}, --hf-checkpoint says {theirs}. Fix: the flag, or leave out --num-layers to "
                "take all from the checkpoint."
            )
    return found
