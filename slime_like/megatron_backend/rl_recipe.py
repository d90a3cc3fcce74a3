"""GRPO and PPO in the trainer's verbs: what a policy's and a critic's ranks do with one rollout.

Runs inside each rank's process.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import torch

from slime_like.errors import DataError, RunError
from slime_like.megatron_backend.hf.save import save_hf_folder
from slime_like.megatron_backend.model.provider import trains_in_bf16
from slime_like.megatron_backend.reference import brought_log_probs, checked_row
from slime_like.megatron_backend.step.advantages import Parts, StepScores, with_picked_tokens, with_token_advantages
from slime_like.megatron_backend.step.batch import Batch, Scores, StepBatch
from slime_like.megatron_backend.step.critic import with_value_targets
from slime_like.megatron_backend.step.loss_spec import LossSpec
from slime_like.megatron_backend.step.objective import TOKEN_MEANS
from slime_like.megatron_backend.worker import TrainWorker
from slime_like.records import BASE, REFERENCE, TEACHER, StepReport, TrainSample, WeightsRef

#: The loss that the flags ask for.
_CONFIGURED = LossSpec()


class Recipe:
    """What every role's ranks can do beside training. All methods are collective, as the verbs are."""

    def __init__(self, worker: TrainWorker):
        self.worker = worker
        self.config = worker.config

    def save(self, num_rollouts_done: int, client_state: dict) -> str:
        """Write a Megatron checkpoint to --save; returns its path.

        With --async-save it counts only when finish_save() is True.
        """
        folder = self.config.checkpoint.save
        assert folder, "save() needs --save"
        return self.worker.save_state(
            folder, weights=BASE, num_rollouts_done=num_rollouts_done, client_state=client_state
        )

    def save_hf(self, folder: str) -> None:
        """Write an HF folder: weights, and config and tokenizer files of --hf-checkpoint.

        Replaces the folder if it exists.
        """
        template, dtype = (
            self.config.checkpoint.hf_checkpoint,
            torch.bfloat16 if trains_in_bf16(self.config.optimizer) else torch.float32,
        )
        assert template, "--hf-checkpoint is checked before workers are built"
        save_hf_folder(lambda: self.worker.export(BASE), folder, template=template, dtype=dtype)

    def take_weights(self, folder: str) -> None:
        """Continue with the weights of an HF folder: how a reference on GPUs of its own follows the policy."""
        self.worker.load_state(folder, weights=BASE)

    def _step(self, batches: Sequence[StepBatch], number: int, where: str, loss_name: str) -> dict[str, float]:
        """One train step: gradients of the configured loss, and the optimizer. Raises RunError if one is not finite."""
        where = f"trainer rank {self.worker.rank}, {where}, train step {number + 1} of {len(batches)}"
        metrics = self.worker.forward_backward(batches[number], _CONFIGURED, weights=BASE, accumulates=False).metrics
        if not math.isfinite(metrics[loss_name]):
            raise RunError(f"{where}: the loss is {metrics[loss_name]}. Metrics: {metrics}")
        done = self.worker.optim_step(None, weights=BASE, passes_follow=number + 1 < len(batches))
        if not math.isfinite(done["train/grad_norm"]):
            raise RunError(f"{where}: the gradient norm is {done['train/grad_norm']}.")
        return metrics | done


