"""Llama: the layout that the other families extend."""

from slime_like.megatron_backend.hf.tables.row import GATE_UP, QKV, WeightRow

_MEGATRON, _HF = "decoder.layers.{layer}.", "model.layers.{layer}."

TABLE = (
    WeightRow("embedding.word_embeddings.weight", ("model.embed_tokens.weight",)),
    WeightRow(
        _MEGATRON + "input_layernorm.weight",
        (_HF + "input_layernorm.weight",),
        transformer_engine=_MEGATRON + "self_attention.linear_qkv.layer_norm_weight",
    ),
    WeightRow(
        _MEGATRON + "self_attention.linear_qkv.weight", tuple(_HF + f"self_attn.{x}_proj.weight" for x in "qkv"), QKV
    ),
    WeightRow(_MEGATRON + "self_attention.linear_proj.weight", (_HF + "self_attn.o_proj.weight",)),
    WeightRow(
        _MEGATRON + "pre_mlp_layernorm.weight",
        (_HF + "post_attention_layernorm.weight",),
        transformer_engine=_MEGATRON + "mlp.linear_fc1.layer_norm_weight",
    ),
    WeightRow(_MEGATRON + "mlp.linear_fc1.weight", (_HF + "mlp.gate_proj.weight", _HF + "mlp.up_proj.weight"), GATE_UP),
    WeightRow(_MEGATRON + "mlp.linear_fc2.weight", (_HF + "mlp.down_proj.weight",)),
    WeightRow("decoder.final_layernorm.weight", ("model.norm.weight",)),
    WeightRow("output_layer.weight", ("lm_head.weight",)),
)
