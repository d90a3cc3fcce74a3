"""A tiny reward model as a user would bring one, and what transformers itself says of a sequence."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, Qwen3Config

TINY = Path(__file__).parents[2] / "models" / "tiny-qwen3"


def make_reward_model(
    folder: Path,
    *,
    seed: int = 0,
    num_labels: int = 1,
    pad_token_id: int | None = None,
    tokenizer: bool = True,
    **overrides,
) -> Path:
    """Write a random fp32 Qwen3 classifier whose scores differ by about one from sample to sample.

    With the tiny model's tokenizer.
    """
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    }
    sizes |= {"vocab_size": 512, "max_position_embeddings": 512, "num_labels": num_labels, "pad_token_id": pad_token_id}
    torch.manual_seed(seed)
    model = AutoModelForSequenceClassification.from_config(Qwen3Config(**(sizes | overrides)), dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.ones_like(parameter) if "norm" in name else 0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    if tokenizer:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(TINY / name, folder / name)
    return folder


def hf_scores(folder: Path, sequences: list[np.ndarray]) -> list[float]:
    """One forward pass a sequence, no padding anywhere: the scores that batching must not change."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return [
            float(model(input_ids=torch.from_numpy(np.asarray(sequence, dtype=np.int64))[None]).logits[0, 0])
            for sequence in sequences
        ]
