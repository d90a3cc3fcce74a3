"""Adapters in a Megatron checkpoint: nothing of the base, the same tensors under every layout."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from megatron.core import parallel_state
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from slime_like.config.lora import LoraConfig
from slime_like.config.lora_targets import COLUMN, ROW, target_modules
from slime_like.config.model import ModelConfig
from slime_like.errors import CheckpointError
from slime_like.megatron_backend.lora.build import parts
from slime_like.megatron_backend.model.value_head import has_value_head

_SPLIT = {COLUMN: {"lora_b": 0}, ROW: {"lora_a": 1}}


#: A critic's head among what a checkpoint of adapters holds.
_HEAD = "value_head."


def sharded_adapters(stage: Sequence[torch.nn.Module]) -> dict:
    """Megatron's description of every A and B here, by the HF module that they belong to, and of a critic's head."""
    sharded = {}
    everywhere = {
        "tp_group": parallel_state.get_tensor_model_parallel_group(),
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
    }
    of_experts = {
        "tp_group": parallel_state.get_expert_tensor_parallel_group(),
        "dp_cp_group": parallel_state.get_expert_data_parallel_group(),
    }
    for adapter, part in parts(stage):
        groups = of_experts if adapter.shape.is_expert else everywhere
        prefix = f"adapters.{part.module}."
        axes = _SPLIT.get(adapter.shape.split, {})
        state = make_sharded_tensors_for_checkpoint(part.state_dict(keep_vars=True), prefix, axes, (), **groups)
        if adapter.shape.num_rows is not None:  # another tensor parallel size pads the vocabulary to another length
            name = prefix + "lora_b"
            state[name] = dataclasses.replace(state[name], allow_shape_mismatch=True)
        if adapter.halves():
            name = prefix + "lora_b"
            state[name] = apply_swiglu_sharded_factory(state[name], ())
        sharded.update(state)
    for head in _heads(stage):
        state = head.state_dict(keep_vars=True)
        sharded.update(make_sharded_tensors_for_checkpoint(state, _HEAD, {}, (), **everywhere))
    return sharded


def _heads(stage: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """A critic's, on its last pipeline stage; none elsewhere."""
    return [chunk.output_layer for chunk in stage if has_value_head(chunk)]


@torch.no_grad()
def take_adapters(stage: Sequence[torch.nn.Module], loaded: Mapping[str, torch.Tensor]) -> None:
    """Fill this rank's adapters, and a critic's head, with what a checkpoint gave for sharded_adapters()."""
    for _, part in parts(stage):
        for name, matrix in part.named_parameters():
            matrix.copy_(loaded[f"adapters.{part.module}.{name}"])
    for head in _heads(stage):
        head.weight.copy_(loaded[f"{_HEAD}weight"])


def adapter_record(lora: LoraConfig, model: ModelConfig) -> dict:
    """What must agree between a checkpoint's adapters and the flags, as JSON."""
    modules = [name for name in target_modules(model) if lora.targets(name)]
    return {"rank": lora.lora_rank, "scale": lora.scale, "modules": modules}


def check_record(path: str, saved: dict | None, lora: LoraConfig | None, model: ModelConfig) -> None:
    """Raise CheckpointError if a checkpoint's record is not of these adapters; None: of whole weights."""
    if saved is not None and lora is None:
        raise CheckpointError(
            f"{path} holds adapters of rank {saved['rank']}, not a model. Fix: --lora-rank {saved['rank']} and the"
            " other --lora flags of its run; for whole weights merge them (its PEFT folder, or --save-hf)."
        )
    if saved is None or lora is None:
        return
    ours = adapter_record(lora, model)
    differing = [f"{name} {saved[name]} in it, {ours[name]} by the flags" for name in ("rank", "scale") if
                 saved[name] != ours[name]]  # fmt: skip
    if set(saved["modules"]) != set(ours["modules"]):
        odd = sorted(set(saved["modules"]) ^ set(ours["modules"]))
        differing.append(f"modules, as {odd[0]} ({len(odd)} in all)")
    if differing:
        raise CheckpointError(f"{path} holds other adapters: {'; '.join(differing)}. Fix: the --lora flags of its run.")
