"""The loss of one micro-batch: policy loss, corrections, KL and entropy put together, and what is
reported about them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from slime_like.algorithms.loss_plugins import LossPlugins
from slime_like.algorithms.losses import kl_estimate, unbiased_kl_estimate
from slime_like.algorithms.off_policy import importance_weights, mismatch, off_policy_sequence_mask, rejected_samples
from slime_like.algorithms.policy_losses import LOG_RATIO_LIMIT, POLICY_LOSSES, LossBatch, TokenLoss
from slime_like.algorithms.reduce import weighted_sum
from slime_like.config.base import PluginArgs
from slime_like.config.loss import LossConfig
from slime_like.errors import RunError

#: These sums are divided by the number of trained tokens of the whole train step; all others already are means.
TOKEN_MEANS = "train/logprob_abs_diff", "train/mismatch_"


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossParts:
    """One micro-batch's share of the loss, and of what is reported."""

    loss: torch.Tensor  # scalar with gradient
    sums: dict[str, torch.Tensor]  # metric -> float64 scalar, to be added up; see TOKEN_MEANS
    maxima: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)


class Objective:
    """The loss that the flags ask for.

    Its shares of all micro-batches of all ranks add up to the loss of the train step.
    """

    def __init__(self, loss: LossConfig, plugins: LossPlugins, args: PluginArgs | None = None):
        self._loss = loss
        self._plugins = plugins
        self._args = args

    def __call__(self, batch: LossBatch) -> LossParts:
        """Loss and metrics of one micro-batch.

        Raises RunError if a user's function gives something else than it should.
        """
        if self._loss.loss_type == "sft_loss":
            loss = weighted_sum(-batch.log_probs, batch.weights)
            return LossParts(
                loss=loss,
                sums=_plain({"train/loss": loss, "train/entropy": weighted_sum(batch.entropy, batch.weights)}),
            )
        if self._loss.loss_type == "custom_loss":
            return self._custom_loss(batch)
        return self._policy_gradient(batch)

    def _policy_gradient(self, batch: LossBatch) -> LossParts:
        def mean(values: torch.Tensor) -> torch.Tensor:
            return weighted_sum(values, batch.weights)

        policy_loss, reported = self._policy_loss(batch)
        corrected, corrections = self._correct(policy_loss, batch)
        pg_loss, entropy = weighted_sum(corrected, batch.policy_weights), mean(batch.entropy)
        # Without a coefficient entropy is measured only: no gradient of zeros to pass back over the vocabulary.
        loss = pg_loss - self._loss.entropy_coef * entropy if self._loss.entropy_coef else pg_loss
        sums = {
            "train/pg_loss": pg_loss,
            "train/entropy": entropy,
            **{name: mean(values) for name, values in reported.items()},
        }
        sums |= {"train/ppo_kl": mean(batch.old_log_probs - batch.log_probs), **corrections}
        if batch.reference_log_probs is not None:
            kl_loss = mean(self._kl(batch, batch.reference_log_probs))
            loss = loss + self._loss.kl_loss_coef * kl_loss
            sums |= {
                "train/kl_loss": kl_loss,
                "train/kl": mean(kl_estimate(batch.log_probs.detach(), batch.reference_log_probs, "k3")),
            }
        if batch.distillation is not None:
            sums["train/opd_kl"] = mean(batch.distillation)
        return self._with_differences(loss, sums, batch)

    def _with_differences(self, loss: torch.Tensor, sums: dict[str, torch.Tensor], batch: LossBatch) -> LossParts:
        """The parts, with how far engine and trainer are apart."""
        difference = (batch.trainer_log_probs - batch.engine_log_probs).abs()
        sums = {"train/loss": loss, **sums, "train/logprob_abs_diff": difference.sum()}
        maxima = {"train/logprob_abs_diff_max": _largest(difference)}
        if self._loss.get_mismatch_metrics:
            mismatches = mismatch(
                batch.trainer_log_probs, batch.engine_log_probs, low=self._loss.tis_clip_low, high=self._loss.tis_clip
            )
            sums |= {f"train/mismatch_{name}": values.sum() for name, values in mismatches.items()}
            maxima["train/mismatch_ratio_max"] = _largest(mismatches["ratio"])
        return LossParts(loss=loss, sums=_plain(sums), maxima=_plain(maxima))

    def _policy_loss(self, batch: LossBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss of each token, and what is reported of it: [K] each."""
        if self._plugins.policy_loss is None:
            row: TokenLoss = POLICY_LOSSES[self._loss.policy_loss_name](batch, self._loss)
            reported = {"train/clip_ratio": row.clipped, "train/ratio_mean": row.ratio}
            return row.loss, reported if batch.picked is None else reported | {"train/picked_ratio": batch.picked}
        where = f"--custom-policy-loss-function-path {self._loss.custom_policy_loss_function_path}"
        loss, metrics = _per_token(self._plugins.policy_loss(self._args, batch), where, batch.log_probs.shape)
        if batch.log_probs.requires_grad and not loss.requires_grad:
            raise RunError(f"{where}: the loss has no gradient. Fix: compute it from batch.log_probs or batch.entropy.")
        ratio = torch.exp((batch.log_probs.detach() - batch.old_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
        return loss, {"train/ratio_mean": ratio, **metrics}

    def _correct(self, policy_loss: torch.Tensor, batch: LossBatch) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The loss per token corrected for who chose the tokens, and the metrics of that."""
        options = self._loss
        sums: dict[str, torch.Tensor] = {}
        if options.use_tis and self._plugins.tis:
            policy_loss, sums = self._custom_correction(self._plugins.tis, policy_loss, batch)
        elif options.use_tis:
            factors, bounded = importance_weights(
                batch.trainer_log_probs,
                batch.engine_log_probs,
                batch.sample_of_token,
                level=options.tis_level,
                mode=options.tis_mode,
                low=options.tis_clip_low,
                high=options.tis_clip,
            )
            policy_loss = policy_loss * factors
            sums = {
                "train/tis": weighted_sum(factors, batch.weights),
                "train/tis_clip_ratio": weighted_sum(bounded, batch.weights),
            }
        if options.tis_reject_level is not None:
            rejected = rejected_samples(
                batch.trainer_log_probs,
                batch.engine_log_probs,
                batch.sample_of_token,
                level=options.tis_reject_level,
                low=options.tis_reject_low or 0.0,
                high=options.tis_reject_high or float("inf"),
            )
            policy_loss = policy_loss * (1.0 - rejected)
            sums["train/tis_rejected_ratio"] = weighted_sum(rejected, batch.weights)
        if options.use_opsm:
            mask = off_policy_sequence_mask(
                batch.log_probs,
                batch.engine_log_probs,
                batch.advantages,
                batch.sample_of_token,
                delta=options.opsm_delta,
            )
            policy_loss = policy_loss * mask
            sums["train/opsm_masked_ratio"] = weighted_sum(1.0 - mask, batch.weights)
        return policy_loss, sums

    def _kl(self, batch: LossBatch, reference: torch.Tensor) -> torch.Tensor:
        if self._loss.use_unbiased_kl:
            return unbiased_kl_estimate(batch.log_probs, batch.old_log_probs, reference, self._loss.kl_loss_type)
        return kl_estimate(batch.log_probs, reference, self._loss.kl_loss_type)

    def _custom_correction(
        self, function: Callable, policy_loss: torch.Tensor, batch: LossBatch
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        where = f"--custom-tis-function-path {self._loss.custom_tis_function_path}"
        answer = function(
            self._args, policy_loss, batch.trainer_log_probs, batch.engine_log_probs, batch.sample_of_token
        )
        corrected, metrics = _per_token(answer, where, policy_loss.shape)
        return corrected, {name: weighted_sum(values, batch.weights) for name, values in metrics.items()}

    def _custom_loss(self, batch: LossBatch) -> LossParts:
        where = f"--custom-loss-function-path {self._loss.custom_loss_function_path}"
        assert self._plugins.loss is not None, "custom_loss needs its function; config.loss checks that"
        answer = self._plugins.loss(self._args, batch, lambda values: weighted_sum(values, batch.weights))
        loss, metrics = _pair(answer, where, "(loss, metrics)")
        for name, value in {"loss": loss, **metrics}.items():
            if not isinstance(value, torch.Tensor) or value.dim() != 0:
                raise RunError(
                    f"{where}: {name} is {_shape(value)}; it must be a scalar tensor, such as reduce(values) gives."
                )
        if batch.log_probs.requires_grad and not loss.requires_grad:
            raise RunError(f"{where}: the loss has no gradient. Fix: compute it from batch.log_probs or batch.entropy.")
        sums = {f"train/{name}": value for name, value in metrics.items()}
        return self._with_differences(
            loss, {"train/entropy": weighted_sum(batch.entropy, batch.weights), **sums}, batch
        )


def _largest(values: torch.Tensor) -> torch.Tensor:
    return values.max() if len(values) else values.sum()


def _plain(values: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: value.detach().double() for name, value in values.items()}


def _per_token(answer: object, where: str, shape: torch.Size) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """What a user's function of tokens gave: (loss [K], {"train/<name>": [K]}).

    Raises RunError if it is anything else.
    """
    loss, metrics = _pair(answer, where, "(pg_loss, metrics)")
    for name, values in {"pg_loss": loss, **metrics}.items():
        if not isinstance(values, torch.Tensor) or values.shape != shape:
            raise RunError(
                f"{where}: {name} is {_shape(values)}; it must be a tensor of shape {list(shape)}, one value a token."
            )
    return loss, {f"train/{name}": values for name, values in metrics.items()}


def _pair(answer: object, where: str, form: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[1], dict):
        raise RunError(f"{where}: gave {type(answer).__name__}; it must give {form}, where metrics is a dict.")
    return answer


def _shape(value: object) -> str:
    return f"a tensor of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
