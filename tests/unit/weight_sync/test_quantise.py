"""Eight-bit weights against a plain loop over blocks, and back."""

import pytest
import torch

from slime_like.config.quantisation import SCHEMES
from slime_like.weight_sync.quantise import quantise, undo

NAME = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())
@pytest.mark.parametrize("shape", [(128, 128), (200, 300), (5, 7)])
def test_blocks_are_those_of_a_plain_loop(scheme, shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    (_, values), (name, scale) = quantise(NAME, weight, scheme)
    assert name == NAME + scheme.scale_suffix
    assert tuple(scale.shape) == scheme.scale_shape(*shape)
    high, wide = scheme.rows or shape[0], scheme.columns or shape[1]
    for top in range(0, shape[0], high):
        for left in range(0, shape[1], wide):
            block = weight if scheme.one_scale else weight[top : top + high, left : left + wide]
            block = block.double()
            assert scale[top // high, left // wide] == pytest.approx(
                block.abs().max().item() / scheme.largest, rel=1e-6
            )
    back = undo({NAME: values, name: scale}, scheme)[NAME]
    # Half a step of int8, or half of e4m3's three bits of mantissa, of what the block's largest is.
    step = scale.max().item() * (0.5 if scheme.weight_dtype == "int8" else 16.0)
    assert (back - weight).abs().max() <= step * 1.001


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())
def test_what_is_no_linear_layer_stays(scheme):
    norm = torch.randn(8)
    for name in ("model.norm.weight", "model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.gate.weight"):
        assert quantise(name, norm, scheme) == [(name, norm)]


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())
def test_zeros_stay_zeros(scheme):
    (_, values), (name, scale) = quantise(NAME, torch.zeros(4, 4), scheme)
    assert scale.min() > 0
    assert undo({NAME: values, name: scale}, scheme)[NAME].abs().max() == 0
