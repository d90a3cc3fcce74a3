"""Adapters on a model chunk: made, found again, started."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from slime_like.config.lora import LoraConfig
from slime_like.config.lora_targets import COLUMN, OUTPUT, ROW, TargetMatrix, layer_targets, target_modules
from slime_like.config.model import ModelConfig
from slime_like.megatron_backend.hf.tables import table_for
from slime_like.megatron_backend.hf.tables.row import GATE_UP_JOINED, PLAIN, QKV
from slime_like.megatron_backend.lora.adapter import AdapterPart, AdapterShape, AdapterSwitch, LoraAdapter
from slime_like.megatron_backend.lora.experts import ExpertAdapters, adapters_of
from slime_like.megatron_backend.lora.gains import added
from slime_like.megatron_backend.lora.layers import linear_of, tell_norm, weights_of
from slime_like.megatron_backend.model.stage_weights import ADAPTER
from slime_like.megatron_backend.model.value_head import has_value_head


def put_adapters(chunk: GPTModel, model: ModelConfig, switch: AdapterSwitch) -> None:
    """Freeze the chunk, but a critic's head, and give every targeted layer its adapter: zeros, until filled.

    Raises ConfigError for layers of a kind that cannot have one.
    """
    for parameter in chunk.parameters():
        parameter.requires_grad = False
    if has_value_head(chunk):
        chunk.output_layer.requires_grad_(True)
    for linear, adapter in make_adapters(chunk, model, switch):
        linear.add_module(ADAPTER, adapter)
        tell_norm(linear)
        linear.register_forward_hook(added(adapter), with_kwargs=True)
    if chunk.pre_process and chunk.config.recompute_granularity == "full":
        # A layer that is computed again gets gradients only where its input asks for one, and the frozen embedding
        # does not.
        chunk.embedding.register_forward_hook(lambda _, __, output: output.requires_grad_(torch.is_grad_enabled()))


def make_adapters(
    chunk: GPTModel, model: ModelConfig, switch: AdapterSwitch
) -> list[tuple[torch.nn.Module, LoraAdapter | ExpertAdapters]]:
    """(layer, its adapter of zeros) of every targeted layer of a chunk, in the model's order. The chunk stays as it is.

    Raises ConfigError for layers of a kind that cannot have one.
    """
    lora = switch.config
    layouts = {row.megatron: row.layout for row in table_for(model)}
    offset = get_transformer_layer_offset(chunk.config, chunk.vp_stage)
    num_local = model.num_experts // parallel_state.get_expert_model_parallel_world_size()
    experts = [num_local * parallel_state.get_expert_model_parallel_rank() + place for place in range(num_local)]
    of_layers: dict[torch.nn.Module, list[LoraAdapter]] = {}
    for number, layer in enumerate(chunk.decoder.layers):
        prefix = f"model.layers.{number + offset}."
        for matrix in layer_targets(model, has_experts=model.expert_layers[number + offset], experts=experts):
            modules = [prefix + name for name in matrix.modules]
            if not any(map(lora.targets, modules)):
                continue
            linear = linear_of(layer, matrix)
            layout = layouts[f"decoder.layers.{{layer}}.{matrix.row_name}.weight"]
            shape = _shape_of(linear, matrix, layout, lora, chunk)
            if matrix.is_expert:
                group = parallel_state.get_expert_tensor_parallel_group()
                shape = dataclasses.replace(shape, group=group, num_local_experts=num_local)
            of_layers.setdefault(linear, []).append(_adapter(modules, shape, chunk, switch))
    if (
        chunk.post_process
        and not has_value_head(chunk)
        and any(lora.targets(name) for name in OUTPUT.modules if name in target_modules(model))
    ):
        linear = linear_of(chunk, OUTPUT)
        shape = dataclasses.replace(_shape_of(linear, OUTPUT, PLAIN, lora, chunk), num_rows=model.vocab_size)
        of_layers[linear] = [_adapter(OUTPUT.modules, shape, chunk, switch)]
    return [
        (linear, some[0] if hasattr(linear, "weight") else ExpertAdapters(some)) for linear, some in of_layers.items()
    ]


def _adapter(modules: Sequence[str], shape: AdapterShape, chunk: GPTModel, switch: AdapterSwitch) -> LoraAdapter:
    """The adapter of one matrix, of those of its HF modules that are to have one."""
    parts = {
        place: AdapterPart(module, shape, shape.sizes[place], chunk.config)
        for place, module in enumerate(modules)
        if switch.config.targets(module)
    }
    return LoraAdapter(shape, parts, chunk.config, switch)


def parts(stage: Iterable[torch.nn.Module]) -> Iterator[tuple[LoraAdapter, AdapterPart]]:
    """(adapter, its part) for every HF module with one in these chunks, in the model's order."""
    for chunk in stage:
        for module in chunk.modules():
            if isinstance(module, LoraAdapter):
                for part in module.parts.values():
                    yield module, part


def adapters_by_weight(stage: Iterable[torch.nn.Module]) -> dict[int, LoraAdapter]:
    """id of a layer's weight -> its adapter."""
    return {
        id(weight): adapter
        for chunk in stage
        for module in chunk.modules()
        if ADAPTER in module._modules
        for weight, adapter in zip(weights_of(module), adapters_of(module.get_submodule(ADAPTER)), strict=True)
    }


