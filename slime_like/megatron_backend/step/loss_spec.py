"""Which loss a trainer takes gradients of: the one that the flags ask for, or a plain sum over tokens of what the
records bring.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import torch

from slime_like.algorithms.policy_losses import LOG_RATIO_LIMIT, LossBatch
from slime_like.algorithms.reduce import weighted_sum
from slime_like.errors import RunError
from slime_like.megatron_backend.step.objective import LossParts

#: One micro-batch and the loss's numbers -> the loss of each token [K], with gradient.
TokenLoss = Callable[[LossBatch, Mapping[str, float]], torch.Tensor]
#: As TokenLoss, but -> (the micro-batch's share of the loss, a scalar with gradient; scalars to be reported by name).
OwnLoss = Callable[[LossBatch, Mapping[str, float]], tuple[torch.Tensor, dict[str, torch.Tensor]]]


@dataclasses.dataclass(frozen=True)
class PlainLoss:
    """A row of PLAIN_LOSSES: the loss of a token, and its numbers with their defaults."""

    of_tokens: TokenLoss
    defaults: Mapping[str, float] = dataclasses.field(default_factory=dict)
    #: what a client's rows must bring for it (records.LossRow.inputs)
    reads: tuple[str, ...] = ()
    one_target: bool = False  # a position cannot have several targets


def _ratio(batch: LossBatch) -> torch.Tensor:
    """Present / sampling probability; who sampled wrote its log-probs into the records."""
    return torch.exp((batch.log_probs - batch.engine_log_probs).clamp(max=LOG_RATIO_LIMIT))


def _cross_entropy(batch: LossBatch, numbers: Mapping[str, float]) -> torch.Tensor:
    return -batch.log_probs


def _importance_sampling(batch: LossBatch, numbers: Mapping[str, float]) -> torch.Tensor:
    return -_ratio(batch) * batch.advantages


def _ppo(batch: LossBatch, numbers: Mapping[str, float]) -> torch.Tensor:
    ratio = _ratio(batch)
    bounded = ratio.clamp(numbers["clip_low_threshold"], numbers["clip_high_threshold"])
    return -torch.minimum(ratio * batch.advantages, bounded * batch.advantages)


def _cispo(batch: LossBatch, numbers: Mapping[str, float]) -> torch.Tensor:
    bounded = _ratio(batch).detach().clamp(numbers["clip_low_threshold"], numbers["clip_high_threshold"])
    return -bounded * batch.log_probs * batch.advantages


def _gspo(batch: LossBatch, numbers: Mapping[str, float]) -> torch.Tensor:
    log_ratio = (batch.log_probs - batch.engine_log_probs).detach()
    mask = batch.ratio_mask
    if mask is None:  # what was not sampled has neither
        mask = (batch.engine_log_probs != 0) | (batch.advantages != 0)
    counted, owner = (mask != 0).to(log_ratio.dtype), batch.sample_of_token
    size = int(owner.max()) + 1 if len(owner) else 0
    totals, counts = (log_ratio.new_zeros(size).index_add(0, owner, x) for x in (log_ratio * counted, counted))
    mean = (totals / counts.clamp(min=1))[owner].clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = torch.exp(mean + batch.log_probs - batch.log_probs.detach())
    bounded = ratio.clamp(numbers["clip_low_threshold"], numbers["clip_high_threshold"])
    return -torch.minimum(ratio * batch.advantages, bounded * batch.advantages)


def _dro(batch: LossBatch, numbers: Mapping[str, float]) -> torch.Tensor:
    penalty = 0.5 * numbers["beta"] * (batch.log_probs - batch.engine_log_probs) ** 2
    return penalty - batch.log_probs * batch.advantages


_OF_POLICY = ("logprobs", "advantages")
#: Sums over the trained tokens, each times its weight in the record. cross_entropy: -log p. importance_sampling: -ratio
#: x advantage, against the log-probs in the record. ppo: the same with the ratio held between two thresholds
#: (arXiv:1707.06347, eq. 7). cispo: -advantage x log p x that held ratio, which has no gradient (arXiv:2506.13585).
#: gspo: as ppo, where all tokens of a sample have the geometric mean of their ratios and each its own gradient
#: (GSPO-token, arXiv:2507.18071, sec. 4.3, and its clipping range). dro: -advantage x log p + beta / 2 x log-ratio
#: squared (arXiv:2405.19107). So they are defined in Tinker's documentation, too.
PLAIN_LOSSES = {
    "cross_entropy": PlainLoss(_cross_entropy),
    "importance_sampling": PlainLoss(_importance_sampling, reads=_OF_POLICY),
    "ppo": PlainLoss(_ppo, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}, reads=_OF_POLICY),
    "cispo": PlainLoss(_cispo, {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}, reads=_OF_POLICY),
    "gspo": PlainLoss(
        _gspo,
        {"clip_low_threshold": 1 - 3e-4, "clip_high_threshold": 1 + 4e-4},
        reads=_OF_POLICY,
        one_target=True,
    ),
    "dro": PlainLoss(_dro, {"beta": 0.05}, reads=_OF_POLICY),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossSpec:
    """What `forward_backward` takes gradients of.

    name: "configured" is the flags' own: a mean over the train step. One of PLAIN_LOSSES, or "custom" with a
    `function`, is a sum over tokens, so that parts of a batch sent in several calls add up. config: the numbers of a
    plain or custom loss. Raises ValueError for another name, or a number that the loss does not have.
    Example: LossSpec(name="ppo", config={"clip_high_threshold": 1.28})
    """

    name: str = "configured"
    config: Mapping[str, float] = dataclasses.field(default_factory=dict)
    function: OwnLoss | None = None

    def __post_init__(self):
        known = ["configured", *PLAIN_LOSSES, "custom"]
        if self.name not in known:
            raise ValueError(f"loss {self.name!r} is unknown. Known: {', '.join(known)}.")
        if (self.name == "custom") != (self.function is not None):
            raise ValueError(f"loss {self.name!r}: a function belongs to the loss 'custom', and to no other.")
        if self.name == "custom":
            return
        names = PLAIN_LOSSES[self.name].defaults if self.name in PLAIN_LOSSES else {}
        if unknown := sorted(set(self.config) - set(names)):
            raise ValueError(
                f"loss {self.name!r} has no {', '.join(unknown)}. It has: {', '.join(names) or 'no numbers'}."
            )

    @property
    def is_configured(self) -> bool:
        """Whether the flags say which loss it is."""
        return self.name == "configured"

    def __call__(self, batch: LossBatch) -> LossParts:
        """One micro-batch's share of a plain or custom loss; `batch.weights` are the records' own.

        Raises RunError if a function gives no such thing.
        """
        if self.function is None:
            row = PLAIN_LOSSES[self.name]
            loss = weighted_sum(row.of_tokens(batch, {**row.defaults, **self.config}), batch.weights)
            return LossParts(loss=loss, sums={"train/loss": loss.detach().double()})
        answer = self.function(batch, self.config)
        if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[1], dict):
            raise RunError(
                f"the loss function gave {type(answer).__name__}; it must give (loss, metrics), where metrics is a"
                " dict."
            )
        loss, metrics = answer
        for name, value in {"loss": loss, **metrics}.items():
            if not isinstance(value, torch.Tensor) or value.dim() != 0:
                raise RunError(f"the loss function's {name} is no scalar tensor.")
        return LossParts(
            loss=loss,
            sums={f"train/{name}": value.detach().double() for name, value in {**metrics, "loss": loss}.items()},
        )