class PolicyRecipe(Recipe):
    """A policy's rollout step; with a config of role "ref" it only scores."""

    def train(self, step: int, samples: Sequence[TrainSample]) -> StepReport:
        """Train on one rollout: num_steps_per_rollout optimizer steps over consecutive parts of `samples`.

        `samples` is the whole rollout, the same list on every rank; each rank takes its part. With one step the ratio
        is taken against the step's own log-probs; with more, against those under the weights before the first step.
        """
        batches = self.ready(split_rollout(samples, self.config.num_steps_per_rollout))
        if self.config.loss.reset_optimizer_states:
            self.worker.reset_optimizer(weights=BASE)
        reports = [self._step(batches, number, f"rollout step {step}", "train/loss") for number in range(len(batches))]
        if self.worker.holds(REFERENCE) and self.config.loss.updates_reference_after(step):
            self.worker.copy_weights(BASE, REFERENCE)
        report = _report(step, batches, reports)
        computed = sum(batch.num_computed_tokens for batch in batches)
        saved = {"perf/computed_tokens": computed, "perf/shared_prompt_tokens_saved": report.num_tokens - computed}
        return dataclasses.replace(report, metrics=report.metrics | {name: float(n) for name, n in saved.items()})

    def ready(self, parts: Parts) -> list[StepBatch]:
        """Each train step's batch, with its advantages and all that its loss compares with.

        Everything under the present weights.
        """
        loss = self.config.loss
        batches = [self.worker.prepare(part) for part in parts]
        if self.config.is_sft:
            return batches
        nothing: list[Scores] = [None] * len(batches)
        old = list(nothing)
        for number in range(self._first_to_score(len(batches)), len(batches)):
            outputs = self.worker.forward(batches[number], weights=BASE, record_routing=True)
            batches[number], old[number] = outputs.batch, outputs.scores["log_probs"]
        reference = nothing
        if loss.use_kl_loss or loss.kl_in_trainer:
            batches, reference = self._with_reference(parts, batches, old)
        teacher = self._frozen_log_probs(TEACHER, batches) if loss.use_opd and self.worker.holds(TEACHER) else nothing
        scores = [StepScores(old=o, reference=r, teacher=t) for o, r, t in zip(old, reference, teacher, strict=True)]
        if loss.has_token_advantages:
            batches = with_token_advantages(parts, batches, loss, scores)
        if loss.picks_tokens:
            batches = with_picked_tokens(parts, batches, loss, scores)
        compared = [
            dataclasses.replace(score, reference=score.reference if loss.use_kl_loss else None) for score in scores
        ]
        return [
            batch.with_columns(old=s.old, reference=s.reference, teacher=s.teacher)
            for batch, s in zip(batches, compared, strict=True)
        ]

    def _first_to_score(self, num_steps: int) -> int:
        """The first train step of a rollout whose samples are scored before it; num_steps: none are.

        The first step's own pass has the weights from before it and so the same log-probs and experts: with one step
        there is nothing to score, unless the advantages are made of the scores.
        """
        loss, adapters = self.config.loss, self.config.adapters
        if loss.kl_in_trainer or loss.use_opd or loss.picks_tokens:
            return 0
        if not (loss.get_mismatch_metrics or not loss.use_rollout_logprobs or loss.use_routing_replay):
            return num_steps
        if loss.score_first_step:
            return 0
        # What a dropout leaves of an adapter is in a train step only: later steps are held against a pass without it.
        drops = adapters is not None and adapters.lora_dropout > 0
        return 0 if drops and num_steps > 1 else 1

    def log_probs(self, samples: Batch, *, weights: WeightsRef = BASE) -> list[np.ndarray]:
        """Log-probs [T] of every sample, as records.Sample defines them, in the order of `samples`.

        The same on every rank.
        """
        return self.worker.forward(samples, weights=weights).rows("log_probs")

    def probe(self, samples: Sequence[TrainSample]) -> list[np.ndarray]:
        """Log-probs [T] of every sample at temperature 1: what an engine says of a prompt."""
        return self.worker.forward(samples, weights=BASE, temperature=1.0).rows("log_probs")

    def kl_to_reference(self, samples: Sequence[TrainSample]) -> list[np.ndarray]:
        """Log-prob of the policy minus the reference's, [T] of every sample: what --kl-coef punishes."""
        batch = self.worker.prepare(samples)
        if self.worker.holds(REFERENCE):
            reference = self.log_probs(batch, weights=REFERENCE)
        else:
            reference = [checked_row(sample) for sample in samples]
        return [ours - theirs for ours, theirs in zip(self.log_probs(batch), reference, strict=True)]

    def _with_reference(
        self, parts: Parts, batches: list[StepBatch], old: Sequence[Scores]
    ) -> tuple[list[StepBatch], list[Scores]]:
        """The batches, and the reference's log-probs of each: our own reference's, or what a reference on other GPUs
        said, which the samples bring.

        A reference that is still the policy (--ref-load is where it started and nothing is trained yet, or the
        reference has just followed it) says what the policy says: the same numbers without a pass of its own.
        """
        if not self.worker.holds(REFERENCE):
            return batches, [brought_log_probs(part, batch.packs) for part, batch in zip(parts, batches, strict=True)]
        replays = self.config.loss.use_routing_replay or self.config.loss.use_rollout_routing_replay
        if replays or not self.worker.is_base(REFERENCE):  # a reference chooses its experts itself
            return batches, self._frozen_log_probs(REFERENCE, batches)
        first = self._first_to_score(len(batches))
        # The first train step's own pass; but adapters round otherwise where gradients are wanted, or drop some of what
        # they see, and packs of another size round otherwise, too.
        own = int(first > 0 and self.config.adapters is None and batches[0].scoring_packs is None)
        passed = self._frozen_log_probs(REFERENCE, batches[own:first]) if first > own else []
        marked = [dataclasses.replace(batch, own_reference=True) for batch in batches[:own]]
        return [*marked, *batches[own:]], [*([None] * own), *passed, *old[first:]]

    def _frozen_log_probs(self, weights: WeightsRef, batches: Sequence[StepBatch]) -> list[Scores]:
        with self.worker.using(weights):
            return [self.worker.forward(batch, weights=weights).scores["log_probs"] for batch in batches]


