"""Layer parts: transformer-engine's where it is usable, otherwise ours on plain torch, with the same parameter names in checkpoints."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as functional
from megatron.core import parallel_state
from megatron.core.models.backends import LocalSpecProvider
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from slime_like.megatron_backend import compat
from slime_like.megatron_backend.context_parallel import ContextShare


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

    Same constructor and forward as megatron's DotProductAttention. No dropout. Context parallel ranks (packed input only) gather all
    keys and values and attend from their own tokens.
    """

    def __init__(self, config, layer_number, attn_mask_type, attention_type, attention_dropout=None, softmax_scale=None, **_):
        super().__init__(config=config)
        assert attn_mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal), f"only causal attention, not {attn_mask_type}"
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5

    def forward(self, query, key, value, attention_mask=None, attn_mask_type=None, attention_bias=None, packed_seq_params=None, **_):
        """query [t, heads, d] (thd) or [s, b, heads, d] -> the same with heads and d joined."""
        assert attention_bias is None, "attention bias is not supported"
        if parallel_state.get_context_parallel_world_size() > 1:
            assert packed_seq_params is not None, "context parallelism takes packed input only"
            return self._attend_over_ranks(query, key, value, packed_seq_params.cu_seqlens_q)
        if packed_seq_params is None:
            return self._attend(query, key, value).flatten(2)
        boundaries = packed_seq_params.cu_seqlens_q.tolist()
        assert boundaries[-1] == query.size(0), f"the sequences of a pack end at {boundaries[-1]}, its tokens at {query.size(0)}"
        query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        parts = [self._attend(query[a:b], key[a:b], value[a:b]) for a, b in zip(boundaries, boundaries[1:], strict=False)]
        return torch.cat(parts).flatten(1)

    def _attend_over_ranks(self, query, key, value, boundaries):
        """[t, heads, d] of this rank's tokens -> [t, heads x d]. boundaries: [sequences + 1], of the whole pack."""
        group, share = parallel_state.get_context_parallel_group(), ContextShare.of_this_rank()
        segments = boundaries.diff().tolist()
        assert sum(segments) == share.size * query.size(0), f"a pack of {sum(segments)} tokens on {share.size} ranks, {query.size(0)} of them here"
        parts = [torch.as_tensor(dataclasses.replace(share, rank=rank).local(segments), device=query.device) for rank in range(share.size)]
        # In backward each rank receives the gradients of its keys and values from the tokens of all ranks.
        gathered = gather_from_sequence_parallel_region(torch.cat([key, value], -1), tensor_parallel_output_grad=True, group=group)
        keys, values = gathered[torch.cat(parts).argsort()].unsqueeze(1).split([key.size(-1), value.size(-1)], -1)
        found, start, first = [], 0, 0
        for length in segments:
            here = slice(start, start + length // share.size)
            positions = parts[share.rank][here] - first
            visible = positions[:, None] >= torch.arange(length, device=query.device)
            end = first + length
            found.append(self._attend(query[here].unsqueeze(1), keys[first:end], values[first:end], visible))
            start, first = here.stop, end
        return torch.cat(found).flatten(1)

    def _attend(self, query, key, value, visible=None):
        """[s, b, heads, d] each (fewer key/value heads with grouped queries) -> [s, b, heads, d]. visible: [s, keys] bool; by default causal."""
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if key.size(1) != query.size(1):
            key, value = (x.repeat_interleave(query.size(1) // x.size(1), 1) for x in (key, value))
        attended = functional.scaled_dot_product_attention(query, key, value, attn_mask=visible, is_causal=visible is None, scale=self.scale)
        return attended.permute(2, 0, 1, 3)
