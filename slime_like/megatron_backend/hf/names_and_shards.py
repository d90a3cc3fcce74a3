"""Weights between HF names and this rank's Megatron shards, by the family's name table."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from slime_like.config.hf_model import layers_ahead, read_hf_config
from slime_like.config.model import ModelConfig
from slime_like.errors import CheckpointError
from slime_like.megatron_backend.hf.files import HfReader
from slime_like.megatron_backend.hf.tables import table_for
from slime_like.megatron_backend.hf.tables.row import GATE_UP, GATE_UP_JOINED, PLAIN, QKV, WeightRow
from slime_like.megatron_backend.lora.adapter import LoraAdapter
from slime_like.megatron_backend.lora.build import adapters_by_weight
from slime_like.megatron_backend.model.stage_weights import named_weights
from slime_like.megatron_backend.model.value_head import OUTPUT_WEIGHT, has_value_head
from slime_like.planning.memory.parameters import model_parameters

_LAYER = re.compile(r"(?<=^decoder\.layers\.)\d+")
#: An expert's place on this rank: local_experts.3.linear_fc1.weight, and linear_fc1.weight3 with transformer-engine's
#: grouped matrices.
_EXPERT = re.compile(r"(?<=\.experts\.local_experts\.)\d+|(?<=\.experts\.linear_fc[12]\.weight)\d+$")
_EMBEDDING, _OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
#: Buffers that old HF folders store and every implementation recomputes.
_IGNORED = re.compile(r"rotary_emb\.inv_freq$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParameterShard:
    """One Megatron tensor of this rank and the HF tensors behind it."""

    parameter: torch.Tensor
    templates: tuple[str, ...]  # HF names; the number of the expert is open
    layout: str
    dim: int | None  # tensor parallel dimension; None: every rank holds all of it
    is_tied_copy: bool  # the last stage's copy of the embedding
    expert: int | None = None  # place among the experts that one rank holds
    num_local_experts: int = 0
    adapter: LoraAdapter | None = None

    def merged(self) -> torch.Tensor:
        """The tensor here with what its adapter adds, rounded once."""
        if self.adapter is None or not self.adapter.counts:
            return self.parameter.detach()
        return (self.parameter.detach().float() + self.adapter.delta()).to(self.parameter.dtype)

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


def shards(stage: Sequence[GPTModel], model: ModelConfig) -> Iterator[ParameterShard]:
    """Every parameter of this pipeline stage's chunks; a critic's value head has no HF name and is left out.

    Raises CheckpointError for one that the family's table does not know.
    """
    by_name = _rows(model)
    tied, adapters = not model.untie_embeddings_and_output_weights, adapters_by_weight(stage)
    for chunk, name, parameter in ((part, *named) for part in stage for named in named_weights(part)):
        if name == OUTPUT_WEIGHT and has_value_head(chunk):
            continue
        layer, expert = _LAYER.search(name), _EXPERT.search(name)
        row = by_name.get(_template(name))
        if row is None:
            raise CheckpointError(f"parameter {name} is in no name table of the model's family.")
        offset = get_transformer_layer_offset(chunk.config, chunk.vp_stage)
        templates = tuple(hf.format(layer=int(layer[0]) + offset, expert="{expert}") if layer else hf for hf in row.hf)
        is_tied_copy = tied and templates == (_OUTPUT,)
        yield ParameterShard(
            parameter=parameter,
            templates=(_EMBEDDING,) if is_tied_copy else templates,
            layout=row.layout,
            dim=_split_dim(parameter, row, is_expert=expert is not None),
            is_tied_copy=is_tied_copy,
            expert=int(expert[0]) if expert else None,
            num_local_experts=model.num_experts // parallel_state.get_expert_model_parallel_world_size(),
            adapter=adapters.get(id(parameter)),
        )


def mark_duplicated(chunk: torch.nn.Module, model: ModelConfig) -> None:
    """Tell Megatron which matrices of a chunk every tensor parallel rank holds whole: their gradients then count once
    in the norm, not once a rank. Under transformer-engine they bear the mark of a split matrix.
    """
    by_name = _rows(model)
    for name, parameter in chunk.named_parameters():
        row = by_name.get(_template(name))
        if row is not None and row.duplicated:
            parameter.tensor_model_parallel = False


@torch.no_grad()
def load_hf(stage: Sequence[GPTModel], model: ModelConfig, folder: str) -> None:
    """Fill this rank's parameters from an HF folder, reading only the slices that it holds.

    Raises CheckpointError for a tensor that is missing, unknown or of another shape.
    """
    reader = HfReader(folder)
    _check_names(reader, model)
    expert_rank = parallel_state.get_expert_model_parallel_rank()
    for shard in shards(stage, model):
        names = shard.hf_names(expert_rank)
        local = _split(shard.parameter, shard.layout, stage[0].config)
        pieces = [
            _read_piece(reader, shard, names[i * len(names) // len(local)], piece, i, model.vocab_size)
            for i, piece in enumerate(local)
        ]
        merged = _merge(pieces, shard.layout, stage[0].config)
        # Rows past the vocabulary are padding: zero, and masked out of every log-prob.
        shard.parameter.zero_()
        shard.parameter[: merged.size(0)].copy_(merged)


@torch.no_grad()
def export_hf(stage: Sequence[GPTModel], model: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """This pipeline stage's HF tensors, whole, adapters merged, those of experts on other ranks too. Collective:
    every rank with joins_export() must iterate to the end, and no other rank needs to. Beside the model at most one
    tensor, gathered, is alive.

    A tied output layer is not repeated: the first stage sends it as the embedding. Some tensors are views of the
    parameters: they hold until the next optimizer step or weight swap.
    """
    for shard in shards(stage, model):
        if shard.is_tied_copy:
            continue
        # gloo silently corrupts tensors that are not contiguous (torch 2.13).
        local = shard.merged().contiguous()
        parts = [local]
        if shard.dim is not None:
            parts = [torch.empty_like(local) for _ in range(shard.tensor_group.size())]
            torch.distributed.all_gather(parts, local, group=shard.tensor_group)
        by_part = [_split(part, shard.layout, stage[0].config) for part in parts]
        joined = len(by_part[0]) // len(shard.templates)
        for index in range(len(shard.templates)):
            pieces = [
                pieces_of_part[i] for i in range(index * joined, (index + 1) * joined) for pieces_of_part in by_part
            ]
            whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces, shard.dim or 0)
            whole = (whole[: model.vocab_size] if shard.is_vocabulary else whole).contiguous()
            if index == len(shard.templates) - 1:
                del parts, by_part, pieces  # what was joined is not alive beside what it was joined to
            if shard.expert is None:
                yield shard.templates[index], whole
            else:
                yield from _from_each_expert_rank(shard, index, whole)


def joins_export() -> bool:
    """Whether this rank takes part in gathering its pipeline stage's weights for is_export_source().

    These are the stage's first ranks: the smallest number of them that breaks up no tensor parallel group and no copy
    of the experts.
    """
    return rank_in_stage() < num_export_ranks()


def num_export_ranks() -> int:
    """How many ranks of a pipeline stage have joins_export()."""
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    return math.lcm(
        tensor,
        parallel_state.get_expert_tensor_parallel_world_size() * parallel_state.get_expert_model_parallel_world_size(),
    )


def is_export_source() -> bool:
    """Whether this rank sends or writes its pipeline stage's weights: the first of the stage."""
    return rank_in_stage() == 0


