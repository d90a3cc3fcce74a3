"""GLM-4 (0414): Llama with further norms behind attention and MLP, and gate and up as one tensor.

query/key/value bias in most sizes.
"""

from slime_like.megatron_backend.hf.tables import qwen2
from slime_like.megatron_backend.hf.tables.entry import GATE_UP_JOINED, Entry

_MEGATRON, _HF = "decoder.layers.{layer}.", "model.layers.{layer}."

TABLE = (
    *(entry for entry in qwen2.TABLE if entry.megatron != _MEGATRON + "mlp.linear_fc1.weight"),
    Entry(_MEGATRON + "mlp.linear_fc1.weight", (_HF + "mlp.gate_up_proj.weight",), GATE_UP_JOINED),
    Entry(_MEGATRON + "post_self_attn_layernorm.weight", (_HF + "post_self_attn_layernorm.weight",)),
    Entry(_MEGATRON + "post_mlp_layernorm.weight", (_HF + "post_mlp_layernorm.weight",)),
)
