"""Correction for samples whose engine computed other probabilities than the trainer does (other kernels, other precision)."""

from __future__ import annotations

import torch


def truncated_importance_weights(
    trainer_log_probs: torch.Tensor, engine_log_probs: torch.Tensor, *, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Factor on each token's policy loss: trainer's probability / engine's, held in [low, high] (TIS; fengyao.notion.site/off-policy-rl).

    Both [K], of the weights that the samples were generated with. Returns (weights [K], 1.0 where a bound was active [K]); no gradient.
    Example: engine .5, trainer .25, bounds 0 and 2 -> .5; engine .1, trainer .9 -> 2, bounded.
    """
    ratio = torch.exp((trainer_log_probs - engine_log_probs).detach())
    weights = ratio.clamp(low, high)
    return weights, (weights != ratio).to(ratio.dtype)
