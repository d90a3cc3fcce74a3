"""Llama: the layout that the other families extend."""

from slime_like.megatron_backend.hf.tables.entry import GATE_UP, QKV, Entry

_MEGATRON, _HF = "decoder.layers.{layer}.", "model.layers.{layer}."

TABLE = (
    Entry("embedding.word_embeddings.weight", ("model.embed_tokens.weight",)),
    Entry(
        _MEGATRON + "input_layernorm.weight",
        (_HF + "input_layernorm.weight",),
        transformer_engine=_MEGATRON + "self_attention.linear_qkv.layer_norm_weight",
    ),
    Entry(
        _MEGATRON + "self_attention.linear_qkv.weight", tuple(_HF + f"self_attn.{x}_proj.weight" for x in "qkv"), QKV
    ),
    Entry(_MEGATRON + "self_attention.linear_proj.weight", (_HF + "self_attn.o_proj.weight",)),
    Entry(
        _MEGATRON + "pre_mlp_layernorm.weight",
        (_HF + "post_attention_layernorm.weight",),
        transformer_engine=_MEGATRON + "mlp.linear_fc1.layer_norm_weight",
    ),
    Entry(_MEGATRON + "mlp.linear_fc1.weight", (_HF + "mlp.gate_proj.weight", _HF + "mlp.up_proj.weight"), GATE_UP),
    Entry(_MEGATRON + "mlp.linear_fc2.weight", (_HF + "mlp.down_proj.weight",)),
    Entry("decoder.final_layernorm.weight", ("model.norm.weight",)),
    Entry("output_layer.weight", ("lm_head.weight",)),
)
