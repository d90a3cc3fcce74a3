"""The architecture as an HF config.json tells it: fills ModelConfig, or checks flags against it."""

from __future__ import annotations

import dataclasses
import json
import os

from slime_like.config.families import FAMILIES, HF_TYPES, Family, HfType
from slime_like.config.hf_keys import key_problems
from slime_like.config.model import ModelConfig
from slime_like.errors import ConfigError

#: Built into Megatron-core 0.16.1; another value would train silently wrong.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

#: What the supported families may say in config.json but do not build otherwise; another value would train silently
#: wrong.
_USUAL = {
    "attention_bias": False,
    "mlp_bias": False,
    "use_sliding_window": False,
    "hidden_act": "silu",
    "partial_rotary_factor": 1.0,
}

_NEEDED = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size", "rms_norm_eps")
#: Of a model with experts.
_NEEDED_EXPERTS = ("moe_intermediate_size", "num_experts_per_tok")
#: What config.json may have; those of the largest models have some KiB.
_LARGEST_BYTES = 1024**2
_NEEDED_LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")

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
    "rotary_percent",
    "rotary_interleaved",
    "add_qkv_bias",
    "qk_layernorm",
    "post_self_attn_layernorm",
    "post_mlp_layernorm",
    "untie_embeddings_and_output_weights",
    "use_rope_scaling",
    "num_experts",
    "multi_latent_attention",
)
_CHECKED_LATENT = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "rotary_scaling_factor",
)
#: What yarn's frequencies and scales follow from; without yarn they say nothing.
_CHECKED_YARN = ("mscale", "mscale_all_dim", "original_max_position_embeddings", "beta_fast", "beta_slow")
_CHECKED_EXPERTS = (
    "expert_layers",
    "moe_ffn_hidden_size",
    "moe_shared_expert_intermediate_size",
    "moe_router_topk",
    "moe_router_score_function",
    "moe_router_topk_scaling_factor",
    "moe_router_enable_expert_bias",
    "moe_router_num_groups",
    "moe_router_group_topk",
)
_FLAG_OF = {
    "mlp_size": "ffn-hidden-size",
    "num_kv_heads": "num-query-groups",
    "head_size": "kv-channels",
    "expert_layers": "moe-layer-freq",
}


def read_hf_config(folder: str) -> dict:
    """config.json of an HF folder.

    Raises ConfigError if it is no JSON object, or has a key whose value is of a wrong type or out of range.
    """
    path = os.path.join(folder, "config.json")
    try:
        if os.path.getsize(path) > _LARGEST_BYTES:
            raise ConfigError([f"{path} has {os.path.getsize(path)} bytes; a config has at most {_LARGEST_BYTES}."])
        with open(path, encoding="utf-8") as file:
            hf = json.load(file)
    except RecursionError:
        raise ConfigError([f"{path} cannot be read: it is nested too deeply."]) from None
    except (OSError, ValueError) as error:
        raise ConfigError([f"{path} cannot be read: {error}"]) from None
    if not isinstance(hf, dict):
        raise ConfigError([f"{path} is no JSON object"])
    if problems := key_problems(hf):
        raise ConfigError([f"{path}: {problem}" for problem in problems])
    return hf


def model_from_hf(hf: dict, flags: ModelConfig) -> ModelConfig:
    """The architecture of an HF config; flags that are the trainer's own (padding, attention backend) are kept."""
    family, hf_type = _check_known(hf)
    heads = hf["num_attention_heads"]
    kv_heads = heads if family.is_latent else hf.get("num_key_value_heads") or heads
    head_size = hf["qk_nope_head_dim"] if family.is_latent else hf.get("head_dim") or hf["hidden_size"] // heads
    parts = (
        hf_type.adds
        | _rope(hf, family, flags)
        | (_latent(hf) if family.is_latent else {})
        | _experts(hf, family, flags)
    )
    parts["num_query_groups"] = None if family.is_latent else kv_heads
    if "add_qkv_bias" not in parts:
        parts["add_qkv_bias"] = bool(hf.get("attention_bias", False))
    if "qk_layernorm" not in parts:
        parts["qk_layernorm"] = bool(hf.get("use_qk_norm", False))
    return dataclasses.replace(
        flags,
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        ffn_hidden_size=hf["intermediate_size"],
        num_attention_heads=heads,
        group_query_attention=kv_heads != heads,
        kv_channels=head_size,
        vocab_size=hf["vocab_size"],
        max_position_embeddings=flags.max_position_embeddings or hf.get("max_position_embeddings") or 32768,
        normalization="RMSNorm",
        norm_epsilon=hf["rms_norm_eps"],
        swiglu=True,
        disable_bias_linear=True,
        untie_embeddings_and_output_weights=not hf.get("tie_word_embeddings", False),
        **parts,
    )


