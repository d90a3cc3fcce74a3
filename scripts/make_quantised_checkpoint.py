"""Write a folder with plain HF weights again in eight bits, in the formats that public checkpoints have.

usage: make_quantised_checkpoint.py SOURCE OUT --format fp8|fp8-tensor|int8

fp8:        128x128 blocks, `weight_scale_inv` (as DeepSeek-V3 and Qwen3-FP8)
fp8-tensor: one `weight_scale` a matrix (as static per-tensor FP8 without activation scales)
int8:       one `weight_scale` a row, compressed-tensors (as llm-compressor's W8A8)
Projections and experts become eight bits; the rest, the output layer too, stays as it is.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from slime_like.config.quantisation import SCHEMES, QuantScheme
from slime_like.weight_sync.quantise import quantise

_LEFT_OUT = ["lm_head"]
_TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "symmetric": True, "dynamic": True}
_ROWS = {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True, "dynamic": False}
_FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
_TENSOR = QuantScheme(
    name="fp8-tensor",
    weight_dtype="float8_e4m3fn",
    largest=448.0,
    scale_suffix="_scale",
    rows=0,
    columns=0,
    engine_config=_FP8,
)
#: Format -> how weights are made, and what config.json says of it.
FORMATS: dict[str, tuple[QuantScheme, dict[str, Any]]] = {
    "fp8": (SCHEMES["fp8"], _FP8 | {"weight_block_size": [128, 128]}),
    "fp8-tensor": (_TENSOR, _FP8),
    "int8": (
        SCHEMES["int8"],
        {
            "quant_method": "compressed-tensors",
            "format": "int-quantized",
            "quantization_status": "compressed",
            "ignore": _LEFT_OUT,
            "config_groups": {"group_0": {"targets": ["Linear"], "weights": _ROWS, "input_activations": _TOKENS}},
        },
    ),
}


def make_quantised(source: Path, out: Path, form: str) -> int:
    """Fill `out` from the folder `source`. Returns the number of matrices in eight bits."""
    scheme, config = FORMATS[form]
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise SystemExit(f"make_quantised_checkpoint: {source} has no *.safetensors.")
    out.mkdir(parents=True, exist_ok=True)
    file_of: dict[str, str] = {}
    num_matrices = 0
    for path in files:
        stored: dict[str, torch.Tensor] = {}
        for name, tensor in load_file(path).items():
            parts = dict(quantise(name, tensor, scheme))
            num_matrices += len(parts) > 1
            if not (scheme.rows or scheme.columns):
                parts |= {key: scale.reshape(1) for key, scale in parts.items() if key != name}
            stored |= parts
        save_file({name: tensor.contiguous() for name, tensor in stored.items()}, out / path.name, {"format": "pt"})
        file_of |= dict.fromkeys(stored, path.name)
    for path in source.glob("*.json"):
        shutil.copyfile(path, out / path.name)
    if len(files) > 1:
        index = {"metadata": {}, "weight_map": file_of}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    described = json.loads((out / "config.json").read_text()) | {"quantization_config": config}
    (out / "config.json").write_text(json.dumps(described, indent=1))
    return num_matrices


def main() -> None:
    """Command line; prints one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("source", type=Path, help="Folder with plain weights.")
    parser.add_argument("out", type=Path, help="Folder to write.")
    parser.add_argument("--format", choices=sorted(FORMATS), required=True, help="As at the top of this file.")
    args = parser.parse_args()
    matrices = make_quantised(args.source, args.out, args.format)
    json.dump({"folder": str(args.out), "matrices": matrices, "format": args.format}, sys.stdout)
    print()


if __name__ == "__main__":
    main()
