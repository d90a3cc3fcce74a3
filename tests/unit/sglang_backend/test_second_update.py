"""What is read from SGLang's sources, against small classes and against the installed SGLang's own layers."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from slime_like.config.quantisation import SCHEMES
from slime_like.sglang_backend.second_update import exchanged_parameters, second_update_problem

FACTS = (("_is_cpu", False), ("self.block_quant", True))


def exchanged(tmp_path, body: str) -> tuple[str, ...] | None:
    source = "class Layer:\n  def process_weights_after_loading(self, layer):\n"
    (tmp_path / "layer.py").write_text(source + textwrap.indent(textwrap.dedent(body), "    "))
    return exchanged_parameters(str(tmp_path / "layer.py"), "Layer", FACTS)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("layer.weight = Parameter(layer.weight.t())", ("weight",)),
        ("layer.weight.data = layer.weight.data.t()", ()),
        ("if _is_cpu:\n  layer.weight = Parameter(w)\nelse:\n  layer.weight.data = w", ()),
        ("if _is_cpu:\n  layer.weight.data = w\nelse:\n  layer.weight = torch.nn.Parameter(w)", ("weight",)),
        ("if self.block_quant:\n  return\nlayer.weight = Parameter(w)", ()),
        ("if self.block_quant and unknown():\n  return\nlayer.weight = Parameter(w)", ("weight",)),
        ("if _is_cpu and unknown():\n  layer.weight = Parameter(w)", ()),
        ("if not _is_cpu or unknown():\n  return\nlayer.weight = Parameter(w)", ()),
        ("other.weight = Parameter(w)", ()),
    ],
)
def test_which_parameters_are_exchanged(tmp_path, body, expected):
    assert exchanged(tmp_path, body) == expected


def test_methods_that_are_called(tmp_path):
    (tmp_path / "layer.py").write_text(
        "class Layer:\n  def process_weights_after_loading(self, layer):\n    self.pack(layer)\n"
        "  def pack(self, layer):\n    layer.scale = Parameter(s)\n"
    )
    assert exchanged_parameters(str(tmp_path / "layer.py"), "Layer", FACTS) == ("scale",)


def test_the_installed_sglang():
    """0.5.23: its class of int8 layers keeps the transpose, block fp8 is written in place."""
    fp8, int8 = SCHEMES["fp8"].engine_config, SCHEMES["int8"].engine_config
    assert second_update_problem(fp8, experts=True) is None
    problem = second_update_problem(int8, experts=False)
    assert problem is not None and "W8A8Int8LinearMethod exchanges weight, weight_scale" in problem
    per_tensor = {key: value for key, value in fp8.items() if key != "weight_block_size"}
    assert "Fp8LinearMethod exchanges" in (second_update_problem(per_tensor, experts=False) or "")


def test_what_cannot_be_known(tmp_path):
    assert "'awq' is not known here" in (second_update_problem({"quant_method": "awq"}, experts=False) or "")
    problem = second_update_problem(SCHEMES["int8"].engine_config, experts=False, package=str(tmp_path))
    assert problem is not None and "has no W8A8Int8LinearMethod.process_weights_after_loading" in problem


_DRY_CALL = """
from slime_like.sglang_backend import cpu_compat
cpu_compat.install()
import torch
from sglang.srt.layers.quantization import fp8, w8a8_int8

for module, method in (
    (w8a8_int8, w8a8_int8.W8A8Int8LinearMethod(w8a8_int8.W8A8Int8Config({}))),
    (fp8, fp8.Fp8LinearMethod(fp8.Fp8Config(True, "dynamic", None, [128, 128]))),
):
    module._is_cpu = False  # as it is imported on CUDA
    layer = torch.nn.Module()
    layer.deepgemm_mxfp8_input, layer.tp_group = None, None
    method.create_weights(layer, 128, [128], 128, 128, torch.bfloat16, weight_loader=lambda *args: None)
    method.process_weights_after_loading(layer)
    print(type(method).__name__, hasattr(layer.weight, "weight_loader"))
"""


@pytest.mark.long_run
def test_what_sglangs_layers_do(tmp_path):
    """The same answer from the layers themselves, made in a process of their own."""
    done = subprocess.run([sys.executable, "-c", _DRY_CALL], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.splitlines()[-2:] == ["W8A8Int8LinearMethod False", "Fp8LinearMethod True"], done.stderr
