"""PEFT's folders: adapter_config.json and adapter_model.safetensors, written and read."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping

import torch
from megatron.core import parallel_state
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from slime_like.algorithms.finite import describe_non_finite, is_finite
from slime_like.config.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS, LoraConfig
from slime_like.config.lora_targets import OUTPUT, expert_of, of_expert, target_modules
from slime_like.config.model import ModelConfig
from slime_like.config.run import RunConfig
from slime_like.errors import CheckpointError
from slime_like.megatron_backend.checkpoint.agreement import agreed
from slime_like.megatron_backend.lora.adapter import AdapterPart, LoraAdapter
from slime_like.megatron_backend.lora.build import gathered, parts, put_whole, start_adapters

_PREFIX = "base_model.model."
_MATRICES = ("lora_A", "lora_B")
_COPIES = tuple(f"{_PREFIX}{name}.base_layer.weight" for name in OUTPUT.modules)
_OF_OUTPUT = tuple(f"{_PREFIX}{name}.{kind}.weight" for name in OUTPUT.modules for kind in _MATRICES)
#: What a configuration may say without changing what an adapter computes, with the only values that we compute.
_ONLY = {
    "use_dora": (False,),
    "bias": ("none",),
    "lora_bias": (False,),
    "fan_in_fan_out": (False,),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "use_qalora": (False,),
}


def adapter_tensors(stage: Iterable[torch.nn.Module]) -> dict[str, torch.Tensor]:
    """This pipeline stage's adapters, whole, under PEFT's names. Collective over the tensor parallel group."""
    return {name: matrix.cpu() for name, matrix in stream_adapters(stage)}


def stream_adapters(stage: Iterable[torch.nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    """The same one after another, where they are, those of experts on other ranks too.

    Collective: to be iterated to the end.
    """
    for adapter, part in parts(stage):
        for kind, matrix in zip(_MATRICES, gathered(adapter, part), strict=True):
            for module, whole in _of_every_expert_rank(adapter, part, matrix):
                yield f"{_PREFIX}{module}.{kind}.weight", whole


def _of_every_expert_rank(
    adapter: LoraAdapter, part: AdapterPart, matrix: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """(HF module, its matrix) of the expert in this place on every rank of the expert parallel group; of another module
    itself.
    """
    number = expert_of(part.module)
    group = parallel_state.get_expert_model_parallel_group() if number is not None else None
    if number is None or group is None or group.size() == 1:
        yield part.module, matrix
        return
    place = number % adapter.shape.num_local_experts
    for rank in range(group.size()):
        whole = matrix if rank == group.rank() else torch.empty_like(matrix)
        torch.distributed.broadcast(whole, torch.distributed.get_global_rank(group, rank), group=group)
        yield of_expert(part.module, rank * adapter.shape.num_local_experts + place), whole


def adapter_names(lora: LoraConfig, model: ModelConfig) -> frozenset[str]:
    """PEFT's names of every A and B of the whole model."""
    modules = [name for name in target_modules(model) if lora.targets(name)]
    return frozenset(f"{_PREFIX}{name}.{kind}.weight" for name in modules for kind in _MATRICES)


def save_adapters(
    stage: Iterable[torch.nn.Module], folder: str, *, lora: LoraConfig, model: ModelConfig, base: str | None
) -> None:
    """Write the adapters of all stages as a PEFT folder, which must be there. Collective. Raises SaveError.

    base: the folder of the model that they are for.
    """
    from slime_like.megatron_backend.hf.names_and_shards import is_export_source  # it reads adapters for merging

    tensors = adapter_tensors(stage)
    is_writer = torch.distributed.get_rank() == 0
    every: list = [None] * torch.distributed.get_world_size()
    torch.distributed.gather_object(tensors if is_export_source() else {}, every if is_writer else None, dst=0)

    def write() -> None:
        whole = {name: tensor for part in every for name, tensor in part.items()}
        write_folder(whole, folder, lora=lora, model=model, base=base)

    agreed(f"the adapters in {folder}", write)


def write_folder(
    tensors: Mapping[str, torch.Tensor], folder: str, *, lora: LoraConfig, model: ModelConfig, base: str | None
) -> None:
    """Write whole adapters under PEFT's names as a folder of PEFT's."""
    save_file(dict(tensors), os.path.join(folder, ADAPTER_WEIGHTS), metadata={"format": "pt"})
    with open(os.path.join(folder, ADAPTER_CONFIG), "w", encoding="utf-8") as file:
        json.dump(peft_config(lora, model, base), file, indent=1)


