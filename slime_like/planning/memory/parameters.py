"""Every parameter of one trainer rank, by name and shape, without building the model.

Names, shapes and order are those of megatron-core 0.16.1's GPTModel; tests/multiprocess/test_plan_memory.py compares
them with real models. Only sizes are needed, so whatever changes no shape (rope, epsilons, dropout) is not looked at.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

from slime_like.config.model import ModelConfig
from slime_like.config.parallel import ParallelConfig


class Parameter(NamedTuple):
    """One tensor of one rank."""

    name: str
    shape: tuple[int, ...]
    expert: bool = False  # reduced over the expert data parallel group
    shared_embedding: bool = False  # also on another pipeline stage, so it has a bucket of its own

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """What changes shapes beside the flags.

    value_head: a critic or reward model: one number a token instead of a vocabulary.
    """

    value_head: bool = False


def stage_chunks(
    model: ModelConfig, parallel: ParallelConfig, stage: int, variant: Variant = Variant()
) -> list[list[Parameter]]:
    """Every trained tensor of one rank of pipeline stage `stage`, in the model's order, for each chunk of layers (one,
    unless interleaved).

    All ranks of a stage hold the same shapes. Layers are numbered within their chunk.
    """
    stages, ranges = parallel.pipeline_model_parallel_size, parallel.chunks_of_stage(model.num_layers, stage)
    rank = _Rank(model, parallel)
    tied = not model.untie_embeddings_and_output_weights and not variant.value_head
    chunks = [
        [
            parameter
            for number, layer in enumerate(layers)
            for parameter in rank.layer(f"decoder.layers.{number}.", has_experts=rank.expert_layers[layer])
        ]
        for layers in ranges
    ]
    if stage == 0:
        chunks[0].insert(
            0, Parameter("embedding.word_embeddings.weight", rank.embedding_shape, shared_embedding=tied and stages > 1)
        )
    if stage == stages - 1:
        chunks[-1].append(Parameter("decoder.final_layernorm.weight", (model.hidden_size,)))
        if variant.value_head:
            chunks[-1].append(Parameter("output_layer.weight", (1, model.hidden_size)))
        elif not tied or stages > 1:
            chunks[-1].append(Parameter("output_layer.weight", rank.embedding_shape, shared_embedding=tied))
    return chunks


def stage_parameters(
    model: ModelConfig, parallel: ParallelConfig, stage: int, variant: Variant = Variant()
) -> list[Parameter]:
    """The tensors of all chunks of a stage."""
    return [parameter for chunk in stage_chunks(model, parallel, stage, variant) for parameter in chunk]


def stage_buffer_bytes(model: ModelConfig, parallel: ParallelConfig, stage: int, *, weight_bytes: int) -> int:
    """Bytes that a rank holds beside parameters: per router the fp32 expert bias, and the tokens per expert in the
    weights' type.
    """
    if not model.num_experts or not model.moe_router_enable_expert_bias:
        return 0
    layers = [layer for chunk in parallel.chunks_of_stage(model.num_layers, stage) for layer in chunk]
    return sum(model.expert_layers[layer] for layer in layers) * (4 + weight_bytes) * model.num_experts


@functools.lru_cache(maxsize=8)
def model_parameters(model: ModelConfig) -> int:
    """Parameters of the whole model, unpadded and undivided, a tied embedding once: the number a model is known by."""
    whole = dataclasses.replace(model, make_vocab_size_divisible_by=1)
    return sum(p.numel for p in stage_parameters(whole, ParallelConfig(), 0))


class _Rank:
    """The shapes on one rank; `tp` divides attention and dense MLP, `etp` and `ep` the experts."""

    def __init__(self, model: ModelConfig, parallel: ParallelConfig):
        self.model = model
        self.tp = parallel.tensor_model_parallel_size
        self.etp = parallel.expert_tp_size if model.num_experts else 1
        self.ep = parallel.expert_model_parallel_size
        self.embedding_shape = (model.padded_vocab_size(self.tp) // self.tp, model.hidden_size)
        self.expert_layers = model.expert_layers

    def layer(self, prefix: str, *, has_experts: bool) -> Iterator[Parameter]:
        """One decoder layer."""
        model, hidden = self.model, self.model.hidden_size
        yield Parameter(prefix + "input_layernorm.weight", (hidden,))
        yield from (
            self._latent_attention(prefix + "self_attention.")
            if model.multi_latent_attention
            else self._attention(prefix + "self_attention.")
        )
        yield Parameter(prefix + "pre_mlp_layernorm.weight", (hidden,))
        if has_experts:
            yield from self._experts(prefix + "mlp.")
        else:
            yield from self._mlp(prefix + "mlp.", model.mlp_size, self.tp)
        if model.post_self_attn_layernorm:
            yield Parameter(prefix + "post_self_attn_layernorm.weight", (hidden,))
        if model.post_mlp_layernorm:
            yield Parameter(prefix + "post_mlp_layernorm.weight", (hidden,))

    def _attention(self, prefix: str) -> Iterator[Parameter]:
        model = self.model
        queries = model.num_attention_heads * model.head_size
        heads = queries + 2 * model.num_kv_heads * model.head_size
        yield Parameter(prefix + "linear_proj.weight", (model.hidden_size, queries // self.tp))
        if not model.disable_bias_linear:
            yield Parameter(prefix + "linear_proj.bias", (model.hidden_size,))
        yield Parameter(prefix + "linear_qkv.weight", (heads // self.tp, model.hidden_size))
        if model.add_qkv_bias or not model.disable_bias_linear:
            yield Parameter(prefix + "linear_qkv.bias", (heads // self.tp,))
        if model.qk_layernorm:
            yield Parameter(prefix + "q_layernorm.weight", (model.head_size,))
            yield Parameter(prefix + "k_layernorm.weight", (model.head_size,))

    def _latent_attention(self, prefix: str) -> Iterator[Parameter]:
        model = self.model
        heads, head = model.num_attention_heads, model.qk_head_dim + model.qk_pos_emb_head_dim
        yield Parameter(prefix + "linear_proj.weight", (model.hidden_size, heads * model.v_head_dim // self.tp))
        if model.q_lora_rank is None:
            yield Parameter(prefix + "linear_q_proj.weight", (heads * head // self.tp, model.hidden_size))
        else:
            yield Parameter(prefix + "linear_q_down_proj.weight", (model.q_lora_rank, model.hidden_size))
            yield Parameter(prefix + "linear_q_up_proj.weight", (heads * head // self.tp, model.q_lora_rank))
        yield Parameter(
            prefix + "linear_kv_down_proj.weight", (model.kv_lora_rank + model.qk_pos_emb_head_dim, model.hidden_size)
        )
        yield Parameter(
            prefix + "linear_kv_up_proj.weight",
            (heads * (model.qk_head_dim + model.v_head_dim) // self.tp, model.kv_lora_rank),
        )
        if model.qk_layernorm:
            if model.q_lora_rank is not None:
                yield Parameter(prefix + "q_layernorm.weight", (model.q_lora_rank,))
            yield Parameter(prefix + "kv_layernorm.weight", (model.kv_lora_rank,))

    def _mlp(self, prefix: str, size: int, split: int, *, expert: bool = False) -> Iterator[Parameter]:
        model, width = self.model, size * (2 if self.model.swiglu else 1)
        yield Parameter(prefix + "linear_fc1.weight", (width // split, model.hidden_size), expert)
        if not model.disable_bias_linear:
            yield Parameter(prefix + "linear_fc1.bias", (width // split,), expert)
        yield Parameter(prefix + "linear_fc2.weight", (model.hidden_size, size // split), expert)
        if not model.disable_bias_linear:
            yield Parameter(prefix + "linear_fc2.bias", (model.hidden_size,), expert)

    def _experts(self, prefix: str) -> Iterator[Parameter]:
        model = self.model
        yield Parameter(prefix + "router.weight", (model.num_experts, model.hidden_size))
        # Without expert parallelism megatron reduces experts together with everything else.
        apart = self.ep > 1
        for number in range(model.num_experts // self.ep):
            yield from self._mlp(
                f"{prefix}experts.local_experts.{number}.",
                model.moe_ffn_hidden_size or model.mlp_size,
                self.etp,
                expert=apart,
            )
        if model.moe_shared_expert_intermediate_size:
            if model.moe_shared_expert_gate:
                yield Parameter(prefix + "shared_experts.gate_weight", (1, model.hidden_size))
            yield from self._mlp(prefix + "shared_experts.", model.moe_shared_expert_intermediate_size, self.tp)
