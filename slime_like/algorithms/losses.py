"""Loss per token: PPO's clipped surrogate and its relatives, a critic's clipped error and estimators of the KL divergence.

All tensors are [K]: the trained tokens of a micro-batch. Means are taken in algorithms/reduce.py.
"""

from __future__ import annotations

import dataclasses

import torch

#: low_var_kl is clamped here: a single token of vanishing reference probability must not rule the batch.
LOW_VAR_KL_LIMIT = 10.0
#: exp() of a larger log-ratio overflows fp32's useful range and would turn one token into inf.
LOG_RATIO_LIMIT = 20.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyLoss:
    """PPO's loss per token and what it did; every field is [K]."""

    loss: torch.Tensor
    ratio: torch.Tensor  # detached: new / old probability
    clipped: torch.Tensor  # detached: 1.0 where a bound was active


def ppo_clip(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
) -> PolicyLoss:
    """PPO's clipped surrogate, negated (arXiv:1707.06347, eq. 7).

    The ratio is bounded to [1 - clip_low, 1 + clip_high] (clip-higher: DAPO, arXiv:2503.14476). dual_clip: for negative
    advantages the loss is at most dual_clip x |advantage| (arXiv:1912.09729). old_log_probs carry no gradient.
    """
    return _clipped_surrogate(log_probs - old_log_probs.detach(), advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)


def gspo(
    log_probs: torch.Tensor, old_log_probs: torch.Tensor, advantages: torch.Tensor, sequences: torch.Tensor, *, clip_low: float, clip_high: float
) -> PolicyLoss:
    """PPO's surrogate with one ratio per sample: the geometric mean of its tokens' ratios (GSPO, arXiv:2507.18071, eq. 5 and 7).

    sequences: [K] int64, which sample each token belongs to; a sample's tokens must all be here. The loss of a sample
    stands at each of its tokens, so that a mean over tokens and then samples gives the paper's objective.
    """
    log_ratio = log_probs - old_log_probs.detach()
    count = int(sequences.max()) + 1 if len(sequences) else 0
    totals = log_ratio.new_zeros(count).index_add(0, sequences, log_ratio)
    tokens = log_ratio.new_zeros(count).index_add(0, sequences, torch.ones_like(log_ratio))
    mean = (totals / tokens.clamp(min=1))[sequences]
    return _clipped_surrogate(mean, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=None)


def cispo(log_probs: torch.Tensor, old_log_probs: torch.Tensor, advantages: torch.Tensor, *, clip_low: float, clip_high: float) -> PolicyLoss:
    """REINFORCE weighted by a clipped, detached ratio, so that no token loses its gradient (CISPO, arXiv:2506.13585, eq. 4 and 5)."""
    ratio = torch.exp((log_probs.detach() - old_log_probs.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return PolicyLoss(loss=-weight * advantages * log_probs, ratio=ratio, clipped=(weight != ratio).to(log_probs.dtype))


def reinforce(log_probs: torch.Tensor, old_log_probs: torch.Tensor, advantages: torch.Tensor) -> PolicyLoss:
    """The plain policy gradient: -advantage x log-prob, whatever the ratio is (REINFORCE, Williams 1992, eq. 11). The ratio is only reported."""
    ratio = torch.exp((log_probs.detach() - old_log_probs.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    return PolicyLoss(loss=-advantages * log_probs, ratio=ratio, clipped=torch.zeros_like(ratio))


def _clipped_surrogate(log_ratio: torch.Tensor, advantages: torch.Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None) -> PolicyLoss:
    ratio = torch.exp(log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    unbounded = -ratio * advantages
    bounded = -ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages
    loss = torch.maximum(unbounded, bounded)
    clipped = bounded > unbounded
    if dual_clip is not None:
        limit = -dual_clip * advantages
        beyond = (advantages < 0) & (loss > limit)
        loss = torch.where(beyond, limit, loss)
        clipped = clipped | beyond
    return PolicyLoss(loss=loss, ratio=ratio.detach(), clipped=clipped.detach().to(loss.dtype))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValueLoss:
    """A critic's loss per token; both fields are [K]."""

    loss: torch.Tensor
    clipped: torch.Tensor  # detached: 1.0 where the bound was active


def clipped_value_loss(values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, *, value_clip: float) -> ValueLoss:
    """Half the squared error of a critic that may move by value_clip at most: PPO2's form (arXiv:2005.12729, sec. 2; openai/baselines ppo2).

    .5 x max((V - R)^2, (V_clipped - R)^2) with V_clipped = V_old + clamp(V - V_old, +-value_clip). old_values and returns
    carry no gradient. Example: V 1, V_old 0, R 2, value_clip .5 -> .5 x max(1, 2.25) = 1.125, clipped.
    """
    old_values, returns = old_values.detach(), returns.detach()
    bounded = old_values + (values - old_values).clamp(-value_clip, value_clip)
    free_error, bounded_error = (values - returns).square(), (bounded - returns).square()
    # Within the bound the two errors differ by rounding only, which is no clipping.
    clipped = (bounded_error > free_error) & ((values - old_values).abs() > value_clip)
    return ValueLoss(loss=0.5 * torch.maximum(free_error, bounded_error), clipped=clipped.detach().to(values.dtype))


def kl_estimate(log_probs: torch.Tensor, reference_log_probs: torch.Tensor, kind: str) -> torch.Tensor:
    """Estimate KL(policy || reference) per token from samples of the policy (Schulman, joschu.net/blog/kl-approx.html).

    kind: k1 = log p/q, unbiased and often negative; k2 = half its square; k3 = q/p - 1 - log q/p, unbiased and never
    negative; low_var_kl = k3 clamped to +-10. Differentiable in log_probs. Raises ValueError for another kind.
    """
    reference_log_probs = reference_log_probs.detach()
    if kind == "k1":
        return log_probs - reference_log_probs
    if kind == "k2":
        return 0.5 * (log_probs - reference_log_probs).square()
    if kind in ("k3", "low_var_kl"):
        log_ratio = (reference_log_probs - log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        estimate = torch.expm1(log_ratio) - log_ratio
        return estimate.clamp(-LOW_VAR_KL_LIMIT, LOW_VAR_KL_LIMIT) if kind == "low_var_kl" else estimate
    raise ValueError(f"KL estimator {kind!r} is unknown. Known: k1, k2, k3, low_var_kl.")


def unbiased_kl_estimate(log_probs: torch.Tensor, old_log_probs: torch.Tensor, reference_log_probs: torch.Tensor, kind: str) -> torch.Tensor:
    """kl_estimate of tokens that older weights chose: times new / old probability, which carries gradient (DeepSeek-V3.2, arXiv:2512.02556, eq. 7).

    Its mean over the old policy's tokens is the KL of the new one, and so is its gradient's, which kl_estimate's is not even at ratio 1.
    low_var_kl is clamped after the weight.
    """
    ratio = torch.exp((log_probs - old_log_probs.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    estimate = ratio * kl_estimate(log_probs, reference_log_probs, "k3" if kind == "low_var_kl" else kind)
    return estimate.clamp(-LOW_VAR_KL_LIMIT, LOW_VAR_KL_LIMIT) if kind == "low_var_kl" else estimate
