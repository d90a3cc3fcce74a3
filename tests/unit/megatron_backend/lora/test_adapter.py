"""What one adapter adds: in Megatron's order of rows, as its delta says, nothing while it is switched off."""

from __future__ import annotations

import pytest
import torch

from slime_like.megatron_backend.hf.tables.row import GATE_UP, GATE_UP_JOINED, PLAIN, QKV
from slime_like.megatron_backend.lora.adapter import dropping
from tests.unit.megatron_backend.lora.toy import adapter_on, group_of_one, stage_with


@pytest.fixture(scope="module")
def group():
    with group_of_one() as world:
        yield world


def by_hand(part, hidden, scale):
    return scale * hidden @ part.lora_a.T @ part.lora_b.T


def test_rows_of_query_key_and_value_are_grouped_as_megatrons(group):
    """Two groups of two query heads, a key and a value, of two channels each; keys have no adapter."""
    adapter, _ = adapter_on(group, (8, 4, 4), {0: "self_attn.q_proj", 2: "self_attn.v_proj"}, layout=QKV)
    hidden = torch.randn(5, 1, 3)
    gain, parts = adapter(hidden), adapter.parts
    queries, values = by_hand(parts[0], hidden, 3.0), by_hand(parts[2], hidden, 3.0)
    keys = torch.zeros(5, 1, 2)
    expected = torch.cat([queries[..., :4], keys, values[..., :2], queries[..., 4:], keys, values[..., 2:]], -1)
    torch.testing.assert_close(gain, expected)


def test_gate_stands_before_up(group):
    adapter, _ = adapter_on(group, (4, 4), {0: "mlp.gate_proj", 1: "mlp.up_proj"}, layout=GATE_UP)
    hidden = torch.randn(2, 1, 3)
    torch.testing.assert_close(adapter(hidden)[..., 4:], by_hand(adapter.parts[1], hidden, 3.0))
    assert list(dict(adapter.named_parameters())) == [
        *("gate_proj.lora_a", "gate_proj.lora_b", "up_proj.lora_a", "up_proj.lora_b"),
    ]


@pytest.mark.parametrize(
    ("layout", "sizes", "names"),
    [
        (PLAIN, (4,), {0: "o_proj"}),
        (GATE_UP_JOINED, (8,), {0: "gate_up_proj"}),
        (GATE_UP, (4, 4), {1: "up_proj"}),
        (QKV, (8, 4, 4), {0: "q_proj", 1: "k_proj", 2: "v_proj"}),
        (QKV, (8, 4, 4), {1: "k_proj"}),
    ],
)
def test_the_delta_is_what_the_output_gains(group, layout, sizes, names):
    adapter, _ = adapter_on(group, sizes, names, layout=layout)
    hidden = torch.randn(6, 1, 3)
    torch.testing.assert_close(adapter(hidden), hidden @ adapter.delta().T)
    assert adapter.delta().shape == (sum(sizes), 3)


def test_a_layer_without_its_adapter_is_its_base(group):
    adapter, switch = adapter_on(group, (4,), {0: "o_proj"})
    stage, hidden = stage_with(adapter, 3, 4), torch.randn(2, 1, 3)
    linear = stage[0][0]
    bare = torch.nn.functional.linear(hidden, linear.weight)
    torch.testing.assert_close(linear(hidden)[0], bare + by_hand(adapter.parts[0], hidden, 3.0))
    with switch.off():
        assert torch.equal(linear(hidden)[0], bare) and not adapter.counts
    assert adapter.counts and not torch.equal(linear(hidden)[0], bare)


def test_input_is_dropped_in_train_steps_only(group):
    adapter, switch = adapter_on(
        group, (8,), {0: "o_proj"}, num_inputs=8, lora_rank=8, lora_alpha=8.0, lora_dropout=0.25
    )
    with torch.no_grad():
        for matrix in adapter.parameters():
            matrix.copy_(torch.eye(8))
    ones = torch.ones(1000, 1, 8)
    assert torch.equal(adapter(ones), ones)
    with dropping(switch):
        kept = adapter(ones)
    assert kept.detach().unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert float((kept == 0).float().mean()) == pytest.approx(0.25, abs=0.03)
    assert torch.equal(adapter(ones), ones)
    with dropping(None):
        pass
