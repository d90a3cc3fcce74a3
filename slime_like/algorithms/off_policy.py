"""Corrections for samples that other probabilities chose than the trainer's present ones: the engine's (other kernels,
other precision), or older weights.

All tensors are [K]: the trained tokens of a micro-batch, whose samples are all whole; `sequences` [K] int64 says which
sample each belongs to.
"""

from __future__ import annotations

import torch

#: exp() of a larger log-ratio overflows fp32's useful range; a whole sample's product gets there quickly.
LOG_RATIO_LIMIT = 20.0


def importance_weights(
    trainer_log_probs: torch.Tensor,
    engine_log_probs: torch.Tensor,
    sequences: torch.Tensor,
    *,
    level: str,
    mode: str,
    low: float,
    high: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Factor on each token's policy loss: trainer's probability / engine's, bounded to [low, high].

    Both of the weights that generated.
    level: token (TIS, fengyao.notion.site/off-policy-rl), sequence (the product over the sample's tokens: the exact
    importance weight of the whole sample) or geometric (that product's mean per token, as GSPO's ratio,
    arXiv:2507.18071, eq. 7). mode: truncate holds a weight at the bound, mask makes one beyond a bound 0 (IcePop,
    ringtech.notion.site/icepop: M(k) = k inside the bounds, else 0). Returns (weights [K], 1.0 where a bound was active
    [K]); no gradient. Raises ValueError for another level or mode.
    Example: engine .5, trainer .25, bounds 0 and 2 -> .5; engine .1, trainer .9 -> 2, or 0 with mask; bounded.
    """
    log_ratio = (trainer_log_probs - engine_log_probs).detach()
    if level == "sequence":
        log_ratio = per_sample(log_ratio, sequences, mean=False)
    elif level == "geometric":
        log_ratio = per_sample(log_ratio, sequences, mean=True)
    elif level != "token":
        raise ValueError(f"level {level!r} is unknown. Known: token, sequence, geometric.")
    ratio = torch.exp(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    bounded = ratio.clamp(low, high)
    beyond = (bounded != ratio).to(ratio.dtype)
    if mode == "truncate":
        return bounded, beyond
    if mode == "mask":
        return ratio * (1 - beyond), beyond
    raise ValueError(f"mode {mode!r} is unknown. Known: truncate, mask.")


def rejected_samples(
    trainer_log_probs: torch.Tensor,
    engine_log_probs: torch.Tensor,
    sequences: torch.Tensor,
    *,
    level: str,
    low: float,
    high: float,
) -> torch.Tensor:
    """1.0 at every token of a sample whose trainer / engine probability is outside [low, high]; no gradient.

    level: sequence (the product over its tokens) or geometric (that product's mean per token), as in
    importance_weights. The sample counts in the mean all the same, as what IcePop and OPSM make 0 does. Raises
    ValueError for another level. Returns [K].
    """
    if level not in ("sequence", "geometric"):
        raise ValueError(f"level {level!r} is unknown. Known: sequence, geometric.")
    log_ratio = per_sample((trainer_log_probs - engine_log_probs).detach(), sequences, mean=level == "geometric")
    ratio = torch.exp(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    return ((ratio < low) | (ratio > high)).to(ratio.dtype)


def off_policy_sequence_mask(
    log_probs: torch.Tensor,
    sampling_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    sequences: torch.Tensor,
    *,
    delta: float,
) -> torch.Tensor:
    """0.0 at tokens with negative advantage of samples that the policy moved away from, else 1.0 (DeepSeek-V3.2,
    arXiv:2512.02556, eq. 8 and 9).

    Moved away: the mean over the sample's tokens of sampling - new log-prob is above delta. sampling_log_probs are
    those of who chose the tokens (the paper's old policy is what the inference framework returns), so that both other
    weights and other kernels count. What is bad and far away teaches little and destabilises. Returns [K], no gradient.
    """
    distance = per_sample((sampling_log_probs - log_probs).detach(), sequences, mean=True)
    return 1.0 - ((advantages < 0) & (distance > delta)).to(log_probs.dtype)


def mismatch(
    trainer_log_probs: torch.Tensor, engine_log_probs: torch.Tensor, *, low: float, high: float
) -> dict[str, torch.Tensor]:
    """How far the engine's probabilities are from the trainer's, per token; no gradient.

    Means over tokens that the engine chose estimate:
    kl: KL(engine || trainer), k1; k3_kl: the same, never negative (Schulman, joschu.net/blog/kl-approx.html); ratio:
    trainer's / engine's probability, 1 on average; chi2: its chi-squared divergence (ratio^2 - 1); clip_ratio: share
    outside [low, high].
    """
    log_ratio = (trainer_log_probs - engine_log_probs).detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = torch.exp(log_ratio)
    outside = ((ratio < low) | (ratio > high)).to(ratio.dtype)
    return {
        "kl": -log_ratio,
        "k3_kl": torch.expm1(log_ratio) - log_ratio,
        "ratio": ratio,
        "chi2": ratio.square() - 1,
        "clip_ratio": outside,
    }


def per_sample(values: torch.Tensor, sequences: torch.Tensor, *, mean: bool) -> torch.Tensor:
    """[K]: at each token the sum, or mean, over the tokens of its sample. Differentiable."""
    count = int(sequences.max()) + 1 if len(sequences) else 0
    totals = values.new_zeros(count).index_add(0, sequences, values)
    if mean:
        totals = totals / values.new_zeros(count).index_add(0, sequences, torch.ones_like(values)).clamp(min=1)
    return totals[sequences]
