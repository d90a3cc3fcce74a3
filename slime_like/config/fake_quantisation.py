"""What --fake-quantization needs of other flags. No torch."""

from __future__ import annotations

from slime_like.config.quantisation import NONE
from slime_like.config.quantisation_rules import quantisation_problems
from slime_like.config.tree import ConfigTree

INT4 = "int4"
#: The largest of int4's numbers that has a counterpart below zero.
INT4_LARGEST = 7.0


def rounding_problems(config: ConfigTree) -> list[str]:
    """What is impossible about weights that are rounded, for engines or in training."""
    return quantisation_problems(config) + fake_quantisation_problems(config)


def fake_quantisation_problems(config: ConfigTree) -> list[str]:
    """Combinations of --fake-quantization with others that are impossible."""
    kind, sync = config.optimizer.fake_quantization, config.sync
    if kind == NONE:
        return []
    wrong = {
        f"--rollout-quantization {sync.rollout_quantization}: engines would round once more what the trainer computes"
        " with. Fix: drop one of them": sync.rollout_quantization != NONE,
        "--lora-rank: an adapter's base is not trained. Fix: drop one of them": config.lora.lora_rank > 0,
        "--custom-weight-transform-path: what engines get would not be what the trainer computes with. Fix: drop one of"
        " them": sync.custom_weight_transform_path is not None,
    }
    return [f"--fake-quantization {kind} with {why}." for why, applies in wrong.items() if applies]
