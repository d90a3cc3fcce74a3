"""Names and layouts of each model family: one table a family, used for loading and for exporting."""

from __future__ import annotations

from slime_like.config.model import ModelConfig
from slime_like.errors import CheckpointError
from slime_like.megatron_backend.hf_tables import llama, qwen2, qwen3, qwen3_moe
from slime_like.megatron_backend.hf_tables.entry import Entry

TABLES: dict[str, tuple[Entry, ...]] = {"llama": llama.TABLE, "qwen2": qwen2.TABLE, "qwen3": qwen3.TABLE, "qwen3_moe": qwen3_moe.TABLE}


def table_for(model: ModelConfig) -> tuple[Entry, ...]:
    """The family's table, recognised by what sets the families apart: query/key norms (Qwen3), query/key/value bias (Qwen2), experts."""
    if model.num_experts:
        if not model.is_qwen3_moe:
            raise CheckpointError("the only known family with experts is qwen3_moe: softmax router, experts in every layer, no shared ones, --qk-layernorm.")
        return TABLES["qwen3_moe"]
    if model.qk_layernorm and model.add_qkv_bias:
        raise CheckpointError("a model with both --qk-layernorm and --add-qkv-bias belongs to no known family: llama, qwen2, qwen3.")
    return TABLES["qwen3" if model.qk_layernorm else "qwen2" if model.add_qkv_bias else "llama"]
