"""Where an SGLang engine keeps the rows of each HF tensor: fused parameters, and the share of each tensor parallel
rank. No torch.

Written from SGLang's model files (0.5.23: layers/linear.py, vocab_parallel_embedding.py, moe/fused_moe_triton), not
from our own export
tables: what a receipt compares must not repeat the mistake that it looks for.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

from slime_like.config.model import ModelConfig

#: SGLang pads the vocabulary to a multiple of this before it is cut.
_VOCAB_PADDING = 64
#: Without CUDA each rank's share of an MLP is rounded up to a multiple of this, or of a block of scales
#: (configs/update_config.py, get_moe_padding_size).
_CPU_MLP_PADDING = 32

_QKV = re.compile(r"(.+\.self_attn)\.([qkv])_proj\.(weight|bias)$")
_GATE_UP = re.compile(r"(.+\.(?:mlp|shared_experts))\.(gate|up)_proj\.(weight)$")
_FUSED_GATE_UP = re.compile(r"(.+\.mlp)\.gate_up_proj\.weight$")
_EXPERT = re.compile(r"(.+\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight$")
_COLUMNS = re.compile(r"\.(?:o_proj|down_proj)\.weight$")
_VOCABULARY = re.compile(r"^(?:model\.embed_tokens|lm_head)\.weight$")
_WHOLE = re.compile(r"(?:norm|layernorm)\.weight$|\.mlp\.gate\.(?:weight|e_score_correction_bias)$")
_VECTOR = re.compile(r"(?:norm|layernorm)\.weight$|bias$")
#: DeepSeek's attention: what is compressed lies whole on every rank, what is expanded to heads is shared among them.
_LATENT = re.compile(r"(.+\.self_attn)\.(q_proj|q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj)\.weight$")
_SHARED_EXPERTS = ".mlp.shared_experts."
#: Scales of an eight-bit weight: one for each of its rows, or (_inv) one for each block.
_SCALE = re.compile(r"(.+\.weight)(_scale(?:_inv)?)$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """One rank of an engine, and the sizes that decide its share."""

    rank: int
    size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    on_cpu: bool = False
    is_latent: bool = False  # multi-head latent attention
    latent_queries: int = 0  # width of compressed queries; 0: they are not compressed
    fuses_shared: bool = False  # the shared expert may lie among the others, depending on what the engine decided
    block: int = (
        0  # rows and columns of a weight that share a scale; 1: all columns of one row; 0: none is in eight bits
    )

    @staticmethod
    def of(
        model: ModelConfig, rank: int, size: int, *, on_cpu: bool, may_fuse_shared: bool = False, block: int = 0
    ) -> Cut:
        """For a resolved model. on_cpu: the engine's device.

        may_fuse_shared: it was not told to keep shared experts apart (it fuses a single one only). block: as the
        field's.
        """
        return Cut(
            rank=rank,
            size=size,
            num_heads=model.num_attention_heads,
            num_kv_heads=model.num_kv_heads,
            head_size=model.head_size,
            on_cpu=on_cpu,
            is_latent=model.multi_latent_attention,
            latent_queries=model.q_lora_rank or 0,
            fuses_shared=may_fuse_shared and model.moe_shared_expert_intermediate_size == model.moe_ffn_hidden_size,
            block=block,
        )

    def heads(self, part: str) -> tuple[int, int]:
        """First and last (exclusive) row of this rank's q, k or v.

        Where ranks outnumber key/value heads, several hold the same one.
        """
        total = self.num_heads if part == "q" else self.num_kv_heads
        count = max(1, total // self.size)
        first = self.rank * count if total >= self.size else self.rank * total // self.size
        return first * self.head_size, (first + count) * self.head_size

    def all_heads(self, part: str) -> int:
        """Rows of the whole q, k or v."""
        return (self.num_heads if part == "q" else self.num_kv_heads) * self.head_size

    def even(self, total: int) -> tuple[int, int]:
        """First and last (exclusive) of this rank's equal share of `total` rows or columns."""
        return self.rank * total // self.size, (self.rank + 1) * total // self.size

    def mlp_share(self, total: int) -> int:
        """Rows or columns that a rank keeps of an MLP's `total`, padding included."""
        if self.on_cpu:
            padding = self.block if self.block > 1 else _CPU_MLP_PADDING
            return -(-total // (self.size * padding)) * padding
        return total // self.size

    def of_share(self, total: int, share: int) -> tuple[int, int]:
        """First and last (exclusive) of this rank's `share`, padding left out: the last ranks may have fewer, even
        none.
        """
        return min(total, self.rank * share), min(total, (self.rank + 1) * share)

    def vocabulary(self, rows: int) -> tuple[int, int]:
        """This rank's rows of an embedding, padding left out."""
        return self.of_share(rows, -(-rows // _VOCAB_PADDING) * _VOCAB_PADDING // self.size)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """Part of one HF tensor and where one rank of the engine holds it.

    `tensor[start:stop]` (or `tensor[:, start:stop]` with dim 1) is `parameter[first:first + stop - start]`, where dim 0
    of the parameter is what is counted unless dim is 1; with an expert, of `parameter[expert]`.
    """

    name: str
    parameter: str
    dim: int
    start: int
    stop: int
    first: int
    expert: int | None = None


def pieces(name: str, shape: Sequence[int], cut: Cut) -> list[Piece]:
    """What this rank holds of the HF tensor `name`.

    An empty list if it is not known where the engine keeps it, as of another shape than the model's.
    """
    if match := _SCALE.match(name):
        return _of_scales(shape, cut, match)
    if len(shape) != (1 if _VECTOR.search(name) else 2):
        return []
    if cut.fuses_shared and _SHARED_EXPERTS in name:
        return []
    if match := _EXPERT.match(name):
        return [_of_expert(name, shape, cut, match)]
    if cut.is_latent and (match := _LATENT.match(name)):
        return [_of_latent(name, shape, cut, match)]
    if match := _QKV.match(name):
        return [_of_qkv(name, cut, match)] if shape[0] == cut.all_heads(match[2]) else []
    if match := _GATE_UP.match(name):
        share = cut.mlp_share(shape[0])
        start, stop = cut.of_share(shape[0], share)
        first = 0 if match[2] == "gate" else share
        return [
            Piece(
                name=name, parameter=f"{match[1]}.gate_up_proj.{match[3]}", dim=0, start=start, stop=stop, first=first
            )
        ]
    if _FUSED_GATE_UP.match(name):
        half = shape[0] // 2
        share = cut.mlp_share(half)
        start, stop = cut.of_share(half, share)
        both = ((0, 0), (half, share))
        return [
            Piece(name=name, parameter=name, dim=0, start=offset + start, stop=offset + stop, first=first)
            for offset, first in both
        ]
    if _COLUMNS.search(name):
        start, stop = (
            cut.of_share(shape[1], cut.mlp_share(shape[1])) if name.endswith("down_proj.weight") else cut.even(shape[1])
        )
        return [Piece(name=name, parameter=name, dim=1, start=start, stop=stop, first=0)]
    if _VOCABULARY.match(name):
        start, stop = cut.vocabulary(shape[0])
        return [Piece(name=name, parameter=name, dim=0, start=start, stop=stop, first=0)] if stop > start else []
    if _WHOLE.search(name):
        return [Piece(name=name, parameter=name, dim=0, start=0, stop=shape[0], first=0)]
    return []


def _of_scales(shape: Sequence[int], cut: Cut, match: re.Match) -> list[Piece]:
    """They lie as their weight does, a block for each of its blocks. The scale of a row is whole on every rank that has
    some columns of the row.
    """
    block, of_rows = cut.block, match[2] == "_scale"
    if len(shape) != 2 or not block or of_rows is not (block == 1):
        return []
    lying = []
    for piece in pieces(match[1], [size * block for size in shape], cut):
        if of_rows and piece.dim == 1:
            piece = dataclasses.replace(piece, dim=0, start=0, stop=shape[0], first=0)
        edges = (piece.start, piece.stop, piece.first)
        if any(edge % block for edge in edges):
            return []
        start, stop, first = (edge // block for edge in edges)
        name, parameter = match[1] + match[2], piece.parameter + match[2]
        lying.append(dataclasses.replace(piece, name=name, parameter=parameter, start=start, stop=stop, first=first))
    return lying


def _of_expert(name: str, shape: Sequence[int], cut: Cut, match: re.Match) -> Piece:
    expert, matrix = int(match[2]), match[3]
    total = shape[1 if matrix == "down" else 0]
    share = cut.mlp_share(total)
    start, stop = cut.of_share(total, share)
    if matrix == "down":
        return Piece(
            name=name, parameter=f"{match[1]}.w2_weight", dim=1, start=start, stop=stop, first=0, expert=expert
        )
    first = 0 if matrix == "gate" else share
    return Piece(
        name=name, parameter=f"{match[1]}.w13_weight", dim=0, start=start, stop=stop, first=first, expert=expert
    )


def _of_latent(name: str, shape: Sequence[int], cut: Cut, match: re.Match) -> Piece:
    """SGLang also keeps products of kv_b_proj beside it (w_kc, w_vc), made when it is loaded: of those only the probe
    tells.
    """
    part = match[2]
    fused = cut.latent_queries > 0 and part in ("q_a_proj", "kv_a_proj_with_mqa")
    start, stop = (0, shape[0]) if "_a_" in part else cut.even(shape[0])
    first = cut.latent_queries if fused and part != "q_a_proj" else 0
    return Piece(
        name=name,
        parameter=f"{match[1]}.fused_qkv_a_proj_with_mqa.weight" if fused else name,
        dim=0,
        start=start,
        stop=stop,
        first=first,
    )


def _of_qkv(name: str, cut: Cut, match: re.Match) -> Piece:
    first = 0
    for part in "qkv":
        start, stop = cut.heads(part)
        if part == match[2]:
            return Piece(
                name=name, parameter=f"{match[1]}.qkv_proj.{match[3]}", dim=0, start=start, stop=stop, first=first
            )
        first += stop - start
    raise AssertionError(match[2])
