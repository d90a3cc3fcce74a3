"""Layers that cannot have an adapter are refused by name, and what a call of one gave is told apart."""

from __future__ import annotations

import pytest
import torch

from slime_like.config.lora_targets import COLUMN, TargetMatrix
from slime_like.errors import ConfigError
from slime_like.megatron_backend.lora.layers import called, linear_of, tell_norm, weights_of


class OneForAll(torch.nn.Linear):
    """Stands where transformer-engine's grouped layer would."""


@pytest.mark.parametrize(
    ("name", "place", "layer"),
    [
        ("self_attention.linear_qkv", "self_attention.linear_qkv", torch.nn.Linear),
        ("mlp.experts.local_experts.0.linear_fc1", "mlp.experts.linear_fc1", OneForAll),
    ],
)
def test_layers_of_another_kind_are_refused(name, place, layer):
    parent = torch.nn.Module()
    *folders, last = place.split(".")
    inner = parent
    for folder in folders:
        inner.add_module(folder, torch.nn.Module())
        inner = inner.get_submodule(folder)
    inner.add_module(last, layer(2, 2))
    with pytest.raises(ConfigError, match=f"{name} is a {layer.__name__}; adapters are for ColumnParallelLinear"):
        linear_of(parent, TargetMatrix(name, ("x",), COLUMN, is_expert="experts" in name))


def test_what_a_norm_gave_is_the_adapters_input():
    before, normed, product, bias = (torch.full((1,), float(number)) for number in range(4))
    assert called((before,), {}, (product, None)) == ((before,), (product, None))
    assert called((), {"input_": before}, (product, bias)) == ((before,), (product, bias))
    assert called((before,), {}, ((product, normed), None)) == ((normed,), (product, None))
    assert called((before,), {}, (product, bias, normed)) == ((normed,), (product, bias))
    assert called((before, [1]), {}, (product, None)) == ((before, [1]), (product, None))


def test_only_a_layer_with_a_norm_is_asked_for_it():
    plain, fused = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    fused.return_layernorm_output = False
    for linear in (plain, fused):
        tell_norm(linear)
    assert fused.return_layernorm_output and not hasattr(plain, "return_layernorm_output")
    tell_norm(fused, wanted=False)
    assert not fused.return_layernorm_output


def test_matrices_of_grouped_experts_come_in_their_order():
    grouped = torch.nn.Module()
    grouped.num_gemms = 11
    for number in reversed(range(11)):
        grouped.register_parameter(f"weight{number}", torch.nn.Parameter(torch.full((1, 1), float(number))))
    assert [weight.item() for weight in weights_of(grouped)] == list(range(11))
    plain = torch.nn.Linear(2, 2)
    assert weights_of(plain) == [plain.weight]
