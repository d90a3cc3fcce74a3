"""Which model family an architecture belongs to, told by the flags that set the families apart. A run needs one: names of weights follow from it."""

from __future__ import annotations

from slime_like.config.model import ModelConfig


def family_of(model: ModelConfig) -> str | None:
    """llama, qwen2, qwen3, qwen3_moe, glm4, glm4_moe or deepseek_v3 (Moonlight and Kimi-K2 too); None if no family is built this way."""
    found = _with_latent_attention(model) if model.multi_latent_attention else _with_experts(model) if model.num_experts else _dense(model)
    if found != "glm4" and (model.post_self_attn_layernorm or model.post_mlp_layernorm or model.rotary_interleaved):
        return None
    if found not in ("glm4", "glm4_moe") and model.rotary_percent != 1.0:
        return None
    return found


def _dense(model: ModelConfig) -> str | None:
    if model.post_self_attn_layernorm and model.post_mlp_layernorm and model.rotary_interleaved:
        return None if model.qk_layernorm else "glm4"
    if model.qk_layernorm:
        return None if model.add_qkv_bias else "qwen3"
    return "qwen2" if model.add_qkv_bias else "llama"


def _with_experts(model: ModelConfig) -> str | None:
    """The softmax router of Qwen3-MoE, or DeepSeek-V3's: sigmoid with a bias for choosing."""
    if model.moe_shared_expert_gate:
        return None
    if _has_deepseek_router(model):
        return "glm4_moe"
    others = (model.moe_shared_expert_intermediate_size, model.moe_router_enable_expert_bias, model.moe_router_num_groups, model.moe_router_group_topk)
    plain = model.qk_layernorm and not model.add_qkv_bias and model.moe_router_score_function == "softmax" and all(model.expert_layers)
    return "qwen3_moe" if plain and not any(others) and model.moe_router_topk_scaling_factor in (None, 1.0) else None


def _with_latent_attention(model: ModelConfig) -> str | None:
    known = model.num_experts and _has_deepseek_router(model) and model.qk_layernorm and not model.add_qkv_bias and not model.moe_shared_expert_gate
    return "deepseek_v3" if known else None


def _has_deepseek_router(model: ModelConfig) -> bool:
    return model.moe_router_score_function == "sigmoid" and model.moe_router_enable_expert_bias
