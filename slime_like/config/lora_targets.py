"""The matrices of a layer that can have adapters, by Megatron's names and by HF's: for trainer and plan alike."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from slime_like.config.model import ModelConfig

#: How tensor parallel ranks share a matrix: its rows, its columns, or each has all of it.
COLUMN, ROW, WHOLE = "column", "row", "whole"

_ATTENTION, _MLP = "self_attention.", "mlp."
#: An expert by its number in HF's names, and by its place on a rank in Megatron's.
_AMONG_ALL, _HERE = "experts.{}.", "experts.local_experts.{}."
_EXPERT, _LOCAL_EXPERT = re.compile(r"\.experts\.(\d+)\."), re.compile(r"local_experts\.\d+\.")


@dataclasses.dataclass(frozen=True)
class TargetMatrix:
    """One Megatron matrix of a layer, and the HF modules whose rows make it up, each with an adapter of its own.

    Example: TargetMatrix("self_attention.linear_qkv", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    COLUMN)
    """

    name: str  # within the layer
    modules: tuple[str, ...]  # HF's, within the layer
    split: str
    is_expert: bool = False  # one of several experts, of which each rank may hold some

    @property
    def row_name(self) -> str:
        """The name as the families' tables have it (megatron_backend/hf/tables), without the layer's."""
        return _LOCAL_EXPERT.sub("local_experts.{expert}.", self.name)


def layer_targets(
    model: ModelConfig, *, has_experts: bool, experts: Sequence[int] | None = None
) -> tuple[TargetMatrix, ...]:
    """Of a layer with or without experts, in the order of Megatron's parameters. experts: the numbers of those that a
    rank holds; None: all.

    Routers are left out: HF keeps them as parameters, not as linear layers.
    """
    attention = _latent_attention(model) if model.multi_latent_attention else _attention()
    if not has_experts:
        return (*attention, *_mlp(_MLP, joined=model.post_mlp_layernorm))
    shared = _mlp(_MLP + "shared_experts.") if model.moe_shared_expert_intermediate_size else ()
    numbers = range(model.num_experts) if experts is None else experts
    of_experts = (
        dataclasses.replace(
            matrix, name=matrix.name.replace(_AMONG_ALL.format(number), _HERE.format(place)), is_expert=True
        )
        for place, number in enumerate(numbers)
        for matrix in _mlp(_MLP + _AMONG_ALL.format(number))
    )
    return (*attention, *of_experts, *shared)


def target_modules(model: ModelConfig) -> tuple[str, ...]:
    """Whole HF names of every module that can have an adapter."""
    in_layers = (
        f"model.layers.{layer}.{module}"
        for layer, has_experts in enumerate(model.expert_layers)
        for matrix in layer_targets(model, has_experts=has_experts)
        for module in matrix.modules
    )
    # A tied one is the embedding, too, where an adapter would mean something else.
    output = OUTPUT.modules if model.untie_embeddings_and_output_weights else ()
    return (*in_layers, *output)


#: The output layer (an SDK's train_unembed), beside the layers: split by the vocabulary, which Megatron pads.
OUTPUT = TargetMatrix("output_layer", ("lm_head",), COLUMN)


def expert_of(module: str) -> int | None:
    """The number of the expert that an HF module belongs to; None: it is no expert's."""
    match = _EXPERT.search(module)
    return int(match[1]) if match else None


def of_expert(module: str, number: int) -> str:
    """The name of the same module of another expert."""
    return _EXPERT.sub(f".experts.{number}.", module)


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
