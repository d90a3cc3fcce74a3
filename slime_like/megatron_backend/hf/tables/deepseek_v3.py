"""DeepSeek-V3, Moonlight, Kimi-K2: multi-head latent attention, dense layers first, then experts with shared ones and a
bias for choosing.

Both sides lay out heads alike, and both rotate neighbouring channels, so no tensor is permuted.
"""

from slime_like.megatron_backend.hf.tables import llama, qwen3_moe
from slime_like.megatron_backend.hf.tables.row import GATE_UP, WeightRow

_MEGATRON, _HF = "decoder.layers.{layer}.mlp.", "model.layers.{layer}.mlp."
_ATTENTION, _HF_ATTENTION = "decoder.layers.{layer}.self_attention.", "model.layers.{layer}.self_attn."
_SHARED, _HF_SHARED = _MEGATRON + "shared_experts.", _HF + "shared_experts."

EXPERTS = (
    *qwen3_moe.EXPERTS,
    WeightRow(_MEGATRON + "router.expert_bias", (_HF + "gate.e_score_correction_bias",)),  # a buffer
    WeightRow(_SHARED + "linear_fc1.weight", (_HF_SHARED + "gate_proj.weight", _HF_SHARED + "up_proj.weight"), GATE_UP),
    WeightRow(_SHARED + "linear_fc2.weight", (_HF_SHARED + "down_proj.weight",)),
)
LATENT_ATTENTION = (
    # Transformer-engine does not fuse this norm: two matrices follow it.
    WeightRow("decoder.layers.{layer}.input_layernorm.weight", ("model.layers.{layer}.input_layernorm.weight",)),
    WeightRow(_ATTENTION + "linear_q_proj.weight", (_HF_ATTENTION + "q_proj.weight",)),
    WeightRow(_ATTENTION + "linear_q_down_proj.weight", (_HF_ATTENTION + "q_a_proj.weight",), duplicated=True),
    WeightRow(
        _ATTENTION + "q_layernorm.weight",
        (_HF_ATTENTION + "q_a_layernorm.weight",),
        transformer_engine=_ATTENTION + "linear_q_up_proj.layer_norm_weight",
    ),
    WeightRow(_ATTENTION + "linear_q_up_proj.weight", (_HF_ATTENTION + "q_b_proj.weight",)),
    WeightRow(
        _ATTENTION + "linear_kv_down_proj.weight", (_HF_ATTENTION + "kv_a_proj_with_mqa.weight",), duplicated=True
    ),
    WeightRow(
        _ATTENTION + "kv_layernorm.weight",
        (_HF_ATTENTION + "kv_a_layernorm.weight",),
        transformer_engine=_ATTENTION + "linear_kv_up_proj.layer_norm_weight",
    ),
    WeightRow(_ATTENTION + "linear_kv_up_proj.weight", (_HF_ATTENTION + "kv_b_proj.weight",)),
)
_REPLACED = ("decoder.layers.{layer}.input_layernorm.weight", _ATTENTION + "linear_qkv.weight")

TABLE = (*(row for row in llama.TABLE if row.megatron not in _REPLACED), *LATENT_ATTENTION, *EXPERTS)
