"""Values, rewards and KL of tokens -> one advantage and one return per token: PPO, REINFORCE++, distillation,
whitening.

Rows are samples, padded on the right with mask 0. Column t belongs to tokens[t]: a value is that of the state in which
tokens[t] was chosen. Masked tokens (prompt, tool output, padding) were chosen by nobody: they are no steps of the
trajectory, and what comes after them is the next step of what came before.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch

from slime_like.config.loss import LossConfig
from slime_like.errors import DataError
from slime_like.records import TrainSample

#: Adds a tensor up over all ranks that hold other samples, and returns the sum.
SumAcrossRanks = Callable[[torch.Tensor], torch.Tensor]

#: Added to the variance when advantages are whitened.
WHITEN_EPSILON = 1e-8


def token_rewards(
    rewards: torch.Tensor, mask: torch.Tensor, *, kl: torch.Tensor | None = None, kl_coef: float = 0.0
) -> torch.Tensor:
    """Reward of each token: the sample's at its last trained token, minus kl_coef x KL at every trained one
    (InstructGPT, arXiv:2203.02155, eq. 2).

    rewards: [N]; mask: [N, T] bool; kl: [N, T], log-prob under the policy minus that under the reference (k1), read
    where the mask is. Returns [N, T]; a sample without trained tokens has no reward.
    Example: reward 1, mask [0, 1, 0, 1], kl .5 everywhere, kl_coef .1 -> [0, -.05, 0, .95].
    """
    places = torch.arange(1, mask.size(1) + 1, device=mask.device)
    last = (places * mask).max(1, keepdim=True).values
    terminal = (places == last) & mask
    per_token = torch.where(terminal, rewards[:, None], torch.zeros_like(rewards[:, None]))
    return per_token if kl is None else per_token - kl_coef * torch.where(mask, kl, torch.zeros_like(kl))


def gae(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, *, gamma: float, lambd: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation over the trained tokens (arXiv:1506.02438, eq. 11 to 16).

    rewards, values: [N, T], read where mask [N, T] (bool) is. Behind the last trained token the value is 0. Returns
    (advantages [N, T], returns [N, T] = advantages + values), both 0 where the mask is not.
    Example: rewards [0, 1], values [.5, .25], gamma = lambda = 1 -> advantages [.5, .75], returns [1, 1].
    """
    advantages = torch.zeros_like(values)
    next_value, carried = torch.zeros_like(values[:, 0]), torch.zeros_like(values[:, 0])
    for t in reversed(range(values.size(1))):
        here = mask[:, t]
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        carried = torch.where(here, delta + gamma * lambd * carried, carried)
        next_value = torch.where(here, values[:, t], next_value)
        advantages[:, t] = torch.where(here, carried, torch.zeros_like(carried))
    return advantages, torch.where(mask, advantages + values, torch.zeros_like(values))


def discounted_returns(rewards: torch.Tensor, mask: torch.Tensor, *, gamma: float) -> torch.Tensor:
    """Sum of each trained token's and all later ones' rewards, discounted (REINFORCE++, arXiv:2501.03262, sec.

    3.1; Sutton and Barto, eq. 3.8).
    rewards: [N, T], read where mask [N, T] (bool) is. Returns [N, T], 0 where the mask is not; a masked token is no
    step of the discount.
    Example: rewards [0, 9, 1], mask [1, 0, 1], gamma .5 -> [.5, 0, 1].
    """
    returns, carried = torch.zeros_like(rewards), torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.size(1))):
        carried = torch.where(mask[:, t], rewards[:, t] + gamma * carried, carried)
        returns[:, t] = torch.where(mask[:, t], carried, torch.zeros_like(carried))
    return returns