class CriticRecipe(Recipe):
    """A critic's rollout step (role "critic")."""

    def train(self, step: int, samples: Sequence[TrainSample]) -> StepReport:
        """Fit the critic to the returns of one rollout, in as many steps as the policy takes.

        `samples` carry its `values`.
        """
        parts = split_rollout(samples, self.config.num_steps_per_rollout)
        batches = with_value_targets(parts, [self.worker.prepare(part) for part in parts], self.config.loss)
        reports = []
        for number in range(len(batches)):
            done = self._step(batches, number, f"critic, rollout step {step}", "train/value_loss")
            own_names = {"train/critic_grad_norm": done.pop("train/grad_norm"), "train/critic_lr": done.pop("train/lr")}
            reports.append(done | own_names)
        return _report(step, batches, reports)

    def values(self, samples: Batch) -> list[np.ndarray]:
        """The critic's values [T] of every sample, as records.TrainSample defines them, in the order of `samples`.

        The same on every rank.
        """
        return self.worker.forward(samples, weights=BASE).rows("values")


def recipe_of(worker: TrainWorker) -> PolicyRecipe | CriticRecipe:
    """What the ranks of the worker's role do."""
    return (CriticRecipe if worker.config.role == "critic" else PolicyRecipe)(worker)


def _report(step: int, batches: Sequence[StepBatch], metrics: Sequence[dict[str, float]]) -> StepReport:
    """What a rollout's train steps did, from the batch and the metrics of each."""
    return StepReport(
        step=step,
        num_train_steps=len(batches),
        num_samples=sum(batch.num_samples for batch in batches),
        num_tokens=sum(batch.num_tokens for batch in batches),
        metrics=combine_steps(metrics, [batch.num_trained_tokens for batch in batches]),
    )


def split_rollout(samples: Sequence[TrainSample], num_steps: int) -> list[Sequence[TrainSample]]:
    """The samples of each train step, in order; sizes differ by one at most.

    Raises DataError if a step would be empty.
    """
    if len(samples) < num_steps:
        raise DataError(
            f"{len(samples)} samples cannot feed {num_steps} train steps. Fix: --num-steps-per-rollout, or a filter"
            " that keeps more groups."
        )
    bounds = np.linspace(0, len(samples), num_steps + 1).round().astype(int)
    return [samples[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]


def combine_steps(steps: Sequence[dict[str, float]], num_trained_tokens: Sequence[int]) -> dict[str, float]:
    """Metrics of a rollout from those of its train steps: means; maxima for *_max; the last learning rate.

    Token means where they are.
    """
    combined = {}
    for name in steps[0]:
        values = [step[name] for step in steps]
        if name.endswith("_max"):
            combined[name] = max(values)
        elif name == "train/lr":
            combined[name] = values[-1]
        elif name.startswith(TOKEN_MEANS):
            combined[name] = float(np.average(values, weights=np.maximum(num_trained_tokens, 1e-9)))
        else:
            combined[name] = float(np.mean(values))
    return combined
