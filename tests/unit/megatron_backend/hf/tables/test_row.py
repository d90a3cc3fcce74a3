"""One row of a name table: its names, and the layers that have it."""

from __future__ import annotations

import pytest

from slime_like.megatron_backend.hf.tables.row import WeightRow


def test_transformer_engines_name_is_another_one():
    assert WeightRow("a", ("b",)).megatron_names == ("a",)
    assert WeightRow("a", ("b",), transformer_engine="c").megatron_names == ("a", "c")


@pytest.mark.parametrize(
    ("name", "dense", "experts"),
    [
        ("decoder.layers.{layer}.self_attention.linear_qkv.weight", True, True),
        ("decoder.layers.{layer}.mlp.linear_fc1.weight", True, False),
        ("decoder.layers.{layer}.mlp.router.weight", False, True),
        ("decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc1.weight", False, True),
    ],
)
def test_which_layers_have_it(name: str, dense: bool, experts: bool):
    row = WeightRow(name, ("x",))
    assert (row.is_in_layer(has_experts=False), row.is_in_layer(has_experts=True)) == (dense, experts)
