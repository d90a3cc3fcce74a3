"""Causal attention without transformer-engine, which Megatron's own does not offer for packed input."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as functional
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule

from slime_like.megatron_backend.model.packed import PackedSequences, SeenPiece, Spans, known_on_host, packed_sequences
from slime_like.megatron_backend.step.context_parallel import ContextShare

#: What FlashAttention's kernel takes.
_KERNEL_TYPES = (torch.bfloat16, torch.float16)
_KERNEL_CAPABILITY = (8, 0)
_MOST_HEAD_SIZE = 256
_HEAD_SIZE_UNIT = 8


class CausalAttention(MegatronModule):
    """Causal attention for a row of packed sequences and for batched (sbhd) input.

    Same constructor and forward as Megatron's DotProductAttention. No dropout. Context parallel ranks gather all keys
    and values and attend from their own tokens. On a GPU, in half precision, all sequences go through one kernel;
    elsewhere through SDPA, one after the other.
    """

    def __init__(
        self, config, layer_number, attn_mask_type, attention_type, attention_dropout=None, softmax_scale=None, **_
    ):
        super().__init__(config=config)
        assert attn_mask_type in (AttnMaskType.causal, AttnMaskType.padding_causal), (
            f"only causal attention, not {attn_mask_type}"
        )
        self.scale = softmax_scale if softmax_scale is not None else config.kv_channels**-0.5

    def forward(
        self,
        query,
        key,
        value,
        attention_mask=None,
        attn_mask_type=None,
        attention_bias=None,
        packed_seq_params: PackedSeqParams | None = None,
        **_,
    ):
        """query [s, b, heads, d], of a pack also [s, heads, d] -> [s, b, heads x d]."""
        assert attention_bias is None, "attention bias is not supported"
        share = ContextShare.of_this_rank()
        if query.dim() == 3:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        if packed_seq_params is not None:
            row = known_on_host(packed_seq_params)
        elif share.size == 1:
            return self._attend(query, key, value).flatten(2)
        else:
            row = packed_sequences([query.size(0) * share.size], share, query.device)
        return self._attend_row(query, key, value, row, share).flatten(2)

    def _attend_row(self, query, key, value, row: PackedSequences, share: ContextShare):
        """[s, b, heads, d] of this rank's tokens -> the same."""
        assert row.boundaries[-1] == share.size * query.size(0), (
            f"a pack of {row.boundaries[-1]} tokens on {share.size} ranks, {query.size(0)} of them here"
        )
        spans = row.spans if query.size(1) == 1 else None
        kernel = None if spans is None else kernel_for(query, value)
        if share.size > 1:
            # In backward each rank receives the gradients of its keys and values from the tokens of all ranks.
            gathered = gather_from_sequence_parallel_region(
                torch.cat([key, value], -1),
                tensor_parallel_output_grad=True,
                group=parallel_state.get_context_parallel_group(),
            )
            index = row.order if kernel is None or spans is None else spans.index
            assert index is not None, "a row of several ranks knows its order"
            key, value = gathered[index].split([key.size(-1), value.size(-1)], -1)
        elif kernel is not None and spans is not None and spans.index is not None:
            key, value = key[spans.index], value[spans.index]
        if kernel is not None and spans is not None:
            return self._attend_spans(kernel, query, key, value, spans)
        if share.size > 1:
            return self._attend_from_here(query, key, value, row, share)
        if row.branches is not None:
            return self._attend_pieces(query, key, value, row.pieces)
        # Cut at once: of slices, each would give a gradient as long as the whole row.
        sequences = zip(*(x.split(row.lengths) for x in (query, key, value)), strict=True)
        return torch.cat([self._attend(*sequence) for sequence in sequences])

    def _attend_from_here(self, query, keys, values, row: PackedSequences, share: ContextShare):
        """This rank's tokens [s, b, heads, d] to those of all ranks, [s x ranks, b, heads, d] in their order."""
        assert row.positions is not None, "a row knows its positions"
        attended, start, first = [], 0, 0
        for length in row.lengths:
            here = slice(start, start + length // share.size)
            visible = row.positions[here, None] >= torch.arange(length, device=query.device)
            end = first + length
            attended.append(self._attend(query[here], keys[first:end], values[first:end], visible))
            start, first = here.stop, end
        return torch.cat(attended)

    def _attend_pieces(self, query, key, value, pieces: Sequence[SeenPiece]):
        """Tokens [s, b, heads, d] that each see others of their row."""
        cuts = sorted({end for piece in pieces for span in piece.seen for end in span} | {0, query.size(0)})
        number = {cut: index for index, cut in enumerate(cuts)}
        parts = [x.split([b - a for a, b in itertools.pairwise(cuts)]) for x in (key, value)]
        queries = query.split([piece.stop - piece.start for piece in pieces])
        attended = []
        for own, piece in zip(queries, pieces, strict=True):
            among = [index for a, b in piece.seen for index in range(number[a], number[b])]
            keys, values = (torch.cat([of[index] for index in among]) for of in parts)
            attended.append(self._attend(own, keys, values, piece.visible))
        return torch.cat(attended)

    def _attend(self, query, key, value, visible=None):
        """[s, b, heads, d] each (fewer key/value heads with grouped queries) -> [s, b, heads, d].

        visible: [s, keys] bool; by default causal.
        """
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        grouped = key.size(1) != query.size(1)
        if grouped and query.is_cuda:  # whose kernels for this want as many
            key, value = (x.repeat_interleave(query.size(1) // x.size(1), 1) for x in (key, value))
        attended = functional.scaled_dot_product_attention(
            query, key, value, attn_mask=visible, is_causal=visible is None, scale=self.scale,
            enable_gqa=grouped and not query.is_cuda,
        )  # fmt: skip
        return attended.permute(2, 0, 1, 3)

    def _attend_spans(self, kernel: Callable, query, key, value, spans: Spans):
        """[s, 1, heads, d] -> the same, all spans at once."""
        width, padded = value.size(-1), _kernel_width(query, value)
        query, key, value = (_widened(x.squeeze(1), padded) for x in (query, key, value))
        attended = kernel(
            query, key, value, spans.queries, spans.keys, spans.most_queries, spans.most_keys, scale=self.scale
        )
        return attended[..., :width].unsqueeze(1)


def kernel_for(query: torch.Tensor, value: torch.Tensor) -> Callable | None:
    """f(query, key, value, boundaries of the queries' and of the keys' spans, longest of each, scale=): causal
    attention of all spans at once; None where it does not run.
    """
    if not query.is_cuda or query.dtype not in _KERNEL_TYPES or _kernel_width(query, value) > _MOST_HEAD_SIZE:
        return None
    return _kernel(query.device.index)


def _kernel_width(*heads: torch.Tensor) -> int:
    """The size of a head that the kernel is given: the same for queries and values, and a multiple of 8."""
    return -(-max(x.size(-1) for x in heads) // _HEAD_SIZE_UNIT) * _HEAD_SIZE_UNIT


def _widened(heads: torch.Tensor, width: int) -> torch.Tensor:
    """With zeros, which add nothing to a product; as it is where nothing is missing."""
    missing = width - heads.size(-1)
    return functional.pad(heads, (0, missing)) if missing else heads


@functools.cache
def _kernel(device: int) -> Callable | None:
    if torch.cuda.get_device_capability(device) < _KERNEL_CAPABILITY:
        return None
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:  # before torch 2.10
        return None
    known = inspect.signature(varlen_attn).parameters
    if "scale" not in known or "window_size" not in known:  # 2.10
        return None
    grouped = "enable_gqa" in known

    def attend(query, key, value, *spans, scale: float):
        if not grouped and key.size(1) != query.size(1):
            key, value = (x.repeat_interleave(query.size(1) // x.size(1), 1) for x in (key, value))
        more = {"enable_gqa": True} if grouped else {}
        return varlen_attn(query, key, value, *spans, scale=scale, window_size=(-1, 0), **more)

    return attend
