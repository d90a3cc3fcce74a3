"""GLM-4 (0414): Llama with further norms behind attention and MLP, and gate and up as one tensor.

query/key/value bias in most sizes.
"""

from slime_like.megatron_backend.hf.tables import qwen2
from slime_like.megatron_backend.hf.tables.row import GATE_UP_JOINED, WeightRow

_MEGATRON, _HF = "decoder.layers.{layer}.", "model.layers.{layer}."

TABLE = (
    *(row for row in qwen2.TABLE if row.megatron != _MEGATRON + "mlp.linear_fc1.weight"),
    WeightRow(_MEGATRON + "mlp.linear_fc1.weight", (_HF + "mlp.gate_up_proj.weight",), GATE_UP_JOINED),
    WeightRow(_MEGATRON + "post_self_attn_layernorm.weight", (_HF + "post_self_attn_layernorm.weight",)),
    WeightRow(_MEGATRON + "post_mlp_layernorm.weight", (_HF + "post_mlp_layernorm.weight",)),
)
