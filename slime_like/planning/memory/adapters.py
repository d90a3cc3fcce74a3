"""Every adapter of one trainer rank, by name and shape, without building the model (megatron_backend/lora)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from slime_like.config.lora import LoraConfig
from slime_like.config.lora_targets import OUTPUT, TargetMatrix, layer_targets, target_modules
from slime_like.config.model import ModelConfig
from slime_like.config.parallel import ParallelConfig
from slime_like.config.run import RunConfig
from slime_like.planning.memory.parameters import Parameter, Variant, stage_chunks, stage_parameters
from slime_like.planning.memory.trainer_bytes import Precision

#: Of a tenant's element, in fp32 whatever the model's type: the weight, its gradient, Adam's two moments.
_MASTER, _GRADIENT, _MOMENTS = 4, 4, 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class TenantRoom:
    """Adapters that a trainer of the role "tenants" holds (megatron_backend/lora/tenant_memory.py)."""

    lora: LoraConfig  # the largest that a client may ask for
    resident: int  # on the device at once
    held: int  # in all; those that are not on the device lie on the host

    def on_device(self, elements: int, *, width: int, passing: bool) -> dict[str, int]:
        """Bytes of one rank by what they are for. elements: of one adapter there. width: bytes of the model's element.
        passing: while all have rows in a pass, which collects gradients of its own.
        """
        computed = width if width < _MASTER else 0  # else the model computes with the fp32 weights themselves
        all_elements = min(self.resident, self.held) * elements
        return {
            "adapter weights": all_elements * (_MASTER + computed),
            "gradients": all_elements * _GRADIENT * (2 if passing else 1),
            "optimizer": all_elements * _MOMENTS,
        }

    def on_host(self, elements: int) -> int:
        """Bytes there: who comes back to the device keeps its room."""
        return self.held * elements * (_MASTER + _GRADIENT + _MOMENTS) if self.held > self.resident else 0


def whole_model_bytes(config: RunConfig) -> int:
    """Most bytes on one GPU of a client that trains all parameters, beside the model: the same numbers of each."""
    width = Precision.of(config.optimizer).weight
    stages = range(config.parallel.pipeline_model_parallel_size)
    elements = max(sum(p.numel for p in stage_parameters(config.model, config.parallel, stage)) for stage in stages)
    return elements * (_MASTER + (width if width < _MASTER else 0) + 2 * _GRADIENT + _MOMENTS)


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
