"""Weights between HF names and this rank's Megatron shards, by the family's name table."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from slime_like.config.model import ModelConfig
from slime_like.errors import CheckpointError
from slime_like.megatron_backend.hf_files import HfReader
from slime_like.megatron_backend.hf_tables import table_for
from slime_like.megatron_backend.hf_tables.entry import GATE_UP, PLAIN, QKV
from slime_like.megatron_backend.value_head import OUTPUT_WEIGHT, has_value_head

_LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+")
#: An expert's place on this rank: local_experts.3.linear_fc1.weight, and linear_fc1.weight3 with transformer-engine's grouped matrices.
_EXPERT = re.compile(r"(?<=\.experts\.local_experts\.)\d+|(?<=\.experts\.linear_fc[12]\.weight)\d+$")
_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
#: Buffers that old HF folders store and every implementation recomputes.
_IGNORED = re.compile(r"rotary_emb\.inv_freq$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shard:
    """One Megatron parameter of this rank and the HF tensors behind it."""

    parameter: torch.nn.Parameter
    templates: tuple[str, ...]  # HF names; the number of the expert is open
    layout: str
    dim: int | None  # tensor parallel dimension; None: every rank holds all of it
    is_tied_copy: bool  # the last stage's copy of the embedding
    expert: int | None = None  # place among the experts that one rank holds
    num_local_experts: int = 0

    def hf_names(self, expert_rank: int) -> tuple[str, ...]:
        """The HF tensors behind this parameter on the rank `expert_rank` of the expert parallel group."""
        if self.expert is None:
            return self.templates
        return tuple(name.format(expert=expert_rank * self.num_local_experts + self.expert) for name in self.templates)

    @property
    def is_vocabulary(self) -> bool:
        """Whether rows are padded past the vocabulary."""
        return self.templates[0] in (_EMBEDDING, _OUTPUT)

    @property
    def tensor_group(self) -> torch.distributed.ProcessGroup:
        """The ranks that share this parameter's matrix."""
        if self.expert is None:
            return parallel_state.get_tensor_model_parallel_group()
        return parallel_state.get_expert_tensor_parallel_group()


def shards(stage: GPTModel, model: ModelConfig) -> Iterator[Shard]:
    """Every parameter of this pipeline stage; a critic's value head has no HF name and is left out.

    Raises CheckpointError for one that the family's table does not know.
    """
    by_name = {name: entry for entry in table_for(model) for name in entry.megatron_names}
    offset = get_transformer_layer_offset(stage.config)
    tied = not model.untie_embeddings_and_output_weights
    for name, parameter in stage.named_parameters():
        if name == OUTPUT_WEIGHT and has_value_head(stage):
            continue
        layer, expert = _LAYER.search(name), _EXPERT.search(name)
        entry = by_name.get(_EXPERT.sub("{expert}", _LAYER.sub("{layer}", name)))
        if entry is None:
            raise CheckpointError(f"parameter {name} is in no name table of the model's family.")
        templates = tuple(hf.format(layer=int(layer[0]) + offset, expert="{expert}") if layer else hf for hf in entry.hf)
        is_tied_copy = tied and templates == (_OUTPUT,)
        yield Shard(
            parameter=parameter,
            templates=(_EMBEDDING,) if is_tied_copy else templates,
            layout=entry.layout,
            dim=_split_dim(parameter, entry.layout, is_expert=expert is not None),
            is_tied_copy=is_tied_copy,
            expert=int(expert[0]) if expert else None,
            num_local_experts=(model.num_experts or 0) // parallel_state.get_expert_model_parallel_world_size(),
        )


@torch.no_grad()
def load_hf(stage: GPTModel, model: ModelConfig, folder: str) -> None:
    """Fill this rank's parameters from an HF folder, reading only the slices that it holds.

    Raises CheckpointError for a tensor that is missing, unknown or of another shape.
    """
    reader = HfReader(folder)
    _check_names(reader, model)
    expert_rank = parallel_state.get_expert_model_parallel_rank()
    for shard in shards(stage, model):
        pieces = []
        rank, size = shard.tensor_group.rank(), shard.tensor_group.size()
        for name, piece in zip(shard.hf_names(expert_rank), _split(shard.parameter, shard.layout, stage.config), strict=True):
            shape = list(piece.shape)
            if shard.dim is not None:
                shape[shard.dim] *= size
            if shard.is_vocabulary:
                shape[0] = model.vocab_size
            width = piece.shape[shard.dim] if shard.dim is not None else 0
            pieces.append(reader.read(name, shape=tuple(shape), dim=shard.dim, start=rank * width, stop=(rank + 1) * width))
        merged = _merge(pieces, shard.layout, stage.config)
        # Rows past the vocabulary are padding: zero, and masked out of every log-prob.
        shard.parameter.zero_()
        shard.parameter[: merged.size(0)].copy_(merged)


@torch.no_grad()
def export_hf(stage: GPTModel, model: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """This pipeline stage's HF tensors, whole, those of experts on other ranks too. Collective: every rank with joins_export() must
    iterate to the end, and no other rank needs to. Beside the model at most one tensor, gathered, is alive.

    A tied output layer is not repeated: the first stage sends it as the embedding. Some tensors are views of the parameters: they
    hold until the next optimizer step or weight swap.
    """
    for shard in shards(stage, model):
        if shard.is_tied_copy:
            continue
        # gloo silently corrupts tensors that are not contiguous (torch 2.13).
        local = shard.parameter.detach().contiguous()
        parts = [local]
        if shard.dim is not None:
            parts = [torch.empty_like(local) for _ in range(shard.tensor_group.size())]
            torch.distributed.all_gather(parts, local, group=shard.tensor_group)
        by_part = [_split(part, shard.layout, stage.config) for part in parts]
        for index in range(len(shard.templates)):
            pieces = [pieces_of_part[index] for pieces_of_part in by_part]
            whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, shard.dim)
            whole = (whole[: model.vocab_size] if shard.is_vocabulary else whole).contiguous()
            if shard.expert is None:
                yield shard.templates[index], whole
            else:
                yield from _from_each_expert_rank(shard, index, whole)


