"""The policy's loss per token: PPO's clipped surrogate and its relatives, in a table by the names of --policy-loss
(config/algorithms.py).

All tensors are [K]: the trained tokens of a micro-batch, whose samples are all whole. Means are taken in
algorithms/reduce.py, corrections for who chose the tokens in algorithms/off_policy.py: what is here stands for each
token alone, or for its sample, and never for a micro-batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from slime_like.algorithms.off_policy import per_sample
from slime_like.config.loss import LossConfig

#: exp() of a larger log-ratio overflows fp32's useful range and would turn one token into inf.
LOG_RATIO_LIMIT = 20.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossBatch:
    """The K trained tokens of one micro-batch, every sample whole; all [K]. What a user's loss function gets.

    K is 0 for a filler on a rank that has no samples left: the function is called all the same, and must give the same
    metrics.
    """

    log_probs: torch.Tensor  # of the present weights, with gradient
    entropy: torch.Tensor  # nats, with gradient
    #: what the ratio is taken against: the trainer's before the rollout's first step, or the engine's
    old_log_probs: torch.Tensor
    #: the trainer's before the rollout's first step, where it was computed; else the present ones, detached
    trainer_log_probs: torch.Tensor
    engine_log_probs: torch.Tensor
    advantages: torch.Tensor
    sample_of_token: torch.Tensor  # int64
    weights: torch.Tensor  # what each token weighs in a mean over the train step
    #: the same for the policy loss; differ with --custom-pg-loss-reducer-function-path only
    policy_weights: torch.Tensor
    reference_log_probs: torch.Tensor | None = None
    distillation: torch.Tensor | None = None  # log-prob - teacher's before the rollout's first step
    #: 1.0 at tokens that clip_cov or kl_cov treats apart, known before the step (algorithms/covariance.py)
    picked: torch.Tensor | None = None
    metadata: tuple[dict, ...] = ()  # records.Sample.metadata of each sample that sample_of_token counts
    ratio_mask: torch.Tensor | None = None  # which tokens a client's ratio of a whole sample is taken over


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenLoss:
    """A policy loss per token and what it did; every field is [K]."""

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
) -> TokenLoss:
    """PPO's clipped surrogate, negated (arXiv:1707.06347, eq. 7).

    The ratio is bounded to [1 - clip_low, 1 + clip_high] (clip-higher: DAPO, arXiv:2503.14476). dual_clip: for negative
    advantages the loss is at most dual_clip x |advantage| (arXiv:1912.09729). old_log_probs carry no gradient.
    """
    return _clipped_surrogate(
        log_probs - old_log_probs.detach(), advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip
    )


def gspo(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    sequences: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    by_token: bool = False,
) -> TokenLoss:
    """PPO's surrogate with one ratio per sample: the geometric mean of its tokens' ratios (GSPO, arXiv:2507.18071, eq.

    5 and 7).
    sequences: [K] int64, which sample each token belongs to; a sample's tokens must all be here. The loss of a sample
    stands at each of its tokens, so that a mean over tokens and then samples gives the paper's objective.

    by_token: GSPO-token (the paper's sec. 4.3), for advantages that differ within a sample: the same ratio, but its
    gradient at a token is that of the token's own log-prob, sg[s] x p / sg[p]. With equal advantages the two have the
    same gradient.
    """
    log_ratio = log_probs - old_log_probs.detach()
    mean = per_sample(log_ratio, sequences, mean=True)
    if by_token:
        mean = mean.detach() + log_probs - log_probs.detach()
    return _clipped_surrogate(mean, advantages, clip_low=clip_low, clip_high=clip_high, dual_clip=None)


def gmpo(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    sequences: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """Minus the advantage x the geometric mean of a sample's bounded token ratios (GMPO, arXiv:2507.20673, sec. 3).

    Each token's log-ratio is bounded on the side where its clipped term is the smaller one: at most clip_high for a
    positive advantage, at least -clip_low for a negative one. Both are in log space (the paper's range is (e^-0.4,
    e^0.4)). A sample has one advantage. Its loss stands at each of its tokens. Example: ratios 2 and 1/2, advantage 1,
    clip_high log 1.5: -sqrt(1.5 x 1/2).
    """
    log_ratio = log_probs - old_log_probs.detach()
    bounded = torch.where(advantages > 0, log_ratio.clamp(max=clip_high), log_ratio.clamp(min=-clip_low))
    ratio = torch.exp(per_sample(bounded, sequences, mean=True).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    return TokenLoss(loss=-advantages * ratio, ratio=ratio.detach(), clipped=(bounded != log_ratio).to(ratio.dtype))


def sapo(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    temperature_pos: float,
    temperature_neg: float,
) -> TokenLoss:
    """Minus the advantage x a soft gate of the ratio, 4/t sigmoid(t (ratio - 1)) (SAPO, arXiv:2511.20347, sec. 3).

    t is temperature_pos where the advantage is positive, else temperature_neg. At ratio 1 the gradient is the plain
    policy gradient's, and it fades as the ratio leaves 1, on both sides. Nothing is clipped. Example: ratio 1,
    advantage 1, t 1 -> -2, with gradient -1 in the log-prob.
    """
    ratio = torch.exp((log_probs - old_log_probs.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    temperature = torch.where(
        advantages > 0, advantages.new_tensor(temperature_pos), advantages.new_tensor(temperature_neg)
    )
    gate = torch.sigmoid(temperature * (ratio - 1)) * 4 / temperature
    return TokenLoss(loss=-gate * advantages, ratio=ratio.detach(), clipped=torch.zeros_like(ratio.detach()))


def clip_cov(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    picked: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
) -> TokenLoss:
    """PPO's clipped surrogate without the picked tokens, whose loss and gradient are 0 (Clip-Cov, arXiv:2505.22617,
    sec. 4).

    picked: [K], 1.0 at tokens of high covariance, see algorithms/covariance.py. The paper's own bounds are as wide as
    [0, 2].
    """
    bounded = ppo_clip(log_probs, old_log_probs, advantages, clip_low=clip_low, clip_high=clip_high)
    return dataclasses.replace(
        bounded, loss=bounded.loss * (1 - picked), clipped=torch.maximum(bounded.clipped, picked)
    )


def kl_cov(
    log_probs: torch.Tensor,
    old_log_probs: torch.Tensor,
    advantages: torch.Tensor,
    picked: torch.Tensor,
    *,
    kl_coef: float,
) -> TokenLoss:
    """Minus ratio x advantage, unbounded; at the picked tokens plus kl_coef x |log new - log old| (KL-Cov,
    arXiv:2505.22617, sec. 4).

    picked: [K], 1.0 at the tokens of highest covariance, see algorithms/covariance.py. At ratio 1 the penalty has no
    gradient.
    """
    log_ratio = (log_probs - old_log_probs.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = torch.exp(log_ratio)
    return TokenLoss(
        loss=-ratio * advantages + kl_coef * log_ratio.abs() * picked, ratio=ratio.detach(), clipped=picked
    )


def cispo(
    log_probs: torch.Tensor, old_log_probs: torch.Tensor, advantages: torch.Tensor, *, clip_low: float, clip_high: float
) -> TokenLoss:
    """REINFORCE weighted by a clipped, detached ratio, so that no token loses its gradient (CISPO, arXiv:2506.13585,
    eq. 4 and 5).
    """
    ratio = torch.exp((log_probs.detach() - old_log_probs.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    weight = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return TokenLoss(loss=-weight * advantages * log_probs, ratio=ratio, clipped=(weight != ratio).to(log_probs.dtype))


def reinforce(log_probs: torch.Tensor, old_log_probs: torch.Tensor, advantages: torch.Tensor) -> TokenLoss:
    """The plain policy gradient: -advantage x log-prob, whatever the ratio is (REINFORCE, Williams 1992, eq. 11).

    The ratio is only reported.
    """
    ratio = torch.exp((log_probs.detach() - old_log_probs.detach()).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    return TokenLoss(loss=-advantages * log_probs, ratio=ratio, clipped=torch.zeros_like(ratio))


def _clipped_surrogate(
    log_ratio: torch.Tensor, advantages: torch.Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None
) -> TokenLoss:
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
    return TokenLoss(loss=loss, ratio=ratio.detach(), clipped=clipped.detach().to(loss.dtype))


def _bounds(loss: LossConfig) -> dict[str, float]:
    return {"clip_low": loss.eps_clip, "clip_high": loss.clip_high}


def _old(batch: LossBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return batch.log_probs, batch.old_log_probs, batch.advantages


def _picked(batch: LossBatch) -> torch.Tensor:
    assert batch.picked is not None, "the tokens of high covariance are picked before the step"
    return batch.picked


#: --policy-loss -> the loss per token of a micro-batch, as the flags ask for it. The names are those of
#: config.algorithms.POLICY_LOSSES.
POLICY_LOSSES: dict[str, Callable[[LossBatch, LossConfig], TokenLoss]] = {
    "clip": lambda batch, loss: ppo_clip(*_old(batch), **_bounds(loss), dual_clip=loss.eps_clip_c),
    "gspo": lambda batch, loss: gspo(
        *_old(batch), batch.sample_of_token, **_bounds(loss), by_token=loss.varies_within_samples
    ),
    "cispo": lambda batch, loss: cispo(*_old(batch), **_bounds(loss)),
    "gmpo": lambda batch, loss: gmpo(*_old(batch), batch.sample_of_token, **_bounds(loss)),
    "sapo": lambda batch, loss: sapo(
        *_old(batch), temperature_pos=loss.sapo_temperature_pos, temperature_neg=loss.sapo_temperature_neg
    ),
    "clip_cov": lambda batch, loss: clip_cov(*_old(batch), _picked(batch), **_bounds(loss)),
    "kl_cov": lambda batch, loss: kl_cov(*_old(batch), _picked(batch), kl_coef=loss.ppo_kl_coef),
    "reinforce": lambda batch, loss: reinforce(*_old(batch)),
}