def hf_notes(hf: dict) -> list[str]:
    """What config.json describes and is left out of the architecture."""
    ahead = layers_ahead(hf)
    if not ahead:
        return []
    return [
        (
            f"--hf-checkpoint has {ahead} layer{'s' * (ahead > 1)} for tokens beyond the next: neither trained nor"
            " counted in the plan"
        )
    ]


def layers_ahead(hf: dict) -> int:
    """Layers for tokens beyond the next that the checkpoint may hold, numbered after the others."""
    return hf.get("num_nextn_predict_layers") or 0


def disagreements(flags: ModelConfig, hf: ModelConfig) -> list[str]:
    """Where the command line's architecture differs from the checkpoint's."""
    names = [name for name in _CHECKED if not (name == "head_size" and hf.multi_latent_attention)]
    if flags.multi_latent_attention and hf.multi_latent_attention:
        names += _CHECKED_LATENT + (_CHECKED_YARN if hf.rotary_scaling_factor != 1.0 else ())
    if flags.num_experts and hf.num_experts:
        names += _CHECKED_EXPERTS
        if hf.moe_router_score_function == "softmax":
            names.append("moe_router_pre_softmax")
    differences = []
    for name in names:
        ours, theirs = (_written(getattr(model, name)) for model in (flags, hf))
        if name == "moe_router_topk_scaling_factor":
            ours, theirs = ours or 1.0, theirs or 1.0
        if ours != theirs:
            differences.append(
                f"--{_FLAG_OF.get(name, name.replace('_', '-'))}: the command line says {ours}, --hf-checkpoint says"
                f" {theirs}. Fix: the flag, or leave out --num-layers to take all from the checkpoint."
            )
    return differences


def _written(value):
    """A value for comparing and showing: layers with experts as 0 and 1."""
    if isinstance(value, tuple):
        return "".join(str(int(item)) for item in value)
    return value


def _check_known(hf: dict) -> tuple[Family, HfType]:
    """The family and the type of a config. Raises ConfigError for one, a shape or a key that is not supported."""
    kind = hf.get("model_type", "")
    if kind not in HF_TYPES:
        raise ConfigError(
            [f"model_type {hf.get('model_type')!r} is not supported. Known: {', '.join(sorted(HF_TYPES))}."]
        )
    family = FAMILIES[HF_TYPES[kind]]
    hf_type = family.hf_types[kind]
    usual = {k: v for k, v in _USUAL.items() if k not in hf_type.own_keys}
    unusual = {k: hf[k] for k, value in usual.items() if hf.get(k, value) not in (value, None)}
    if unusual:
        raise ConfigError([f"config.json has {unusual}, which is not supported. Supported: {usual}."])
    has_experts = hf.get("n_routed_experts") or hf.get("num_experts") or hf.get("num_local_experts")
    if family.router == "softmax" and not has_experts:
        raise ConfigError([f"config.json is of a {kind} and lacks num_experts"])
    needed = (*_NEEDED, *(_NEEDED_LATENT if family.is_latent else ()), *(_NEEDED_EXPERTS if has_experts else ()))
    missing = [k for k in needed if hf.get(k) is None]
    if missing:
        raise ConfigError([f"config.json lacks {', '.join(missing)}"])
    return family, hf_type


def _rope(hf: dict, family: Family, flags: ModelConfig) -> dict:
    """Position encoding. Raises ConfigError for a kind that Megatron-core does not compute the same way."""
    # transformers 5 nests rope_theta in rope_parameters; older files have it at the top.
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    known = ("default", "llama3", "yarn") if family.is_latent else ("default", "llama3")
    if rope_type not in known:
        raise ConfigError([f"rope type {rope_type!r} is not supported. Known: {', '.join(known)}."])
    different = {k: rope[k] for k, v in _LLAMA3_ROPE.items() if rope_type == "llama3" and rope.get(k, v) != v}
    if different:
        raise ConfigError(
            [
                (
                    f"llama3 rope scaling with {different} is not supported: Megatron-core 0.16.1 has {_LLAMA3_ROPE}"
                    " built in."
                )
            ]
        )
    fields = {
        "rotary_base": float(rope.get("rope_theta") or hf.get("rope_theta") or 10000.0),
        "rotary_percent": rope.get("partial_rotary_factor", hf.get("partial_rotary_factor")) or 1.0,
        "use_rope_scaling": rope_type == "llama3",
        "rope_scaling_factor": rope.get("factor", 8.0) if rope_type == "llama3" else flags.rope_scaling_factor,
    }
    if family.is_latent:
        fields |= _yarn(rope if rope_type == "yarn" else {})
    return fields