def joins_export() -> bool:
    """Whether this rank takes part in gathering its pipeline stage's weights for is_export_source().

    These are the stage's first ranks: the smallest number of them that breaks up no tensor parallel group and no copy of the experts.
    """
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    experts = parallel_state.get_expert_tensor_parallel_world_size() * parallel_state.get_expert_model_parallel_world_size()
    return _rank_in_stage() < math.lcm(tensor, experts)


def is_export_source() -> bool:
    """Whether this rank sends or writes its pipeline stage's weights: the first of the stage."""
    return _rank_in_stage() == 0


def hf_names(model: ModelConfig) -> set[str]:
    """Names of all tensors that an HF folder of this architecture holds."""
    names = {
        hf.format(layer=layer, expert=expert)
        for entry in table_for(model)
        for hf in entry.hf
        for layer in range(model.num_layers)
        for expert in (range(model.num_experts or 0) if "{expert}" in hf else (0,))
    }
    return names if model.untie_embeddings_and_output_weights else names - {_OUTPUT}


def num_parameters(model: ModelConfig) -> int:
    """Parameters of the whole model, without padding; a tied embedding counts once."""
    hidden, heads, groups, size, ffn = model.hidden_size, model.num_attention_heads, model.num_kv_heads, model.head_size, model.mlp_size
    attention = hidden * size * (heads + 2 * groups) + heads * size * hidden
    extra = (size * (heads + 2 * groups) if model.add_qkv_bias else 0) + (2 * size if model.qk_layernorm else 0)
    experts = model.num_experts or 0
    mlp = experts * (hidden + 3 * hidden * (model.moe_ffn_hidden_size or ffn)) if experts else 3 * hidden * ffn
    layer = attention + extra + mlp + 2 * hidden
    embeddings = model.vocab_size * hidden * (2 if model.untie_embeddings_and_output_weights else 1)
    return model.num_layers * layer + embeddings + hidden


def _rank_in_stage() -> int:
    """Megatron numbers the ranks of a stage tensor parallel first, then context, then data parallel (and the experts' likewise)."""
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    return parallel_state.get_tensor_model_parallel_rank() + tensor * parallel_state.get_data_parallel_rank(with_context_parallel=True)


def _split_dim(parameter: torch.nn.Parameter, layout: str, *, is_expert: bool) -> int | None:
    """The dimension over which tensor parallel ranks share a parameter; None if each has all of it."""
    if is_expert:
        shared = parallel_state.get_expert_tensor_parallel_world_size() > 1
        return (0 if layout == GATE_UP else 1) if shared else None
    shared = getattr(parameter, "tensor_model_parallel", False) and parallel_state.get_tensor_model_parallel_world_size() > 1
    return parameter.partition_dim if shared else None


def _from_each_expert_rank(shard: Shard, index: int, whole: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The HF tensor `index` of the expert in this place on every rank of the expert parallel group, one after another."""
    group = parallel_state.get_expert_model_parallel_group()
    for rank in range(group.size()):
        if group.size() == 1:
            tensor = whole
        else:
            tensor = whole if rank == group.rank() else torch.empty_like(whole)
            torch.distributed.broadcast(tensor, torch.distributed.get_global_rank(group, rank), group=group)
        yield shard.hf_names(rank)[index], tensor


def _check_names(reader: HfReader, model: ModelConfig) -> None:
    expected = hf_names(model)
    missing = sorted(expected - reader.names)
    if missing:
        raise CheckpointError(f"{reader.folder} has no tensor {missing[0]!r}, which this architecture needs ({len(missing)} of {len(expected)} are missing).")
    unknown = sorted(name for name in reader.names - expected - {_OUTPUT} if not _IGNORED.search(name))
    if unknown:
        raise CheckpointError(f"{reader.folder} holds tensor {unknown[0]!r}, which this architecture has no place for ({len(unknown)} in all).")


def _merge(pieces: list[torch.Tensor], layout: str, config) -> torch.Tensor:
    """This rank's slices of the HF tensors -> this rank's Megatron parameter."""
    if layout == PLAIN:
        return pieces[0]
    if layout == GATE_UP:
        return torch.cat(pieces)
    assert layout == QKV, layout
    # Megatron keeps each group together: its query heads, then its key, then its value.
    size = config.kv_channels
    groups = pieces[1].size(0) // size
    return torch.cat([p.reshape(groups, -1, size, *p.shape[1:]) for p in pieces], 1).reshape(-1, *pieces[0].shape[1:])


def _split(parameter: torch.Tensor, layout: str, config) -> list[torch.Tensor]:
    """The inverse of _merge: one Megatron parameter -> slices of the HF tensors."""
    if layout == PLAIN:
        return [parameter]
    if layout == GATE_UP:
        return list(parameter.chunk(2))
    assert layout == QKV, layout
    size, queries = config.kv_channels, config.num_attention_heads // config.num_query_groups
    grouped = parameter.reshape(-1, queries + 2, size, *parameter.shape[1:])
    return [part.reshape(-1, *parameter.shape[1:]) for part in grouped.split([queries, 1, 1], 1)]
