"""Which tokens of a train step clip_cov and kl_cov treat apart: those whose log-prob and advantage go together
(arXiv:2505.22617, sec. 4).

Such tokens take entropy from the policy. They are picked before the step, over all its tokens on all ranks, from
log-probs under the weights before the rollout's first step: so it does not matter how the step is cut into
micro-batches. With one step a rollout these are the paper's; with several the paper's are those of the weights at each
step, of which ours are the start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch

from slime_like.config.loss import LossConfig
from slime_like.records import TrainSample


@dataclasses.dataclass(frozen=True, kw_only=True)
class Collectives:
    """How this rank's tokens meet those of the ranks that hold other samples.

    Both are collective; the defaults are those of one rank alone.
    """

    sum: Callable[[torch.Tensor], torch.Tensor] = torch.clone  # any shape, the same on all -> their sum
    gather: Callable[[torch.Tensor], torch.Tensor] = torch.clone  # [n, 2], the same n on all -> [n x ranks, 2]


def draws(samples: Sequence[TrainSample], places: Sequence[int]) -> np.ndarray:
    """A number from [0, 1) for each trained token of the samples at `places` of a train step, in order.

    The same wherever a sample goes.
    """
    parts = [np.zeros(0)]
    for place in places:
        sample = samples[place]
        newest = int(sample.weight_versions.max(initial=0))  # another rollout of the same prompt draws anew
        seed = [abs(int(part)) for part in (sample.prompt_index, sample.sample_index, place, newest)]
        parts.append(np.random.default_rng(seed).random(np.count_nonzero(sample.loss_mask[1:])))
    return np.concatenate(parts)


def covariances(log_probs: torch.Tensor, advantages: torch.Tensor, ranks: Collectives) -> tuple[torch.Tensor, int]:
    """([K] float64: (log-prob - mean log-prob) x (advantage - mean advantage), tokens of all ranks); means are over the
    tokens of all ranks.

    Example: log-probs [-1, -3], advantages [1, 0] -> [.5, .5], 2.
    """
    log_probs, advantages = log_probs.detach().double(), advantages.double()
    totals = ranks.sum(torch.stack([log_probs.new_tensor(float(len(log_probs))), log_probs.sum(), advantages.sum()]))
    count = totals[0].clamp(min=1)
    return (log_probs - totals[1] / count) * (advantages - totals[2] / count), int(totals[0].item())


def lowest(scores: torch.Tensor, ties: torch.Tensor, count: int, ranks: Collectives) -> torch.Tensor:
    """[K] bool: whether a token is among the `count` lowest of all ranks.

    Infinite scores never are; equal ones are told apart by `ties` [K].
    Example: scores [3, 1, inf, 1], ties [0, .5, 0, .2], count 1 -> [False, False, False, True].
    """
    mine = _ordered(torch.stack([scores, ties], dim=1))[:count]
    padding = mine.new_full((count - len(mine), 2), torch.inf)
    best = _ordered(ranks.gather(torch.cat([mine, padding])))[:count]
    best = best[torch.isfinite(best[:, 0])]
    if not len(best):
        return torch.zeros_like(scores, dtype=torch.bool)
    last_score, last_tie = best[-1]
    return (scores < last_score) | ((scores == last_score) & (ties <= last_tie))


def picked(
    log_probs: torch.Tensor, advantages: torch.Tensor, ties: torch.Tensor, loss: LossConfig, ranks: Collectives
) -> torch.Tensor:
    """[K] float32: 1.0 at this rank's tokens of a train step that the policy loss treats apart. Collective.

    ties: [K], from draws.
    band (clip_cov): --clip-cov-ratio of the step's tokens, drawn among those with --clip-cov-lb < covariance <
    --clip-cov-ub, all of them where they are fewer. highest (kl_cov): --kl-cov-ratio of the tokens, those of highest
    covariance. One token at least.
    """
    covariance, num_tokens = covariances(log_probs, advantages, ranks)
    if loss.policy_row.picks == "band":
        share = loss.clip_cov_ratio
        inside = (covariance > loss.clip_cov_lb) & (covariance < loss.clip_cov_ub)
        scores = torch.where(inside, ties, torch.inf)
    else:
        share, scores = loss.kl_cov_ratio, -covariance
    return lowest(scores, ties, max(int(share * num_tokens), 1), ranks).float()


def _ordered(pairs: torch.Tensor) -> torch.Tensor:
    """[n, 2] by the first column, equal ones by the second."""
    pairs = pairs[torch.argsort(pairs[:, 1], stable=True)]
    return pairs[torch.argsort(pairs[:, 0], stable=True)]