def hf_names(model: ModelConfig) -> set[str]:
    """Names of all tensors that an HF folder of this architecture holds."""
    names = {
        hf.format(layer=layer, expert=expert)
        for row in table_for(model)
        for hf in row.hf
        for layer, has_experts in enumerate(model.expert_layers)
        if row.is_in_layer(has_experts=has_experts)
        for expert in (range(model.num_experts) if "{expert}" in hf else (0,))
    }
    return names if model.untie_embeddings_and_output_weights else names - {_OUTPUT}


def num_parameters(model: ModelConfig) -> int:
    """Parameters of the whole model, without padding; a tied embedding counts once."""
    return model_parameters(model)


def rank_in_stage() -> int:
    """Number of this rank within its pipeline stage.

    Megatron numbers the ranks of a stage tensor parallel first, then context, then data parallel (and the experts'
    likewise).
    """
    tensor = parallel_state.get_tensor_model_parallel_world_size()
    return parallel_state.get_tensor_model_parallel_rank() + tensor * parallel_state.get_data_parallel_rank(
        with_context_parallel=True
    )


def _rows(model: ModelConfig) -> dict[str, WeightRow]:
    """The family's table by Megatron's names, with {layer} and {expert} for numbers."""
    return {name: row for row in table_for(model) for name in row.megatron_names}