def _yarn(rope: dict) -> dict:
    """Yarn (arXiv:2309.00071) in transformers' words; {} for plain rope.

    Raises ConfigError for what Megatron-core computes otherwise.
    """
    fields = {
        name: rope.get(name, ModelConfig.__dataclass_fields__[name].default)
        for name in ("mscale", "mscale_all_dim", "beta_fast", "beta_slow")
    }
    scales = [bool(rope.get(name)) for name in ("mscale", "mscale_all_dim")]
    if rope.get("attention_factor") is not None or rope.get("truncate") is False or (scales[1] and not scales[0]):
        raise ConfigError(
            [f"yarn with attention_factor, truncate false, or mscale_all_dim without mscale is not supported: {rope}."]
        )
    if not all(scales):  # transformers then takes no account of the one that is there
        fields["mscale"] = 1.0
    original = rope.get("original_max_position_embeddings", ModelConfig.original_max_position_embeddings)
    return fields | {"rotary_scaling_factor": rope.get("factor", 1.0), "original_max_position_embeddings": original}


def _latent(hf: dict) -> dict:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, sec. 2.1)."""
    if hf.get("rope_interleave") is False:
        raise ConfigError(
            [
                (
                    "config.json has rope_interleave false, which is not supported: Megatron-core rotates neighbouring"
                    " channels."
                )
            ]
        )
    return {
        "multi_latent_attention": True,
        "q_lora_rank": hf.get("q_lora_rank"),
        "kv_lora_rank": hf["kv_lora_rank"],
        "qk_head_dim": hf["qk_nope_head_dim"],
        "qk_pos_emb_head_dim": hf["qk_rope_head_dim"],
        "v_head_dim": hf["v_head_dim"],
    }


def _experts(hf: dict, family: Family, flags: ModelConfig) -> dict:
    """Mixture of experts, in Qwen's words (num_experts) or DeepSeek's (n_routed_experts); {} for a dense model."""
    if family.router == "softmax":
        if hf.get("mlp_only_layers") or (hf.get("decoder_sparse_step") or 1) != 1:
            raise ConfigError(
                [
                    (
                        "config.json has layers without experts (mlp_only_layers, decoder_sparse_step), which is not"
                        " supported for qwen3_moe."
                    )
                ]
            )
        return {
            "num_experts": hf.get("num_experts") or hf.get("num_local_experts"),
            "moe_layer_freq": f"[1]*{hf['num_hidden_layers']}",
            "moe_ffn_hidden_size": hf["moe_intermediate_size"],
            "moe_shared_expert_intermediate_size": None,
            "moe_router_topk": hf["num_experts_per_tok"],
            "moe_router_score_function": "softmax",
            # Softmax over the chosen ones equals softmax over all, renormalized.
            "moe_router_pre_softmax": not hf.get("norm_topk_prob", False),
            "moe_router_topk_scaling_factor": None,
        }
    if not hf.get("n_routed_experts"):
        return {}
    _check_router(hf)
    dense, layers, groups = (
        min(hf.get("first_k_dense_replace") or 0, hf["num_hidden_layers"]),
        hf["num_hidden_layers"],
        hf.get("n_group") or 1,
    )
    scale = hf.get("routed_scaling_factor") or 1.0
    return {
        "num_experts": hf["n_routed_experts"],
        "moe_layer_freq": f"[0]*{dense}+[1]*{layers - dense}" if dense else f"[1]*{layers}",
        "moe_ffn_hidden_size": hf["moe_intermediate_size"],
        "moe_shared_expert_intermediate_size": (hf.get("n_shared_experts") or 0) * hf["moe_intermediate_size"] or None,
        "moe_router_topk": hf["num_experts_per_tok"],
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        # transformers and the engines route in fp32 whatever the weights' type.
        "moe_router_dtype": flags.moe_router_dtype or "fp32",
        "moe_router_topk_scaling_factor": scale if scale != 1.0 else None,
        "moe_router_num_groups": groups if groups > 1 else None,
        "moe_router_group_topk": hf.get("topk_group") if groups > 1 else None,
    }


def _check_router(hf: dict) -> None:
    """Raises ConfigError for a DeepSeek-like router that Megatron-core computes otherwise."""
    groups, chosen, topk = hf.get("n_group") or 1, hf.get("topk_group") or 1, hf["num_experts_per_tok"]
    if hf.get("scoring_func", "sigmoid") != "sigmoid" or not hf.get("norm_topk_prob", True) or topk < 2:
        settings = {name: hf.get(name) for name in ("scoring_func", "norm_topk_prob", "num_experts_per_tok")}
        raise ConfigError(
            [
                (
                    f"config.json has {settings}; supported are sigmoid scores of at least 2 experts a token, divided"
                    " by their sum."
                )
            ]
        )
    if groups > 1 and topk // chosen != 2:
        sizes = f"num_experts_per_tok {topk}, topk_group {chosen}, n_group {groups}"
        raise ConfigError(
            [
                (
                    f"config.json has {sizes}: groups are ranked by their best 2 experts, but Megatron-core ranks"
                    f" them by their best {topk // chosen}."
                )
            ]
        )
