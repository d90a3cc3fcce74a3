"""Write a GGUF file's model as a plain Hugging Face folder: config, safetensors, tokenizer with its chat template.

usage: from_gguf.py GGUF OUT [--dtype bfloat16]

What transformers reads of GGUF can be written (Llama, Qwen2, Qwen3 … in any of llama.cpp's quantisations). The numbers
are the file's, unpacked: OUT has no quantization_config, so train.py, an engine and transformers take it as any other.
Needs the packages gguf and accelerate: `pip install gguf accelerate` or slime-like[examples].
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from slime_like.errors import DataError, UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def convert(gguf: Path, out: Path, *, dtype: torch.dtype) -> dict:
    """Fill the new folder `out` from the file `gguf`. Returns what it is: model_type, parameters (tied ones once) …

    Weights are unpacked in float32 and rounded to `dtype` once. Raises DataError for a file that is no GGUF, whose
    architecture transformers cannot read, or for a folder that holds something already.
    """
    _check(gguf, out)
    folder, name = str(gguf.parent), gguf.name
    # Newer transformers (5.19) keep the weights packed where there is a kernel for them, unless they are asked not to;
    # older ones (5.12) always unpack and have no such class.
    can_pack = hasattr(transformers, "GgufConfig")
    options = {"quantization_config": transformers.GgufConfig(dequantize=True)} if can_pack else {}
    try:
        unpacked = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32, **options)
        tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name)
    except (ImportError, ValueError, NotImplementedError, KeyError) as error:
        raise DataError(f"{gguf}: transformers cannot read it: {type(error).__name__}: {error}") from error
    config = unpacked.config
    # transformers refuses to save what it loaded from a GGUF, even unpacked: hence a model that knows nothing of it.
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    vars(config).pop("_model_name_or_path", None)  # the file's title, which is no path
    plain = AutoModelForCausalLM.from_config(config, dtype=dtype)
    plain.load_state_dict(unpacked.state_dict(), strict=True)
    plain.generation_config = unpacked.generation_config
    plain.save_pretrained(out)
    tokenizer.save_pretrained(out)
    return {
        "folder": str(out),
        "model_type": config.model_type,
        "parameters": sum(parameter.numel() for parameter in plain.parameters()),
        "dtype": str(dtype).removeprefix("torch."),
        "tied": bool(config.tie_word_embeddings),
        "vocabulary": config.vocab_size,
        "chat_template": tokenizer.chat_template is not None,
    }


def _check(gguf: Path, out: Path) -> None:
    if not gguf.is_file():
        raise DataError(f"{gguf} is no file. Fix: the path of a .gguf file.")
    with gguf.open("rb") as file:
        start = file.read(4)
    if start != b"GGUF":
        raise DataError(f"{gguf} is no GGUF file: it starts with {start!r}, not with b'GGUF'.")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} is there already and not empty. Fix: another folder, or remove it.")


def main(argv: list[str] | None = None) -> int:
    """Command line; prints one JSON line. Returns 0, or 2 for a mistake in what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("gguf", type=Path, help="The file.")
    parser.add_argument("out", type=Path, help="Folder to write; new or empty.")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16", help="What the weights are rounded to.")
    args = parser.parse_args(argv)
    transformers_logging.disable_progress_bar()
    try:
        summary = convert(args.gguf, args.out, dtype=DTYPES[args.dtype])
    except UserError as error:
        print(f"from_gguf: {error}", file=sys.stderr)
        return 2
    print(json.dumps(summary))
    return 0


if __name__ == "__main__":
    sys.exit(main())
