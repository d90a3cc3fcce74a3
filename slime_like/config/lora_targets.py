"""The matrices of a layer that can have adapters, by Megatron's names and by HF's: for trainer and plan alike."""

from __future__ import annotations

import dataclasses

from slime_like.config.model import ModelConfig

#: How tensor parallel ranks share a matrix: its rows, its columns, or each has all of it.
COLUMN, ROW, WHOLE = "column", "row", "whole"

_ATTENTION, _MLP = "self_attention.", "mlp."


@dataclasses.dataclass(frozen=True)
class TargetMatrix:
    """One Megatron matrix of a layer, and the HF modules whose rows make it up, each with an adapter of its own.

    Example: TargetMatrix("self_attention.linear_qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    COLUMN)
    """

    name: str  # within the layer
    modules: tuple[str, ...]  # HF's, within the layer
    split: str


def layer_targets(model: ModelConfig, *, has_experts: bool) -> tuple[TargetMatrix, ...]:
    """Of a layer with or without experts, in the order of Megatron's parameters.

    Experts and routers are left out: HF keeps them as parameters of another shape, not as linear layers.
    """
    attention = _latent_attention(model) if model.multi_latent_attention else _attention()
    if not has_experts:
        return (*attention, *_mlp(_MLP, joined=model.post_mlp_layernorm))
    shared = _mlp(_MLP + "shared_experts.") if model.moe_shared_expert_intermediate_size else ()
    return (*attention, *shared)


def target_modules(model: ModelConfig) -> tuple[str, ...]:
    """Whole HF names of every module that can have an adapter."""
    return tuple(
        f"model.layers.{layer}.{module}"
        for layer, has_experts in enumerate(model.expert_layers)
        for matrix in layer_targets(model, has_experts=has_experts)
        for module in matrix.modules
    )


def expert_modules(model: ModelConfig) -> tuple[str, ...]:
    """Whole HF names of the first expert's modules in each layer with experts, which stand for all of them."""
    return tuple(
        f"model.layers.{layer}.mlp.experts.0.{name}"
        for layer, has_experts in enumerate(model.expert_layers)
        if has_experts
        for name in ("gate_proj", "up_proj", "down_proj")
    )


def _attention() -> tuple[TargetMatrix, ...]:
    return (
        TargetMatrix(_ATTENTION + "linear_proj", ("self_attn.o_proj",), ROW),
        TargetMatrix(_ATTENTION + "linear_qkv", tuple(f"self_attn.{x}_proj" for x in "qkv"), COLUMN),
    )


def _latent_attention(model: ModelConfig) -> tuple[TargetMatrix, ...]:
    queries: tuple[TargetMatrix, ...] = (TargetMatrix(_ATTENTION + "linear_q_proj", ("self_attn.q_proj",), COLUMN),)
    if model.q_lora_rank is not None:
        queries = (
            TargetMatrix(_ATTENTION + "linear_q_down_proj", ("self_attn.q_a_proj",), WHOLE),
            TargetMatrix(_ATTENTION + "linear_q_up_proj", ("self_attn.q_b_proj",), COLUMN),
        )
    return (
        TargetMatrix(_ATTENTION + "linear_proj", ("self_attn.o_proj",), ROW),
        *queries,
        TargetMatrix(_ATTENTION + "linear_kv_down_proj", ("self_attn.kv_a_proj_with_mqa",), WHOLE),
        TargetMatrix(_ATTENTION + "linear_kv_up_proj", ("self_attn.kv_b_proj",), COLUMN),
    )


def _mlp(prefix: str, *, joined: bool = False) -> tuple[TargetMatrix, ...]:
    """joined: HF has gate and up as one module too (GLM-4)."""
    first = ("gate_up_proj",) if joined else ("gate_proj", "up_proj")
    return (
        TargetMatrix(prefix + "linear_fc1", tuple(prefix + name for name in first), COLUMN),
        TargetMatrix(prefix + "linear_fc2", (prefix + "down_proj",), ROW),
    )
