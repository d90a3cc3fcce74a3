"""Qwen2: Llama with a bias on query, key and value."""

from slime_like.megatron_backend.hf.tables import llama
from slime_like.megatron_backend.hf.tables.row import QKV, WeightRow

TABLE = (
    *llama.TABLE,
    WeightRow(
        "decoder.layers.{layer}.self_attention.linear_qkv.bias",
        tuple(f"model.layers.{{layer}}.self_attn.{x}_proj.bias" for x in "qkv"),
        QKV,
    ),
)