def peft_config(lora: LoraConfig, model: ModelConfig, base: str | None) -> dict:
    """What adapter_config.json says of these adapters."""
    alpha = int(lora.alpha) if lora.alpha == int(lora.alpha) else lora.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.lora_rank,
        "lora_alpha": alpha,
        "lora_dropout": lora.lora_dropout,
        "use_rslora": lora.lora_use_rslora,
        "target_modules": names_of_targets(lora, model),
        "bias": "none",
        "fan_in_fan_out": False,
        "modules_to_save": None,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def names_of_targets(lora: LoraConfig, model: ModelConfig) -> list[str]:
    """Ends of names that stand for exactly the modules with adapters; whole names where no ends do."""
    modules = target_modules(model)
    ends = sorted({name.rsplit(".", 1)[-1] for name in modules if lora.targets(name)})
    with_adapter = [name for name in modules if lora.targets(name)]
    by_end = [name for name in modules if name.rsplit(".", 1)[-1] in ends]
    return ends if by_end == with_adapter else with_adapter


@torch.no_grad()
def load_adapters(
    stage: Iterable[torch.nn.Module], folder: str, lora: LoraConfig, model: ModelConfig, *, for_critic: bool = False
) -> None:
    """Fill this rank's adapters from a PEFT folder. for_critic: without its adapter on the output layer, if any.

    Raises CheckpointError if it is of another rank, scale or set of modules, or has what we do not compute.
    """
    check_config(folder, lora)
    path = os.path.join(folder, ADAPTER_WEIGHTS)
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    expected = adapter_names(lora, model)
    # PEFT writes the frozen output layer itself beside its adapter (save_embedding_layers): the base has it.
    left_out = (*_COPIES, *(_OF_OUTPUT if for_critic else ()))
    tensors = {name: tensor for name, tensor in tensors.items() if name not in left_out}
    for problem, names in (("has no", expected - set(tensors)), ("has, beside the targets,", set(tensors) - expected)):
        if names:
            raise CheckpointError(
                f"{path} {problem} {min(names)} ({len(names)} of {len(expected)}). Fix: --lora-target-modules as it was"
                f" made with ({ADAPTER_CONFIG})."
            )
    for name, tensor in tensors.items():
        if not tensor.is_floating_point():
            raise CheckpointError(f"{path}: tensor {name!r} is of the data type {tensor.dtype}, no float.")
        if not is_finite(tensor):
            raise CheckpointError(f"{path}: of tensor {name!r} {describe_non_finite(tensor)}.")
    for adapter, part in parts(stage):
        whole = [tensors[f"{_PREFIX}{part.module}.{kind}.weight"] for kind in _MATRICES]
        shapes = [list(matrix.shape) for matrix in gathered(adapter, part)]
        if [list(matrix.shape) for matrix in whole] != shapes:
            raise CheckpointError(
                f"{path}: {part.module} has A and B of {[list(m.shape) for m in whole]}, the model and --lora-rank"
                f" {lora.lora_rank} ask for {shapes}."
            )
        put_whole(adapter, part, whole[0], whole[1])


def first_adapters(stage: Iterable[torch.nn.Module], config: RunConfig) -> None:
    """Fill adapters from --lora-load, or as --lora-init says.

    Raises CheckpointError.
    """
    if config.lora.lora_load:
        is_critic = config.role == "critic"
        load_adapters(stage, config.lora.lora_load, config.lora, config.model, for_critic=is_critic)
    else:
        start_adapters(stage, config.lora, seed=config.observability.seed)


def check_config(folder: str, lora: LoraConfig) -> None:
    """Raise CheckpointError where a folder's configuration does not say what the flags say."""
    path = os.path.join(folder, ADAPTER_CONFIG)
    try:
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} is no configuration of LoRA adapters: {error!r}") from None
    whole = config.get("modules_to_save")
    if whole:
        raise CheckpointError(
            f"{path} is of adapters with whole copies of {', '.join(whole)} (modules_to_save) that were trained beside"
            " its adapters, and --lora-rank trains adapters alone. Fix: merge it into a model of its own (PEFT's"
            " merge_and_unload), and take that as --hf-checkpoint without --lora-load."
        )
    odd = [name for name, values in _ONLY.items() if name in config and config[name] not in values]
    if config.get("peft_type", "LORA") != "LORA" or odd:
        what = ", ".join(f"{name} {config[name]!r}" for name in odd) or config["peft_type"]
        raise CheckpointError(f"{path}: adapters with {what} are not supported, only plain LoRA.")
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    if rank != lora.lora_rank or not math.isclose(scale, lora.scale):
        rslora = " --lora-use-rslora" if config.get("use_rslora") else ""
        raise CheckpointError(
            f"{path} is of rank {rank} and scale {scale:g}, the flags of {lora.lora_rank} and {lora.scale:g}. Fix:"
            f" --lora-rank {rank} --lora-alpha {alpha:g}{rslora}."
        )
