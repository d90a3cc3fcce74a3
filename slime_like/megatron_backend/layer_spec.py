"""Layer parts: transformer-engine's where it is usable, otherwise ours on plain torch, with the same parameter names in checkpoints."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from slime_like.megatron_backend import compat


def block_spec(config: TransformerConfig) -> TransformerBlockSubmodules:
    """The decoder layers of this pipeline stage."""
    if compat.has_transformer_engine():
        return gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=True, normalization=config.normalization)
    # get_gpt_decoder_block_spec (0.16.1) takes no provider, so ours stands in while it runs. Goes when it takes one.
    stock = gpt_layer_specs.LocalSpecProvider, gpt_layer_specs.LNImpl
    gpt_layer_specs.LocalSpecProvider, gpt_layer_specs.LNImpl = TorchSpecProvider, Norm
    try:
        return gpt_layer_specs.get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization=config.normalization)
    finally:
        gpt_layer_specs.LocalSpecProvider, gpt_layer_specs.LNImpl = stock


class Norm:
    """torch.nn.RMSNorm that tells megatron to sum its gradients over sequence parallel ranks (megatron's own refuses them)."""

    def __new__(cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_):
        norm = torch.nn.RMSNorm(hidden_size, eps=eps, dtype=config.params_dtype)
        if torch.cuda.is_available():
            norm = norm.cuda()
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm


class TorchSpecProvider(LocalSpecProvider):
    """Megatron's local parts with our norm and attention."""

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False):
        return Norm

    def core_attention(self):
        return CausalAttention


class CausalAttention(MegatronModule):
    """Causal attention on torch's SDPA, for packed (thd) and batched (sbhd) input; megatron's own takes no packed input.

    Same constructor and forward as megatron's DotProductAttention. No dropout, no context parallelism.
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type, attention_dropout=None, softmax_scale=None, **_):
        super().__init__(config=config)
        assert attn_mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal), f"only causal attention, not {attn_mask_type}"
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5

    def forward(self, query, key, value, attention_mask=None, attn_mask_type=None, attention_bias=None, packed_seq_params=None, **_):
        """query [t, heads, d] (thd) or [s, b, heads, d] -> the same with heads and d joined."""
        assert attention_bias is None, "attention bias is not supported"
        if packed_seq_params is None:
            return self._attend(query, key, value).flatten(2)
        boundaries = packed_seq_params.cu_seqlens_q.tolist()
        assert boundaries[-1] == query.size(0), f"the sequences of a pack end at {boundaries[-1]}, its tokens at {query.size(0)}"
        query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        parts = [self._attend(query[a:b], key[a:b], value[a:b]) for a, b in zip(boundaries, boundaries[1:], strict=False)]
        return torch.cat(parts).flatten(1)

    def _attend(self, query, key, value):
        """[s, b, heads, d] each (fewer key/value heads with grouped queries) -> [s, b, heads, d]."""
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if key.size(1) != query.size(1):
            key, value = (x.repeat_interleave(query.size(1) // x.size(1), 1) for x in (key, value))
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale).permute(2, 0, 1, 3)
