"""Eight-bit products against plain loops: int8 sums in integers, e4m3 by the format's definition, float64."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from slime_like.sglang_backend.cpu_quant import (
    ACTIVATIONS_VARIABLE,
    W8A8,
    W8A16,
    arguments_for,
    asked_for,
    fp8_activations,
    fp8_matmul,
    int8_matmul,
    mixed_experts,
)

BLOCK_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
COMPRESSED_INT8 = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False},
            "input_activations": {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True},
        }
    },
}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def e4m3_numbers() -> list[float]:
    """All 253 finite numbers: four bits of exponent, biased by 7, three of mantissa; the largest exponent has no
    infinity, and its last mantissa is not a number.
    """
    positive = [mantissa / 8 * 2.0**-6 for mantissa in range(8)]
    positive += [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8) if not (e == 15 and m == 7)]
    return sorted({sign * value for value in positive for sign in (-1, 1)})


def test_int8_is_the_sum_of_integers():
    x, weight = (
        random(3, 20),
        torch.randint(-127, 128, (5, 20), generator=torch.Generator().manual_seed(1)).to(torch.int8),
    )
    scale = random(5, 1, seed=2).abs() / 100
    product = int8_matmul(x, weight, scale)
    for token in range(3):
        values = x[token].numpy()
        token_scale = np.float32(np.abs(values).max()) / np.float32(127)
        integers = [round(float(value / token_scale)) for value in values]
        for row in range(5):
            total = sum(a * b for a, b in zip(integers, weight[row].tolist(), strict=True))
            assert product[token, row].item() == pytest.approx(total * float(token_scale) * scale[row].item(), rel=4e-7)


def test_an_empty_token_stays_empty():
    assert int8_matmul(torch.zeros(1, 4), torch.ones(2, 4, dtype=torch.int8), torch.ones(2, 1)).tolist() == [[0, 0]]
    weight = torch.ones(2, 4).to(torch.float8_e4m3fn)
    assert fp8_matmul(torch.zeros(1, 4), weight, torch.ones(2, 1), columns=4, activations=W8A8).tolist() == [[0, 0]]


@pytest.mark.parametrize("activations", [W8A8, W8A16])
def test_fp8_by_the_definition_of_e4m3(activations):
    numbers = e4m3_numbers()
    columns, x = 8, random(3, 20)  # the last block has four columns
    weight = random(5, 20, seed=1).to(torch.float8_e4m3fn)
    scale = random(5, 3, seed=2).abs()
    product = fp8_matmul(x, weight, scale, columns=columns, activations=activations)
    for token in range(3):
        values = x[token].double().tolist()
        if activations == W8A8:
            for start in range(0, 20, columns):
                part = x[token, start : start + columns].numpy()
                token_scale = np.float32(np.abs(part).max()) / np.float32(448)
                nearest = [min(numbers, key=lambda number, v=v: abs(number - v)) for v in (part / token_scale).tolist()]
                values[start : start + columns] = [number * float(token_scale) for number in nearest]
        for row in range(5):
            stored = weight[row].float().tolist()
            assert all(number in numbers for number in stored)
            parts = [
                v * w * scale[row, k // columns].item() for k, (v, w) in enumerate(zip(values, stored, strict=True))
            ]
            tolerance = 4e-7 * sum(map(abs, parts))
            assert product[token, row].item() == pytest.approx(math.fsum(parts), abs=tolerance)


def test_experts_one_token_at_a_time():
    x, gate_up, down = random(6, 4), random(3, 10, 4, seed=1), random(3, 4, 5, seed=2)
    ids = torch.tensor([[0, 2], [2, 0], [1, -1], [-1, -1], [2, 1], [0, 1]])
    weights = random(6, 2, seed=3).abs()
    mixed = mixed_experts(x, weights, ids, lambda rows, e: rows @ gate_up[e].t(), lambda rows, e: rows @ down[e].t())
    for token in range(6):
        expected = torch.zeros(4, dtype=torch.float64)
        for slot, expert in enumerate(ids[token].tolist()):
            if expert >= 0:
                gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
                expected += weights[token, slot].double() * (down[expert].double() @ (gate * gate.sigmoid() * up))
        assert torch.allclose(mixed[token].double(), expected, atol=1e-5)


def test_what_a_server_will_read(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": COMPRESSED_INT8}))
    at = f"--model-path={tmp_path}"
    assert asked_for([at, "--tp-size=2"]) == COMPRESSED_INT8
    override = json.dumps({"quantization_config": BLOCK_FP8})
    assert asked_for(["--model-path", str(tmp_path), "--json-model-override-args", override]) == BLOCK_FP8
    (tmp_path / "config.json").write_text("{}")
    assert asked_for([at]) is None
    assert asked_for([at, "--quantization=fp8"]) == {"quant_method": "fp8"}


def test_weights_that_can_be_computed_with():
    assert arguments_for(BLOCK_FP8) == arguments_for({"quant_method": "w8a8_int8"}) == []
    assert arguments_for(COMPRESSED_INT8) == ["--quantization=w8a8_int8"]


def compressed_with(part: str, **changes) -> dict:
    group = COMPRESSED_INT8["config_groups"]["group_0"]
    return COMPRESSED_INT8 | {"config_groups": {"group_0": group | {part: {**group[part], **changes}}}}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"quant_method": "awq"}, r"'awq' has no kernels without CUDA"),
        ({"quant_method": "fp8"}, r"lost at the first weight sync"),
        (BLOCK_FP8 | {"activation_scheme": "static"}, r"activation_scheme 'static'"),
        (compressed_with("weights", num_bits=4), r"group_0.weights.num_bits 4 instead of 8"),
        (compressed_with("weights", strategy="tensor"), r"group_0.weights.strategy 'tensor' instead of 'channel'"),
        (compressed_with("input_activations", dynamic=False), r"group_0.input_activations.dynamic False"),
        ({"quant_method": "compressed-tensors"}, r"no config_groups"),
    ],
)
def test_weights_that_cannot(config, reason):
    with pytest.raises(ValueError, match=reason):
        arguments_for(config)


def test_activations_by_the_environment(monkeypatch):
    monkeypatch.delenv(ACTIVATIONS_VARIABLE, raising=False)
    assert fp8_activations() == W8A8
    monkeypatch.setenv(ACTIVATIONS_VARIABLE, W8A16)
    assert fp8_activations() == W8A16
    monkeypatch.setenv(ACTIVATIONS_VARIABLE, "w4a4")
    with pytest.raises(ValueError, match="SLIME_LIKE_CPU_FP8=w4a4: it is w8a8 or w8a16"):
        fp8_activations()