def _template(name: str) -> str:
    """A parameter's name as the table has it."""
    return _EXPERT.sub("{expert}", _LAYER.sub("{layer}", name))


def _split_dim(parameter: torch.nn.Parameter, row: WeightRow, *, is_expert: bool) -> int | None:
    """The dimension over which tensor parallel ranks share a parameter; None if each has all of it."""
    if row.duplicated:
        return None
    if is_expert:
        shared = parallel_state.get_expert_tensor_parallel_world_size() > 1
        return (0 if row.layout == GATE_UP else 1) if shared else None
    shared = (
        getattr(parameter, "tensor_model_parallel", False) and parallel_state.get_tensor_model_parallel_world_size() > 1
    )
    return parameter.partition_dim if shared else None


def _from_each_expert_rank(
    shard: ParameterShard, index: int, whole: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """The HF tensor `index` of the expert in this place on every rank of the expert parallel group,
    one after another.
    """
    group = parallel_state.get_expert_model_parallel_group()
    for rank in range(group.size()):
        if group.size() == 1:
            tensor = whole
        else:
            tensor = whole if rank == group.rank() else torch.empty_like(whole)
            torch.distributed.broadcast(tensor, torch.distributed.get_global_rank(group, rank), group=group)
        yield shard.hf_names(rank)[index], tensor


def _read_piece(
    reader: HfReader, shard: ParameterShard, name: str, piece: torch.Tensor, index: int, vocab_size: int
) -> torch.Tensor:
    """What this rank holds of one HF tensor; `piece` has its shape.

    index: of the piece, where several lie in one HF tensor.
    """
    joined = 2 if shard.layout == GATE_UP_JOINED else 1
    dim = shard.dim if joined == 1 else 0
    rank, size = (shard.tensor_group.rank(), shard.tensor_group.size()) if shard.dim is not None else (0, 1)
    shape, start, width = list(piece.shape), 0, 0
    if dim is not None:
        width = piece.shape[dim]
        start = (index % joined * size + rank) * width
        shape[dim] = width * size * joined
    if shard.is_vocabulary:
        shape[0] = vocab_size
    return reader.read(name, shape=tuple(shape), dim=dim, start=start, stop=start + width)


def _check_names(reader: HfReader, model: ModelConfig) -> None:
    expected = hf_names(model)
    missing = sorted(expected - reader.names)
    if missing:
        raise CheckpointError(
            f"{reader.folder} has no tensor {missing[0]!r}, which this architecture needs ({len(missing)} of"
            f" {len(expected)} are missing)."
        )
    # Layers for tokens beyond the next are left out; the user was told (config/hf_model.hf_notes).
    ahead = layers_ahead(read_hf_config(reader.folder))
    left_out = tuple(f"model.layers.{model.num_layers + number}." for number in range(ahead)) + (
        ("model.mtp_layers.",) if ahead else ()
    )
    unknown = sorted(
        name
        for name in reader.names - expected - {_OUTPUT}
        if not _IGNORED.search(name) and not name.startswith(left_out)
    )
    if unknown:
        raise CheckpointError(
            f"{reader.folder} holds tensor {unknown[0]!r}, which this architecture has no place for ({len(unknown)} in"
            " all)."
        )


def _merge(pieces: list[torch.Tensor], layout: str, config) -> torch.Tensor:
    """This rank's slices of the HF tensors -> this rank's Megatron parameter."""
    if layout == PLAIN:
        return pieces[0]
    if layout in (GATE_UP, GATE_UP_JOINED):
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
    if layout in (GATE_UP, GATE_UP_JOINED):
        return list(parameter.chunk(2))
    assert layout == QKV, layout
    size, queries = config.kv_channels, config.num_attention_heads // config.num_query_groups
    grouped = parameter.reshape(-1, queries + 2, size, *parameter.shape[1:])
    return [part.reshape(-1, *parameter.shape[1:]) for part in grouped.split([queries, 1, 1], 1)]
