"""The model families: a row each, with all that flags, checkpoints and engines need to know of it.

A new family is a row here and its table of names, megatron_backend/hf/tables/<name>.py; nothing else names one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from slime_like.config.model import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class HfType:
    """One `model_type` of HF's config.json.

    Example: mimo = Qwen2's layers, with a key that says whether there is a bias.
    """

    #: ModelConfig fields that the type has and config.json does not say
    adds: dict = dataclasses.field(default_factory=dict)
    own_keys: tuple[str, ...] = ()  # keys of config.json that it reads itself, so that any value of them is usual


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """What sets a family apart."""

    has: Callable[[ModelConfig], bool]  # whether an architecture is of this family
    hf_types: dict[str, HfType]
    is_latent: bool = False  # keys and values are compressed (multi-head latent attention)
    router: str | None = None  # softmax (Qwen's words in config.json), sigmoid (DeepSeek's), or None: no experts
    #: whether SGLang (0.5.23) ties the output layer to the embedding where the checkpoint does
    is_tied_by_engines: bool = True


def _has_plain_layers(model: ModelConfig) -> bool:
    return not (model.post_self_attn_layernorm or model.post_mlp_layernorm or model.rotary_interleaved)


def _is_dense(model: ModelConfig) -> bool:
    return not (model.multi_latent_attention or model.num_experts)


def _is_plain_and_dense(model: ModelConfig) -> bool:
    return _is_dense(model) and _has_plain_layers(model) and model.rotary_percent == 1.0


def _is_glm4(model: ModelConfig) -> bool:
    normed = model.post_self_attn_layernorm and model.post_mlp_layernorm
    return bool(_is_dense(model) and normed and model.rotary_interleaved and not model.qk_layernorm)


def _has_deepseek_router(model: ModelConfig) -> bool:
    """Sigmoid scores, with a bias for choosing."""
    gated = model.moe_shared_expert_gate
    return (
        bool(model.num_experts)
        and model.moe_router_score_function == "sigmoid"
        and model.moe_router_enable_expert_bias
        and not gated
    )


def _is_qwen3_moe(model: ModelConfig) -> bool:
    others = (
        model.moe_shared_expert_intermediate_size,
        model.moe_router_enable_expert_bias,
        model.moe_router_num_groups,
        model.moe_router_group_topk,
        model.moe_shared_expert_gate,
        model.multi_latent_attention,
        model.add_qkv_bias,
    )
    softmax = model.moe_router_score_function == "softmax" and model.moe_router_topk_scaling_factor in (None, 1.0)
    layers = _has_plain_layers(model) and model.rotary_percent == 1.0 and model.qk_layernorm
    return bool(model.num_experts and layers and softmax and not any(others) and all(model.expert_layers))


def _is_deepseek_v3(model: ModelConfig) -> bool:
    layers = _has_plain_layers(model) and model.rotary_percent == 1.0 and model.qk_layernorm and not model.add_qkv_bias
    return bool(model.multi_latent_attention and layers and _has_deepseek_router(model))


FAMILIES: dict[str, Family] = {
    "llama": Family(
        has=lambda model: _is_plain_and_dense(model) and not model.qk_layernorm and not model.add_qkv_bias,
        hf_types={"llama": HfType(adds={"add_qkv_bias": False, "qk_layernorm": False})},
    ),
    "qwen2": Family(
        has=lambda model: _is_plain_and_dense(model) and not model.qk_layernorm and model.add_qkv_bias,
        hf_types={
            "qwen2": HfType(adds={"add_qkv_bias": True, "qk_layernorm": False}),
            "mimo": HfType(adds={"add_qkv_bias": True, "qk_layernorm": False}, own_keys=("attention_bias",)),
        },
    ),
    "qwen3": Family(
        has=lambda model: _is_plain_and_dense(model) and model.qk_layernorm and not model.add_qkv_bias,
        hf_types={"qwen3": HfType(adds={"add_qkv_bias": False, "qk_layernorm": True})},
    ),
    "qwen3_moe": Family(
        has=_is_qwen3_moe,
        hf_types={"qwen3_moe": HfType(adds={"add_qkv_bias": False, "qk_layernorm": True})},
        router="softmax",
        is_tied_by_engines=False,
    ),
    "glm4": Family(
        has=_is_glm4,
        hf_types={
            "glm4": HfType(
                adds={
                    "qk_layernorm": False,
                    "post_self_attn_layernorm": True,
                    "post_mlp_layernorm": True,
                    "rotary_interleaved": True,
                },
                own_keys=("attention_bias", "partial_rotary_factor"),
            )
        },
    ),
    "glm4_moe": Family(
        has=lambda model: not model.multi_latent_attention and _has_plain_layers(model) and _has_deepseek_router(model),
        hf_types={"glm4_moe": HfType(own_keys=("attention_bias", "partial_rotary_factor"))},
        router="sigmoid",
        is_tied_by_engines=False,
    ),
    "deepseek_v3": Family(
        has=_is_deepseek_v3,
        hf_types={
            name: HfType(adds={"add_qkv_bias": False, "qk_layernorm": True}) for name in ("deepseek_v3", "kimi_k2")
        },
        is_latent=True,
        router="sigmoid",
    ),
}

#: HF `model_type` -> the name of its family.
HF_TYPES = {hf_type: name for name, family in FAMILIES.items() for hf_type in family.hf_types}


def family_of(model: ModelConfig) -> str | None:
    """The name of the family that an architecture belongs to; None if no family is built this way.

    A run needs one: names of weights follow from it.
    """
    return next((name for name, family in FAMILIES.items() if family.has(model)), None)
