"""Loss per token: a critic's clipped error and estimators of the KL divergence.

Those of the policy are in policy_losses.py.
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
class ValueLoss:
    """A critic's loss per token; both fields are [K]."""

    loss: torch.Tensor
    clipped: torch.Tensor  # detached: 1.0 where the bound was active


def clipped_value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, *, value_clip: float
) -> ValueLoss:
    """Half the squared error of a critic that may move by value_clip at most: PPO2's form (arXiv:2005.12729, sec.

    2; openai/baselines ppo2).
    .5 x max((V - R)^2, (V_clipped - R)^2) with V_clipped = V_old + clamp(V - V_old, +-value_clip). old_values and
    returns carry no gradient. Example: V 1, V_old 0, R 2, value_clip .5 -> .5 x max(1, 2.25) = 1.125, clipped.
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
    negative; low_var_kl = k3 clamped to +-10. Differentiable in log_probs; k3 without gradient where log q/p > 20,
    which is held there. As a loss on policy, where tokens come from p itself, k1's gradient is 0 on average, k2's is
    the KL's, and k3's is that of KL(q || p). Raises ValueError for another kind.
    """
    reference_log_probs = reference_log_probs.detach()
    if kind == "k1":
        return log_probs - reference_log_probs
    if kind == "k2":
        return 0.5 * (log_probs - reference_log_probs).square()
    if kind in ("k3", "low_var_kl"):
        # Held on the side where exp() overflows only: on the other k3 goes on like log p/q, and so does its gradient,
        # 1.
        log_ratio = (reference_log_probs - log_probs).clamp(max=LOG_RATIO_LIMIT)
        estimate = torch.expm1(log_ratio) - log_ratio
        return estimate.clamp(-LOW_VAR_KL_LIMIT, LOW_VAR_KL_LIMIT) if kind == "low_var_kl" else estimate
    raise ValueError(f"KL estimator {kind!r} is unknown. Known: k1, k2, k3, low_var_kl.")


def unbiased_kl_estimate(
    log_probs: torch.Tensor, old_log_probs: torch.Tensor, reference_log_probs: torch.Tensor, kind: str
) -> torch.Tensor:
    """kl_estimate of tokens that older weights chose: times new / old probability, which carries gradient
    (DeepSeek-V3.2, arXiv:2512.02556, eq. 7).

    Its mean over the old policy's tokens is the KL of the new one, and so is its gradient's, which kl_estimate's is not
    even at ratio 1. low_var_kl is clamped after the weight. Where log new/old > 20 the ratio is held, and there is no
    gradient.
    """
    reference_log_probs = reference_log_probs.detach()
    distance = log_probs - old_log_probs.detach()
    ratio = torch.exp(distance.clamp(max=LOG_RATIO_LIMIT))
    estimate = ratio * kl_estimate(log_probs, reference_log_probs, "k3" if kind == "low_var_kl" else kind)
    if kind in ("k3", "low_var_kl"):
        # d/dlog p of r (q/p - 1 - log q/p) is -r log q/p: r q/p depends on old and q alone. Left to autograd it is a
        # difference of two numbers as large as q/p, which fp32 cannot tell from 0 long before exp() overflows, and
        # wholly wrong where the clamp takes one of them away.
        straight = -ratio * (1 + reference_log_probs - log_probs)
        estimate = estimate.detach() + (straight - straight.detach())
    estimate = torch.where(distance <= LOG_RATIO_LIMIT, estimate, estimate.detach())
    return estimate.clamp(-LOW_VAR_KL_LIMIT, LOW_VAR_KL_LIMIT) if kind == "low_var_kl" else estimate