@torch.no_grad()
def start_adapters(stage: Iterable[torch.nn.Module], lora: LoraConfig, *, seed: int) -> None:
    """Fill adapters as --lora-init says: the same numbers under every layout, others for each module."""
    for adapter, part in parts(stage):
        matrix_a, matrix_b = _first_matrices(adapter, part, lora, _generator(seed, part.module))
        put_whole(adapter, part, matrix_a, matrix_b)


@torch.no_grad()
def put_whole(adapter: LoraAdapter, part: AdapterPart, matrix_a: torch.Tensor, matrix_b: torch.Tensor) -> None:
    """Take this rank's share of a whole A [rank, inputs] and B [outputs, rank], of HF's rows."""
    shape = adapter.shape
    rank, size = shape.group.rank(), shape.group.size()
    if shape.split == ROW:
        matrix_a = matrix_a.chunk(size, 1)[rank]
    if shape.num_rows is not None:
        padding = size * part.lora_b.size(0) - matrix_b.size(0)
        matrix_b = torch.nn.functional.pad(matrix_b, (0, 0, 0, padding))
    if shape.split == COLUMN:
        halves = matrix_b.chunk(2) if adapter.halves() else (matrix_b,)
        matrix_b = torch.cat([half.chunk(size)[rank] for half in halves])
    part.lora_a.copy_(matrix_a)
    part.lora_b.copy_(matrix_b)


@torch.no_grad()
def gathered(adapter: LoraAdapter, part: AdapterPart) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole A and B of a part, the inverse of put_whole. Collective over the tensor parallel group."""
    matrix_a, matrix_b = part.lora_a.detach(), part.lora_b.detach()
    if adapter.shape.split == ROW:
        matrix_a = torch.cat(_of_all_ranks(matrix_a, adapter.shape.group), 1)
    if adapter.shape.split == COLUMN:
        ranks = _of_all_ranks(matrix_b, adapter.shape.group)
        if adapter.halves():
            matrix_b = torch.cat([rows.chunk(2)[half] for half in (0, 1) for rows in ranks])
        else:
            matrix_b = torch.cat(ranks)[: adapter.shape.num_rows]
    return matrix_a.contiguous(), matrix_b.contiguous()


def _of_all_ranks(matrix: torch.Tensor, group: torch.distributed.ProcessGroup) -> list[torch.Tensor]:
    if group.size() == 1:
        return [matrix]
    local = matrix.contiguous()
    every = [torch.empty_like(local) for _ in range(group.size())]
    torch.distributed.all_gather(every, local, group=group)
    return every


def _shape_of(
    linear: torch.nn.Module, matrix: TargetMatrix, layout: str, lora: LoraConfig, chunk: GPTModel
) -> AdapterShape:
    rows, num_inputs = weights_of(linear)[0].shape
    sizes: tuple[int, ...] = (rows,)
    if layout == QKV:
        config = chunk.config
        queries = config.num_attention_heads // config.num_query_groups
        group_rows = rows // (queries + 2)
        sizes = (queries * group_rows, group_rows, group_rows)
    elif layout != GATE_UP_JOINED and len(matrix.modules) == 2:
        sizes = (rows // 2, rows // 2)
    return AdapterShape(
        split=matrix.split,
        layout=layout,
        sizes=sizes,
        num_inputs=num_inputs,
        rank=lora.lora_rank,
        scale=lora.scale,
        dropout=lora.lora_dropout,
        group=parallel_state.get_tensor_model_parallel_group(),
    )


def _generator(seed: int, module: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed} {module}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def _first_matrices(
    adapter: LoraAdapter, part: AdapterPart, lora: LoraConfig, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whole A and B in fp32, drawn as PEFT's Linear draws them (peft 0.21, tuners/lora/layer.py)."""
    size, rank = adapter.shape.group.size(), lora.lora_rank
    num_inputs = part.lora_a.size(1) * (size if adapter.shape.split == ROW else 1)
    num_outputs = adapter.shape.num_rows or part.lora_b.size(0) * (size if adapter.shape.split == COLUMN else 1)
    if lora.starts is None:  # orthogonal
        basis, _ = torch.linalg.qr(torch.randn(rank, rank, generator=generator))
        matrix_a = (torch.randn(num_inputs, rank // 2, generator=generator) @ basis[0::2]).T / 10.0
        return matrix_a, (torch.randn(num_outputs, rank // 2, generator=generator) @ basis[1::2]) / 10.0
    start_a, start_b = lora.starts
    return (
        _started(start_a, (rank, num_inputs), rank, generator),
        _started(start_b, (num_outputs, rank), rank, generator),
    )


def _started(start: str, shape: tuple[int, int], rank: int, generator: torch.Generator) -> torch.Tensor:
    """One matrix [outputs, inputs] that starts as config.lora.STARTS names it."""
    if start == "zeros":
        return torch.zeros(shape)
    if start == "gaussian":
        return torch.randn(shape, generator=generator) / rank
    # torch.nn.Linear's own: kaiming_uniform_(a=sqrt(5)), which reaches 1 / sqrt(inputs).
    return (2 * torch.rand(shape, generator=generator) - 1) / math.sqrt(shape[1])
