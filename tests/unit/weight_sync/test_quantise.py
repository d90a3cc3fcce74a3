"""Eight-bit weights against a plain loop over blocks, and back."""

import pytest
import torch

from slime_like.config.quantisation import SCHEMES
from slime_like.errors import WeightSyncError
from slime_like.weight_sync.quantise import Quantiser, quantise, undo

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


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())
def test_the_same_weights_give_the_same_bytes_in_any_stride_and_bf16_as_its_own_value(scheme):
    weight = torch.randn(256, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    once, again = quantise(NAME, weight, scheme), quantise(NAME, weight.float().t().contiguous().t(), scheme)
    for (name, tensor), (other_name, other) in zip(once, again, strict=True):
        assert name == other_name and torch.equal(tensor.view(torch.uint8), other.contiguous().view(torch.uint8))


def test_one_scale_of_the_whole_matrix_in_each_block():
    weight = torch.randn(256, 384, generator=torch.Generator().manual_seed(0))
    (_, values), (_, scale) = quantise(NAME, weight, SCHEMES["fp8-per-tensor"])
    assert scale.shape == (2, 3) and scale.unique().numel() == 1
    assert values.float().abs().max() == 448


NORM = "model.layers.0.input_layernorm.weight"
MODEL = {NAME: torch.randn(8, 8), NORM: torch.ones(8)}


@pytest.mark.parametrize("scheme", SCHEMES.values(), ids=SCHEMES.keys())
def test_a_stream_of_a_model_in_order(scheme):
    sent = list(Quantiser(scheme, MODEL).over(MODEL.items()))
    assert [name for name, _ in sent] == [NAME, NAME + scheme.scale_suffix, NORM]
    assert torch.equal(sent[0][1].float(), quantise(NAME, MODEL[NAME], scheme)[0][1].float())


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        (NAME + "_scale_x", torch.ones(8, 1), f"{NAME}_scale_x is no tensor that engines know"),
        ("model.layers.9.mlp.up_proj.weight", torch.ones(8, 8), ".*up_proj.weight is no tensor"),
        (NAME, torch.ones(8, 8, dtype=torch.int8), f"{NAME} is int8 of shape .8, 8., no matrix of at least 16 bits"),
        (NAME, torch.ones(8), f"{NAME} is float32 of shape .8., no matrix"),
        (NORM, torch.ones(8, dtype=torch.int8), f"{NORM} is int8 of shape .8.; engines keep it of a type of at least"),
        (NORM, torch.ones(8).to(torch.float8_e4m3fn), f"{NORM} is float8_e4m3fn of shape .8.; engines keep it"),
    ],
)
def test_what_engines_have_no_place_for_is_not_sent(name, tensor, message):
    stream = Quantiser(SCHEMES["int8"], MODEL).over([*MODEL.items(), (name, tensor)])
    assert len([next(stream) for _ in range(3)]) == 3
    with pytest.raises(WeightSyncError, match=f"^--rollout-quantization int8: {message}"):
        next(stream)


@pytest.mark.parametrize(
    ("suffix", "dtype", "fits"),
    [
        ("", torch.int8, True), ("", torch.float32, False), ("", torch.float8_e4m3fn, False), ("", torch.uint8, False),
        ("_scale", torch.float32, True), ("_scale", torch.bfloat16, False), ("_scale_inv", torch.float32, False),
    ],
)  # fmt: skip
def test_types_are_those_of_the_scheme(suffix, dtype, fits):
    """What any other way of quantising may give."""
    quantiser, tensor = Quantiser(SCHEMES["int8"], MODEL), torch.ones(8, 8).to(dtype)
    if fits:
        quantiser.check(NAME + suffix, tensor)
        return
    with pytest.raises(WeightSyncError, match=NAME + suffix):
        quantiser.check(NAME + suffix, tensor)
