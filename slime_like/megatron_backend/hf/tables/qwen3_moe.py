"""Qwen3-MoE: Qwen3 with a router and experts in the place of each MLP.

The names are those of public checkpoints, one tensor an expert and matrix.
"""

from slime_like.megatron_backend.hf.tables import qwen3
from slime_like.megatron_backend.hf.tables.row import GATE_UP, WeightRow

_MEGATRON, _HF = "decoder.layers.{layer}.mlp.", "model.layers.{layer}.mlp."
_EXPERT = _HF + "experts.{expert}."

EXPERTS = (
    WeightRow(_MEGATRON + "router.weight", (_HF + "gate.weight",)),
    WeightRow(
        _MEGATRON + "experts.local_experts.{expert}.linear_fc1.weight",
        (_EXPERT + "gate_proj.weight", _EXPERT + "up_proj.weight"),
        GATE_UP,
        transformer_engine=_MEGATRON + "experts.linear_fc1.weight{expert}",
    ),
    WeightRow(
        _MEGATRON + "experts.local_experts.{expert}.linear_fc2.weight",
        (_EXPERT + "down_proj.weight",),
        transformer_engine=_MEGATRON + "experts.linear_fc2.weight{expert}",
    ),
)
TABLE = (*(row for row in qwen3.TABLE if not row.megatron.startswith(_MEGATRON)), *EXPERTS)
