"""Layers that cannot have an adapter are refused by name."""

from __future__ import annotations

import pytest
import torch

from slime_like.config.lora_targets import COLUMN, TargetMatrix
from slime_like.errors import ConfigError
from slime_like.megatron_backend.lora.build import _linear_of


class TEGroupedLinear(torch.nn.Linear):
    """Stands where transformer-engine's layer would: one for all experts."""


class TELinear(torch.nn.Linear):
    """Of one matrix."""


@pytest.mark.parametrize(
    ("name", "place", "layer"),
    [
        ("self_attention.linear_qkv", "self_attention.linear_qkv", TELinear),
        ("mlp.experts.local_experts.0.linear_fc1", "mlp.experts.linear_fc1", TEGroupedLinear),
    ],
)
def test_layers_of_transformer_engine_are_refused(name, place, layer):
    parent = torch.nn.Module()
    *folders, last = place.split(".")
    inner = parent
    for folder in folders:
        inner.add_module(folder, torch.nn.Module())
        inner = inner.get_submodule(folder)
    inner.add_module(last, layer(2, 2))
    with pytest.raises(ConfigError, match=f"{name} is transformer-engine's {layer.__name__}. Fix: --attention-backend"):
        _linear_of(parent, TargetMatrix(name, ("x",), COLUMN, is_expert="experts" in name))
