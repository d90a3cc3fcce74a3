"""Attention of sequences in a batch (sbhd) or end to end in a row (thd), on one context parallel rank."""

from __future__ import annotations

import torch
import torch.nn.functional as functional


class DotProductAttention(torch.nn.Module):
    """Causal attention."""

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        *,
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        softmax_scale: float | None = None,
        cp_group=None,
        cp_comm_type: str = "p2p",
        tp_size: int = 1,
        **_,
    ):
        super().__init__()
        assert cp_group is None, "attention over context parallel ranks is not pretended"
        assert attention_dropout == 0, "no dropout is pretended"
        size = kv_channels[0] if isinstance(kv_channels, tuple) else kv_channels
        self.softmax_scale = softmax_scale if softmax_scale is not None else size**-0.5

    def forward(
        self,
        query_layer: torch.Tensor,
        key_layer: torch.Tensor,
        value_layer: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        qkv_format: str = "sbhd",
        cu_seqlens_q: torch.Tensor | None = None,
        attn_mask_type: str,
        **_,
    ) -> torch.Tensor:
        """[s, b, heads, d] -> [s, b, heads x d], or [t, heads, d] -> [t, heads x d]."""
        wanted = "padding_causal" if qkv_format == "thd" else "causal"
        assert attn_mask_type == wanted, f"{qkv_format} with {attn_mask_type} is not pretended"
        if qkv_format == "sbhd":
            rows = [x.permute(1, 2, 0, 3) for x in (query_layer, key_layer, value_layer)]
            return self._attend(*rows).permute(2, 0, 1, 3).flatten(2)
        assert qkv_format == "thd" and cu_seqlens_q is not None and query_layer.dim() == 3, qkv_format
        sizes = cu_seqlens_q.diff().tolist()
        parts = [x.split(sizes) for x in (query_layer, key_layer, value_layer)]
        rows = [
            self._attend(*(x.transpose(0, 1)[None] for x in one))[0].transpose(0, 1) for one in zip(*parts, strict=True)
        ]
        return torch.cat(rows).flatten(1)

    def _attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """[b, heads, s, d]."""
        return functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.softmax_scale, enable_gqa=True
        )
