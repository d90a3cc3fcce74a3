"""Forward and backward over one train step's micro-batches, and what is reported about them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from slime_like.algorithms.losses import PolicyLoss, cispo, gspo, kl_estimate, ppo_clip
from slime_like.algorithms.off_policy import truncated_importance_weights
from slime_like.algorithms.reduce import token_weights, weighted_sum
from slime_like.config.model import ModelConfig, ParallelConfig
from slime_like.config.training import BatchConfig, LossConfig
from slime_like.errors import DataError
from slime_like.megatron_backend.context_parallel import ContextShare, whole
from slime_like.megatron_backend.forward import Scoring, device_of, log_probs_and_entropy, run_model
from slime_like.megatron_backend.model_provider import unwrap
from slime_like.megatron_backend.packing import PackedBatch, num_trained_tokens, pack, plan_micro_batches
from slime_like.records import TrainSample

#: Log-probs of each micro-batch in predicting layout [T]; None on pipeline stages that have no logits.
LogProbs = list[torch.Tensor] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepBatch:
    """This data parallel rank's micro-batches of one train step, and the whole step's size."""

    packs: tuple[PackedBatch, ...]
    num_samples: int
    num_tokens: int
    num_trained_tokens: int


class StepRunner:
    """Runs one model over packed micro-batches: log-probs only, or loss and gradients.

    Means are over the global batch: the same on every layout and however micro-batches are cut.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        *,
        model_config: ModelConfig,
        parallel: ParallelConfig,
        batch: BatchConfig,
        loss: LossConfig,
        temperature: float,
    ):
        self.model = model
        self.loss = loss
        self._batch = batch
        chunk = batch.log_probs_chunk_size if batch.log_probs_chunk_size > 0 else None
        self._scoring = Scoring(vocab_size=model_config.vocab_size, temperature=temperature, chunk_tokens=chunk)
        padded = parallel.sequence_parallel or batch.data_pad_size_multiplier > 1
        self._multiple = parallel.tensor_model_parallel_size * batch.data_pad_size_multiplier if padded else 1
        self._device = device_of(unwrap(model))

    def prepare(self, samples: Sequence[TrainSample]) -> StepBatch:
        """Cut one train step's samples (the same list on every rank) and keep this rank's part. Raises DataError for a sample of one token or none."""
        lengths = [len(s.tokens) for s in samples]
        if not lengths or min(lengths) < 2:
            short = [f"{s.prompt_index}/{s.sample_index}" for s in samples if len(s.tokens) < 2]
            raise DataError(f"a train step needs samples of at least 2 tokens; too short are {short or 'all (there are none)'}.")
        trained = [num_trained_tokens(s) for s in samples]
        weights = token_weights(trained, per_token=self.loss.calculate_per_token_loss)
        share = ContextShare.of_this_rank()
        # Context parallel ranks share each pack, padding included: together they hold as many times the tokens of one GPU.
        limit = self._batch.max_tokens_per_gpu and self._batch.max_tokens_per_gpu * share.size
        plan = plan_micro_batches(
            [share.padded(length) for length in lengths],
            data_parallel_size=parallel_state.get_data_parallel_world_size(),
            batch=dataclasses.replace(self._batch, max_tokens_per_gpu=limit),
        )
        mine = plan[parallel_state.get_data_parallel_rank()]
        return StepBatch(
            packs=tuple(pack(samples, indices, weights, multiple=self._multiple, device=self._device, context=share) for indices in mine),
            num_samples=len(samples),
            num_tokens=sum(lengths),
            num_trained_tokens=sum(trained),
        )

    @torch.no_grad()
    def log_probs(self, batch: StepBatch) -> LogProbs:
        """Log-probs under the present weights; no gradients."""

        def collect(logits, pack_: PackedBatch, non_loss_data: bool = True):
            return self._score(logits, pack_)[0]

        outputs = self._run(batch, collect, forward_only=True)
        return outputs if parallel_state.is_pipeline_last_stage() else None

    def forward_backward(self, batch: StepBatch, *, old: LogProbs = None, reference: LogProbs = None) -> dict[str, float]:
        """Add this step's gradients to the buffers (not yet summed over ranks); returns metrics, equal on every rank.

        old: log-probs that the ratio is taken against; by default the present ones, detached. reference: for the KL loss.
        """
        scale = parallel_state.get_data_parallel_world_size() * len(batch.packs)
        position = {id(p): i for i, p in enumerate(batch.packs)}

        def loss_function(logits, pack_: PackedBatch):
            index = position[id(pack_)]
            log_probs, entropy = self._score(logits, pack_)
            at = pack_.trained
            chosen = {"old": old[index][at] if old else None, "reference": reference[index][at] if reference else None}
            loss, sums, largest = self._loss(log_probs[at], entropy[at], pack_, **chosen)
            # The schedule divides by the number of micro-batches (in place), data parallel averaging by the number of ranks. That these
            # include the context parallel ones, whose gradients are to be summed, the schedule makes good.
            return loss * scale, (sums, largest)

        outputs = self._run(batch, loss_function, forward_only=False)
        return self._reduce(outputs, batch)

    def _run(self, batch: StepBatch, loss_function, *, forward_only: bool) -> list:
        def forward_step(packs, model):
            pack_ = next(packs)
            return run_model(model, pack_), lambda logits, **kwargs: loss_function(logits, pack_, **kwargs)

        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batch.packs),
            model=self.model,
            num_microbatches=len(batch.packs),
            seq_length=max(p.tokens.size(1) for p in batch.packs),
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )

    def _score(self, logits: torch.Tensor, pack_: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        log_probs, entropy = log_probs_and_entropy(logits, pack_.targets, self._scoring)
        return whole(log_probs, pack_.restoring), whole(entropy, pack_.restoring)

    def _loss(self, log_probs, entropy, pack_: PackedBatch, *, old, reference):
        """Loss of one micro-batch, its share of every mean (in the order of _sum_names), and maxima (in the order of _max_names)."""
        weights = pack_.weights
        if self.loss.loss_type == "sft_loss":
            loss = weighted_sum(-log_probs, weights)
            return loss, torch.stack([loss.detach(), weighted_sum(entropy.detach(), weights)]).double(), loss.new_zeros(0)
        old = log_probs.detach() if old is None else old
        policy = self._policy_loss(log_probs, old, pack_)
        corrected, off_policy_sums = self._correct(policy.loss, old, pack_)
        pg_loss, entropy_mean = weighted_sum(corrected, weights), weighted_sum(entropy, weights)
        loss = pg_loss - self.loss.entropy_coef * entropy_mean
        difference = (old - pack_.engine_logprobs).abs()
        sums = [pg_loss, entropy_mean, weighted_sum(policy.clipped, weights), weighted_sum(policy.ratio, weights), weighted_sum(old - log_probs, weights)]
        sums += [difference.sum(), *off_policy_sums]
        if reference is not None:
            kl_loss = weighted_sum(kl_estimate(log_probs, reference, self.loss.kl_loss_type), weights)
            loss = loss + self.loss.kl_loss_coef * kl_loss
            sums += [kl_loss, weighted_sum(kl_estimate(log_probs.detach(), reference, "k3"), weights)]
        largest = difference.max() if len(difference) else difference.sum()
        return loss, torch.stack([loss, *sums]).detach().double(), largest.detach()[None]

    def _policy_loss(self, log_probs: torch.Tensor, old: torch.Tensor, pack_: PackedBatch) -> PolicyLoss:
        bounds = {"clip_low": self.loss.eps_clip, "clip_high": self.loss.clip_high}
        if self.loss.advantage_estimator == "gspo":
            return gspo(log_probs, old, pack_.advantages, pack_.sample_of_token, **bounds)
        if self.loss.advantage_estimator == "cispo":
            return cispo(log_probs, old, pack_.advantages, **bounds)
        return ppo_clip(log_probs, old, pack_.advantages, **bounds, dual_clip=self.loss.eps_clip_c)

    def _correct(self, policy_loss: torch.Tensor, old: torch.Tensor, pack_: PackedBatch) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The loss per token weighted for what engine and trainer disagree on, and sums for train/tis and train/tis_clip_ratio."""
        if not self.loss.use_tis:
            return policy_loss, []
        factors, bounded = truncated_importance_weights(old, pack_.engine_logprobs, low=self.loss.tis_clip_low, high=self.loss.tis_clip)
        return policy_loss * factors, [weighted_sum(factors, pack_.weights), weighted_sum(bounded, pack_.weights)]

    def _sum_names(self) -> list[str]:
        if self.loss.loss_type == "sft_loss":
            return ["train/loss", "train/entropy"]
        names = ["train/loss", "train/pg_loss", "train/entropy", "train/clip_ratio", "train/ratio_mean", "train/ppo_kl", "train/logprob_abs_diff"]
        names += ["train/tis", "train/tis_clip_ratio"] if self.loss.use_tis else []
        return names + (["train/kl_loss", "train/kl"] if self.loss.use_kl_loss else [])

    def _max_names(self) -> list[str]:
        return [] if self.loss.loss_type == "sft_loss" else ["train/logprob_abs_diff_max"]

    def _reduce(self, outputs: list, batch: StepBatch) -> dict[str, float]:
        """Add up micro-batches and data parallel ranks on the last stage, then tell every stage."""
        sum_names, max_names = self._sum_names(), self._max_names()
        sums = torch.zeros(len(sum_names), dtype=torch.float64, device=self._device)
        largest = torch.zeros(len(max_names), dtype=torch.float64, device=self._device)
        for part_sums, part_largest in outputs:
            sums += part_sums
            largest = torch.maximum(largest, part_largest)
        group, last = parallel_state.get_pipeline_model_parallel_group(), parallel_state.get_pipeline_model_parallel_last_rank()
        for tensor, operation in ((sums, torch.distributed.ReduceOp.SUM), (largest, torch.distributed.ReduceOp.MAX)):
            if tensor.numel():
                torch.distributed.all_reduce(tensor, op=operation, group=parallel_state.get_data_parallel_group())
                torch.distributed.broadcast(tensor, last, group=group)
        metrics = dict(zip(sum_names + max_names, torch.cat([sums, largest]).tolist(), strict=True))
        if "train/logprob_abs_diff" in metrics:
            metrics["train/logprob_abs_diff"] /= max(batch.num_trained_tokens, 1)
        return metrics


def split_rollout(samples: Sequence[TrainSample], num_steps: int) -> list[Sequence[TrainSample]]:
    """The samples of each train step, in order; sizes differ by one at most. Raises DataError if a step would be empty."""
    if len(samples) < num_steps:
        raise DataError(f"{len(samples)} samples cannot feed {num_steps} train steps. Fix: --num-steps-per-rollout, or a filter that keeps more groups.")
    bounds = np.linspace(0, len(samples), num_steps + 1).round().astype(int)
    return [samples[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]


def combine_steps(steps: Sequence[dict[str, float]], num_trained_tokens: Sequence[int]) -> dict[str, float]:
    """Metrics of a rollout from those of its train steps: means; maxima for *_max; the last learning rate; token means for the log-prob difference."""
    combined = {}
    for name in steps[0]:
        values = [step[name] for step in steps]
        if name.endswith("_max"):
            combined[name] = max(values)
        elif name == "train/lr":
            combined[name] = values[-1]
        elif name == "train/logprob_abs_diff":
            combined[name] = float(np.average(values, weights=np.maximum(num_trained_tokens, 1e-9)))
        else:
            combined[name] = float(np.mean(values))
    return combined
