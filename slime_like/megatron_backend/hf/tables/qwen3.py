"""Qwen3: Llama with a norm on each query and key head."""

from slime_like.megatron_backend.hf.tables import llama
from slime_like.megatron_backend.hf.tables.row import WeightRow

TABLE = (
    *llama.TABLE,
    WeightRow(
        "decoder.layers.{layer}.self_attention.q_layernorm.weight", ("model.layers.{layer}.self_attn.q_norm.weight",)
    ),
    WeightRow(
        "decoder.layers.{layer}.self_attention.k_layernorm.weight", ("model.layers.{layer}.self_attn.k_norm.weight",)
    ),
)
