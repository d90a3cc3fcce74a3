"""Megatron's linear layers as adapters see them: its own on torch, and those of transformer-engine's."""

from __future__ import annotations

import torch
from megatron.core.extensions import transformer_engine
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from slime_like.config.lora_targets import COLUMN, ROW, WHOLE, TargetMatrix
from slime_like.errors import ConfigError
from slime_like.megatron_backend.model.layer_spec import ReplicatedLinear

_TYPES: dict[str, tuple[type, ...]] = {
    COLUMN: (ColumnParallelLinear,),
    ROW: (RowParallelLinear,),
    WHOLE: (ReplicatedLinear,),
}
if transformer_engine.HAVE_TE:  # else its names are mocks
    _TYPES[COLUMN] += (
        transformer_engine.TEColumnParallelLinear,
        transformer_engine.TELayerNormColumnParallelLinear,
        transformer_engine.TEColumnParallelGroupedLinear,
    )
    _TYPES[ROW] += (transformer_engine.TERowParallelLinear, transformer_engine.TERowParallelGroupedLinear)
    _TYPES[WHOLE] += (transformer_engine.TELinear,)


def linear_of(parent: torch.nn.Module, matrix: TargetMatrix) -> torch.nn.Module:
    """The layer with that matrix: with transformer-engine's grouped experts one for all of them.

    Raises ConfigError for a layer of another kind.
    """
    try:
        linear = parent.get_submodule(matrix.name)
    except AttributeError:
        linear = parent.get_submodule(matrix.row_name.replace("local_experts.{expert}.", ""))
    if not isinstance(linear, _TYPES[matrix.split]):
        known = " or ".join(kind.__name__ for kind in _TYPES[matrix.split])
        raise ConfigError([f"--lora-rank: {matrix.name} is a {type(linear).__name__}; adapters are for {known}."])
    return linear


def weights_of(linear: torch.nn.Module) -> list[torch.Tensor]:
    """Its matrix [outputs here, inputs here], or those of all experts here."""
    if not hasattr(linear, "weight"):
        return [getattr(linear, f"weight{number}") for number in range(linear.num_gemms)]
    return [linear.weight]


def tell_norm(linear: torch.nn.Module, *, wanted: bool = True) -> None:
    """Let a layer with a norm fused into it give what is normed beside its output: what its adapter is for. It has
    computed it anyway, of this rank's tokens. Whoever calls it then needs called().
    """
    if hasattr(linear, "return_layernorm_output"):
        linear.return_layernorm_output = wanted


def called(args: tuple, kwargs: dict, output: tuple) -> tuple[tuple, tuple]:
    """(what the layer's matrix was for: tokens, and with grouped experts how many are each one's; its output and bias)
    of a call of it.

    Megatron's class passes on what transformer-engine's layer gives: (output, normed), (output, bias, normed).
    """
    if isinstance(output[0], tuple):
        (product, normed), bias = output
        return (normed,), (product, bias)
    if len(output) == 3:
        return output[2:], output[:2]
    return args or (kwargs["input_"],), output
