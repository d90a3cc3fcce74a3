"""Write a small model with weights drawn from a seed: what the quickstart and the tests start from.

usage: make_tiny_model.py OUT [--seed 0] [--model models/tiny-qwen3] [--reward]

OUT gets config, tokenizer and model.safetensors (fp32). The same seed gives the same bytes on the same torch.
--reward: a reward model of the same layers, with one output instead of a vocabulary.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.utils import logging as transformers_logging

DEFAULT_MODEL = Path(__file__).resolve().parent.parent / "models" / "tiny-qwen3"


def make_model(out: Path, *, seed: int, model: Path = DEFAULT_MODEL, reward: bool = False) -> int:
    """Fill `out` from the folder `model` and the seed. Returns the number of parameters (tied ones counted once)."""
    if not (model / "config.json").is_file():
        raise SystemExit(
            f"make_tiny_model: {model} has no config.json. Ready-made ones:"
            f" {', '.join(sorted(p.name for p in DEFAULT_MODEL.parent.iterdir()))}"
        )
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(model, **({"num_labels": 1} if reward else {}))
    network = (AutoModelForSequenceClassification if reward else AutoModelForCausalLM).from_config(
        config, dtype=torch.float32
    )
    out.mkdir(parents=True, exist_ok=True)
    network.save_pretrained(out)
    # The source's own files win over what transformers rewrote, so that the folder reads like its origin.
    # All tiny models share one tokenizer.
    files = {path.name: path for folder in (DEFAULT_MODEL, model) for path in sorted(folder.glob("*.json"))}
    for name, path in files.items():
        if not (reward and name == "config.json"):  # the origin's is a language model's
            shutil.copyfile(path, out / name)
    return sum(parameter.numel() for parameter in network.parameters())


def main() -> None:
    """Command line; prints one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="Folder to write.")
    parser.add_argument("--seed", type=int, default=0, help="Seed of the weights.")
    parser.add_argument(
        "--model",
        type=Path,
        default=DEFAULT_MODEL,
        help="Folder with config.json; without a tokenizer of its own it gets tiny-qwen3's.",
    )
    parser.add_argument("--reward", action="store_true", help="A reward model: a sequence classifier with one output.")
    args = parser.parse_args()
    transformers_logging.disable_progress_bar()
    parameters = make_model(args.out, seed=args.seed, model=args.model, reward=args.reward)
    json.dump({"folder": str(args.out), "parameters": parameters, "seed": args.seed}, sys.stdout)
    print()


if __name__ == "__main__":
    main()