def whiten(advantages: torch.Tensor, mask: torch.Tensor, sum_across_ranks: SumAcrossRanks) -> torch.Tensor:
    """Trained tokens' advantages shifted to mean 0 and scaled to variance 1 over the samples of all ranks
    (arXiv:2006.05990, sec. 3.3: C67).

    advantages, mask: [N, T] of this rank, which may have no sample at all. The variance has count - 1 in its
    denominator. Returns [N, T], 0 where the mask is not. Example: [1, 2, 3] -> [-1, 0, 1].
    """
    masked = torch.where(mask, advantages.double(), 0.0)
    total = sum_across_ranks(torch.stack([mask.double().sum(), masked.sum()]))
    count, mean = total[0], total[1] / total[0].clamp(min=1)
    centered = torch.where(mask, masked - mean, 0.0)
    variance = sum_across_ranks(centered.square().sum()[None])[0] / (count - 1).clamp(min=1)
    return (centered / torch.sqrt(variance + WHITEN_EPSILON)).to(advantages.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Batch:
    """Samples as rows."""

    samples: Sequence[TrainSample]
    mask: torch.Tensor  # [N, T] bool
    rewards: torch.Tensor  # [N] float64
    kl: torch.Tensor  # [N, T] float64; zeros without --kl-coef


def _padded_batch(samples: Sequence[TrainSample], loss: LossConfig) -> _Batch:
    longest = max((len(sample.tokens) for sample in samples), default=1)
    mask = np.zeros((len(samples), longest), dtype=bool)
    for row, sample in enumerate(samples):
        mask[row, 1 : len(sample.tokens)] = sample.loss_mask[1:] != 0  # nothing predicts the first token
    rewards = torch.tensor([sample.reward for sample in samples], dtype=torch.float64)
    return _Batch(
        samples=samples,
        mask=torch.from_numpy(mask),
        rewards=rewards,
        kl=_padded(samples, "kl", longest, is_needed=loss.kl_coef > 0),
    )


def _gae(batch: _Batch, loss: LossConfig) -> tuple[torch.Tensor, torch.Tensor]:
    rewards, values = (
        token_rewards(batch.rewards, batch.mask, kl=batch.kl, kl_coef=loss.kl_coef),
        _padded(batch.samples, "values", batch.mask.size(1)),
    )
    return gae(rewards, values, batch.mask, gamma=loss.gamma, lambd=loss.lambd)


def _returns(batch: _Batch, loss: LossConfig) -> tuple[torch.Tensor, torch.Tensor]:
    rewards = token_rewards(batch.rewards, batch.mask, kl=batch.kl, kl_coef=loss.kl_coef)
    returns = discounted_returns(rewards, batch.mask, gamma=loss.gamma)
    return returns, returns


def _of_samples(batch: _Batch, loss: LossConfig) -> tuple[torch.Tensor, torch.Tensor]:
    own = _padded(batch.samples, "advantages", batch.mask.size(1)) - loss.kl_coef * batch.kl
    advantages = torch.where(batch.mask, own, 0.0)
    return advantages, advantages


#: Estimator.tokens -> (advantages, returns), [N, T] float64 each, 0 where the mask is not.
TOKEN_ADVANTAGES: dict[str | None, Callable[[_Batch, LossConfig], tuple[torch.Tensor, torch.Tensor]]] = {
    "gae": _gae,
    "returns": _returns,
    None: _of_samples,
}


def sample_advantages(
    samples: Sequence[TrainSample], loss: LossConfig, sum_across_ranks: SumAcrossRanks
) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """(advantages, returns) of samples: [T] float32 each, laid out as in records.Sample. They carry what the loss flags
    ask for: `values` (ppo), `kl` (--kl-coef) and `distillation` (--use-opd).

    The estimator's row says how (config/algorithms.py): GAE, discounted returns, or the advantages that the samples
    bring, minus --kl-coef x KL where that is asked for. Then --use-opd subtracts its penalty (the reverse KL per token;
    Agarwal et al., arXiv:2306.13649), and with --normalize-advantages the advantages are whitened over the samples of
    all ranks: every rank must call, with its own share.

    Computed in float64, so that a sample's numbers do not depend on what it was batched with. Raises DataError naming a
    sample without the arrays that it needs.
    """
    batch = _padded_batch(samples, loss)
    where, longest = batch.mask, batch.mask.size(1)
    advantages, returns = TOKEN_ADVANTAGES[loss.estimator.tokens](batch, loss)
    if loss.use_opd:
        advantages = torch.where(where, advantages - loss.opd_kl_coef * _padded(samples, "distillation", longest), 0.0)
    if loss.normalize_advantages:
        advantages = whiten(advantages, where, sum_across_ranks)
    lengths = [len(sample.tokens) for sample in samples]
    return _rows(advantages, lengths), _rows(returns, lengths)


def _padded(samples: Sequence[TrainSample], name: str, longest: int, *, is_needed: bool = True) -> torch.Tensor:
    """[N, T] float64 of one array of the samples; zeros if it is not needed."""
    padded = np.zeros((len(samples), longest))
    for row, sample in enumerate(samples if is_needed else ()):
        padded[row, : len(sample.tokens)] = _array(sample, name)
    return torch.from_numpy(padded)


def _rows(padded: torch.Tensor, lengths: Sequence[int]) -> list[np.ndarray]:
    return [row[:length].astype(np.float32) for row, length in zip(padded.numpy(), lengths, strict=True)]


def _array(sample: TrainSample, name: str) -> np.ndarray:
    array = getattr(sample, name)
    if array is None or len(array) != len(sample.tokens):
        who, length = f"sample {sample.prompt_index}/{sample.sample_index}", len(sample.tokens)
        raise DataError(
            f"{who} of {length} tokens has {'no' if array is None else len(array)} {name}, which its advantages need."
        )
    return array
