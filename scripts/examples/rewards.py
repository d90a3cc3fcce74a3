"""The reward of the examples: one that a model with random weights gets some of, and can learn."""

from __future__ import annotations


def even_tokens(args, sample) -> float:
    """Share of even token ids in a sample's response, 0 to 1: about one half before training."""
    response = sample.tokens[sample.loss_mask.astype(bool)]
    return float((response % 2 == 0).mean()) if len(response) else 0.0
