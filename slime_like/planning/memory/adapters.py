"""Every adapter of one trainer rank, by name and shape, without building the model (megatron_backend/lora)."""

from __future__ import annotations

from collections.abc import Iterator

from slime_like.config.lora import LoraConfig
from slime_like.config.lora_targets import OUTPUT, TargetMatrix, layer_targets, target_modules
from slime_like.config.model import ModelConfig
from slime_like.config.parallel import ParallelConfig
from slime_like.planning.memory.parameters import Parameter, Variant, stage_chunks


def adapter_chunks(
    model: ModelConfig, parallel: ParallelConfig, stage: int, lora: LoraConfig, *, value_head: bool = False
) -> list[list[Parameter]]:
    """What a rank of pipeline stage `stage` trains with --lora-rank, for each chunk of layers, in the model's order: of
    a critic its head, too.
    """
    # Every rank of the expert parallel group has as many, of the same sizes: the first one's names stand for all.
    experts = range(model.num_experts // parallel.expert_model_parallel_size)
    apart = parallel.expert_model_parallel_size > 1
    chunks, ranges = [], parallel.chunks_of_stage(model.num_layers, stage)
    for layers, parameters in zip(
        ranges, stage_chunks(model, parallel, stage, Variant(value_head=value_head)), strict=True
    ):
        shapes = {parameter.name: parameter.shape for parameter in parameters}
        of_layers = [
            parameter._replace(expert=apart and matrix.is_expert)
            for number, layer in enumerate(layers)
            for matrix in layer_targets(model, has_experts=model.expert_layers[layer], experts=experts)
            for parameter in _of_matrix(f"decoder.layers.{number}.", layer, matrix, shapes, (model, lora))
        ]
        output = shapes.get(f"{OUTPUT.name}.weight")
        if value_head:
            of_layers += [parameter for parameter in parameters if parameter.name == f"{OUTPUT.name}.weight"]
        elif output is not None and any(
            name in target_modules(model) and lora.targets(name) for name in OUTPUT.modules
        ):
            of_layers += _pair(f"{OUTPUT.name}.adapter.lm_head.", output, lora)
        chunks.append(of_layers)
    return chunks


def _pair(prefix: str, shape: tuple[int, ...], lora: LoraConfig) -> list[Parameter]:
    rows, columns = shape
    return [
        Parameter(prefix + "lora_a", (lora.lora_rank, columns)),
        Parameter(prefix + "lora_b", (rows, lora.lora_rank)),
    ]


def _of_matrix(
    prefix: str,
    layer: int,
    matrix: TargetMatrix,
    shapes: dict[str, tuple[int, ...]],
    flags: tuple[ModelConfig, LoraConfig],
) -> Iterator[Parameter]:
    """A and B of each of its HF modules that has an adapter."""
    model, lora = flags
    rows, columns = shapes[f"{prefix}{matrix.name}.weight"]
    sizes = [rows // len(matrix.modules)] * len(matrix.modules)
    if len(matrix.modules) == 3:  # query, key, value
        queries = model.num_attention_heads // model.num_kv_heads
        sizes = [rows // (queries + 2) * queries, rows // (queries + 2), rows // (queries + 2)]
    for module, size in zip(matrix.modules, sizes, strict=True):
        if lora.targets(f"model.layers.{layer}.{module}"):
            name = f"{prefix}{matrix.name}.adapter.{module.rsplit('.', 1)[-1]}."
            yield from _pair(name, (size, columns), lora)
