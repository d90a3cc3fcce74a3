"""The phases of a rollout step, written once: generate, train, sync, save, evaluate. Loops only order them."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from slime_like.errors import RunError
from slime_like.job import ahead
from slime_like.job.preemption import Preemption
from slime_like.job.protocols import Engines, Rollouts, Trainer
from slime_like.job.running import Job
from slime_like.job.saving import Saves
from slime_like.job.tending import Tending
from slime_like.observability.console import ProgressConsole
from slime_like.observability.metrics import MetricsLog, PhaseTimers
from slime_like.observability.tracing import PhaseTrace
from slime_like.records import POLICY, SampleGroup, StepReport, SyncReceipt, TrainSample, WeightsRef
from slime_like.rollout.debug_data import load_rollout, save_rollout
from slime_like.rollout.sample_log import SampleLog
from slime_like.rollout.supervised import supervised_samples
from slime_like.rollout.train_samples import train_samples_of
from slime_like.utils.full_disk import LOST_WRITES
from slime_like.weight_sync.proof.probe import probe_samples

if TYPE_CHECKING:
    from slime_like.cluster.sample_batch import SampleBatch

#: The best and worst answer are printed after the first rollout, every so many, and the last.
ANSWERS_EVERY = 10


@dataclasses.dataclass(frozen=True)
class _Probe:
    """Fixed prompts, and the trainer's log-probs of them."""

    samples: list[TrainSample]
    log_probs: list[np.ndarray]
    seconds: float


@dataclasses.dataclass
class Phases:
    """One run's phases over a Job; `weights` are those that the engines hold. Each phase's seconds go to `timers`."""

    job: Job
    log: MetricsLog
    console: ProgressConsole
    trace: PhaseTrace
    timers: PhaseTimers = dataclasses.field(default_factory=PhaseTimers)
    weights: WeightsRef = WeightsRef()
    preemption: Preemption = dataclasses.field(init=False)
    saves: Saves = dataclasses.field(init=False)
    num_done: int = 0  # rollouts that the trainer's weights have been trained on
    evaluating: int | None = None  # rollouts that were done when the evaluation that is under way began
    _taken: tuple[int, ...] = ()  # prompts of the samples that are trained on next
    _is_ahead: bool = False  # whether the trainer has trained since the last sync
    _num_syncs: int = 0  # of this process: a resumed run probes its first sync too

    def __post_init__(self) -> None:
        self.preemption = Preemption(self.job.config.checkpoint.preemption_timeout_s)
        self.saves = Saves(self.job, self.console)
        self._tending = Tending(self.job, self.console, self._trainers_release)
        if self.job.config.sync.sends_adapters and self.weights == WeightsRef():
            self.weights = POLICY

    @property
    def _trainer(self) -> Trainer:
        assert self.job.trainer is not None, "this mode trains nothing; loops ask before"
        return self.job.trainer

    @property
    def _engines(self) -> Engines:
        assert self.job.engines is not None, "this mode has no engines; loops ask before"
        return self.job.engines

    @property
    def _rollouts(self) -> Rollouts:
        assert self.job.rollouts is not None, "this mode generates nothing; loops ask before"
        return self.job.rollouts

    def begin_step(self, step: int) -> None:
        """Count and trace phases as of `step` from now on."""
        self.timers = PhaseTimers(self.trace, step, progress=self.job.resolved.progress)

    def begin_generate(self, step: int) -> None:
        """Generate rollout `step` beside whatever comes next, unless that has begun or there is none."""
        if step < self.job.num_rollout:
            self._rollouts.begin(step)

    def settle_generation(self) -> None:
        """Wait until nothing is being generated: weights may change then."""
        with self._explained("generate"):
            self._rollouts.settle(self._tending.watch("generate", self._sender, self._sync_early))

    def _sync_early(self) -> bool:
        """Engines that came, and all others, get what the trainer holds before the rollout ahead is there, whose rest
        newer weights then answer. False where an evaluation is under way, or engines on the trainer's cards serve.
        """
        if self.evaluating is not None or self.job.config.offload_rollout:
            return False
        self.console.note("engines get the trainer's weights now: too few serve for the rollout that they wait for")
        self.sync(self.num_done)
        return True

    def _sender(self) -> Trainer | None:
        """The trainer, if it holds what the engines serve and has the room to send it: beside engines on its own cards
        only where none of them serves.
        """
        alone = not self.job.config.offload_rollout or self._engines.num_members == 0
        return self.job.trainer if self._num_syncs > 0 and not self._is_ahead and alone else None

    @contextlib.contextmanager
    def _explained(self, phase: str) -> Iterator[None]:
        """The phase's time is counted, and a dead engine explains its failure better than its last request does."""
        try:
            with self.timers.phase(phase):
                yield
        except RunError:
            self._engines.check_after_failure()
            raise

    def generate(self, step: int) -> tuple[tuple[SampleGroup, ...], dict[str, float]]:
        """One rollout step's scored groups, and its metrics."""
        with self._explained("generate"), self.preemption.interruptible():
            rollout = self._rollouts.generate(step, self._tending.watch("generate", self._sender))
        if self.job.config.asynchrony.is_async:  # else it is the phase's own time
            for start, end in rollout.busy:
                self.trace.add("engines generate", start, end, step)
        path = self.job.config.observability.save_debug_rollout_data
        if path:
            with LOST_WRITES.going_on(path):
                save_rollout(path, step, rollout.groups)
        self.log.log("rollout", step, rollout.metrics)
        self._show_samples(step, rollout.groups)
        self._taken = tuple(group.prompt.index for group in rollout.groups)
        return rollout.groups, rollout.metrics

    def _show_samples(self, step: int, groups: tuple[SampleGroup, ...]) -> None:
        """A few answers to samples/, and the best and worst to the console every so often."""
        count, tokenizer = self.job.config.observability.log_samples, self.job.resolved.data.tokenizer
        samples = SampleLog(self.job.run.samples, tokenizer, count)
        samples.write(step, groups)
        if step % ANSWERS_EVERY == 0 or step + 1 == self.job.num_rollout:
            for line in samples.best_and_worst(groups):
                self.console.note(line)

    def train_samples(self, step: int) -> tuple[list[TrainSample], dict[str, float]]:
        """What step `step` trains on: generated, loaded from a debug file, or supervised rows."""
        config = self.job.config
        if config.is_sft:
            samples = supervised_samples(self.job.feed, config.rollout.rollout_batch_size)
            self._taken = tuple(sample.prompt_index for sample in samples)
            return samples, {}
        path = config.observability.load_debug_rollout_data
        groups, metrics = (load_rollout(path, step), {}) if path else self.generate(step)
        return train_samples_of(config, groups), metrics

    def train(self, step: int, samples: list[TrainSample]) -> tuple[StepReport, dict[str, float]]:
        """Train on one rollout's samples."""
        started, metrics = time.monotonic(), {}
        with self.timers.phase("train"):
            self._is_ahead = True
            batch = self._trainer.put(samples)
            if self.job.reference is not None:
                batch = self.job.reference.with_reference(batch)
                metrics["train/reference_seconds"] = time.monotonic() - started
            if self.job.critic is not None:
                batch, report = self._train_critic(self.job.critic, step, batch)
                metrics |= report.metrics
            if step >= self.job.config.loss.num_critic_only_steps:
                report = self._trainer.train(step, batch)
                metrics |= report.metrics
            if self.job.reference is not None and self.job.config.loss.updates_reference_after(step):
                self._update_reference(self.job.reference)
        self._account_trained()
        self.num_done = step + 1
        metrics |= {"train/seconds": time.monotonic() - started, "train/tokens": float(report.num_tokens)}
        self.log.log("train", step, metrics)
        return report, metrics

    def _account_trained(self) -> None:
        """The ledger hears that the prompts of this step are used up; recorded rollouts have none."""
        taken, self._taken = self._taken, ()
        if self.job.config.is_sft:
            self.job.feed.ledger.trained(taken)
        elif self.job.rollouts is not None:
            self.job.rollouts.trained(taken)

    def _train_critic(self, critic: Trainer, step: int, batch: SampleBatch) -> tuple[SampleBatch, StepReport]:
        """The batch with what advantages need, and what fitting the critic to them did. Its values are from before."""
        started = time.monotonic()
        if self.job.config.loss.kl_coef:
            batch = self._trainer.with_kl(batch)
        batch = critic.with_values(batch)
        report = critic.train(step, batch)
        metrics = report.metrics | {"train/critic_seconds": time.monotonic() - started}
        return batch, dataclasses.replace(report, metrics=metrics)

    def _update_reference(self, reference: Trainer) -> None:
        """A reference on GPUs of its own becomes the present policy.

        By way of the run directory, which every host sees.
        """
        folder = os.path.join(self.job.run.path, "reference")
        self._trainer.save_hf(folder)
        reference.take_weights(folder)

    def release(self) -> None:
        """Engines give their memory to the trainer (colocated runs)."""
        if self.job.config.offload_rollout:
            with self.timers.phase("release"):
                self._tending.look()
                self._engines.release_memory()

    def sync(self, step: int) -> SyncReceipt:
        """Engines get the trainer's weights and prove that they hold them; their memory comes back around it."""
        self.finish_evaluate(wait=not self._num_set_aside)
        started = time.monotonic()
        with self.timers.phase("sync"):
            weights = self.weights.next()
            in_use = self._rollouts.policy_changing()
            receipt = self._tending.retried(lambda: self._sync(weights, in_use))
            if self._num_set_aside or self.job.tend is not None:
                self._rollouts.engines_changed(self._engines.endpoints)
        self.weights, self._is_ahead = weights, False
        self.job.resolved.progress.serves(weights.version)
        self._num_syncs += 1
        self._rollouts.policy_changed(weights, step)
        self.log.log("sync", step, receipt.metrics() | {"sync/seconds": time.monotonic() - started})
        num_members = self._engines.num_members
        if self._num_syncs == 1 and self.job.config.sync.compares_digests and receipt.engines_proven < num_members:
            proven = f"digests prove the weights of {receipt.engines_proven} of {num_members} engines"
            self.console.note(f"{proven}; logs/actor-*.log say why not of the others")
        return receipt

    def _sync(self, weights: WeightsRef, in_use: frozenset[WeightsRef]) -> SyncReceipt:
        """Each step takes what the one before it has given back: a card never holds the trainer's optimizer beside the
        engines' weights, nor anything of the trainer beside their KV cache.
        """
        offload = self.job.config.offload_rollout
        try:
            self._trainers_release(keep=("weights",))
            if offload:
                self._engines.resume_memory("weights")
            receipt = self._engines.sync(weights, self._trainer, in_use)
            probe = self._probe_trainer() if self.job.config.sync.probes_at(self._num_syncs) else None
            self._trainers_release()
            if offload:
                self._engines.resume_memory("kv_cache")
            if probe is not None:
                receipt = self._compare(receipt, weights, probe)
        except RunError:
            self._engines.check_after_failure()
            raise
        return receipt

    def _trainers_release(self, keep: tuple[str, ...] = ()) -> None:
        """Every training role gives memory back, the policy not what is in `keep`; on GPUs of their own none does."""
        if not self.job.config.shares_cards:
            return
        self._trainer.release_memory(keep)
        for role in (self.job.critic, self.job.reference):
            if role is not None:
                role.release_memory()

    def _probe_trainer(self) -> _Probe:
        """What the trainer makes of fixed prompts, while it has its weights at hand."""
        started, samples = time.monotonic(), probe_samples(self.job.config)
        return _Probe(samples, self._trainer.probe(samples), time.monotonic() - started)

    def _compare(self, receipt: SyncReceipt, weights: WeightsRef, probe: _Probe) -> SyncReceipt:
        """The receipt with how far engines are from it. Raises WeightSyncError if they disagree."""
        started = time.monotonic()
        difference = self._engines.compare(probe.samples, probe.log_probs, weights, bf16=self.job.bf16)
        seconds = probe.seconds + time.monotonic() - started
        return dataclasses.replace(receipt, probe_difference=difference, probe_seconds=seconds)

    def evaluate(self, step: int) -> None:
        """Mean reward and pass@k on each evaluation set; with --eval-async it is only begun."""
        if not self.job.config.asynchrony.eval_async:
            self._evaluate(step)
            return
        assert self.evaluating is None, "loops finish the one before it"
        with self._explained("eval"):
            engines = self._engines.set_aside(self._num_set_aside) if self._num_set_aside else ()
            if engines:
                self._rollouts.engines_changed(self._engines.endpoints)
            self._rollouts.begin_evaluate(step, engines)
        self.evaluating = step

    def finish_evaluate(self, *, wait: bool = True) -> None:
        """Take the result of an evaluation that has begun; wait: until it is there. What it kept from changing, all
        weights or those of the engines that were set aside, may change then.
        """
        if (step := self.evaluating) is None or not (wait or self._rollouts.evaluation_is_over(step)):
            return
        self.evaluating = None
        self._evaluate(step)
        if self._num_set_aside:
            with self._explained("eval"):
                self._engines.take_back()
            self._rollouts.engines_changed(self._engines.endpoints)

    @property
    def _num_set_aside(self) -> int:
        """Engines that an evaluation has for itself; 0: it has all, and weights wait for it."""
        return self.job.config.asynchrony.eval_num_engines

    def _evaluate(self, step: int) -> None:
        started = time.monotonic()
        with self._explained("eval"), self.preemption.interruptible():
            metrics = self._rollouts.evaluate(step, self._tending.watch("eval", self._sender))
        self.log.log("eval", step, metrics | {"eval/waited_seconds": time.monotonic() - started})
        self.console.evaluation(step, metrics)

    def save(self, num_rollouts_done: int, state: dict | None = None) -> None:
        """A Megatron checkpoint with the data position in it, and an HF folder if asked for.

        With --async-save the former is only begun. state: what rollout_state() gave; None: it is asked now. Where one
        cannot be written the run goes on (job/saving.py).
        """
        self.finish_save(wait=True)
        if not self.preemption.is_asked:  # a run that goes on has other weights by then
            self.finish_evaluate(wait=not self._num_set_aside)
        with self.timers.phase("save"), self.saves.may_fail(num_rollouts_done):
            self._save(num_rollouts_done, state)

    def _save(self, num_rollouts_done: int, state: dict | None) -> None:
        if self.job.critic is not None:  # first: every checkpoint of the policy has the critic's beside it
            self.job.critic.save(num_rollouts_done, {})
            self.saves.critic_saved = num_rollouts_done
        self.saves.save_hf(num_rollouts_done)  # first: a resumed run would not come here again
        state = state or self.rollout_state(num_rollouts_done)
        version = self.weights.version - (not self._is_ahead)  # the next sync's, at a resume, brings what it has saved
        state |= {"weight_version": version, "evaluating": self.evaluating}
        went_well = self.saves.begun if self.job.config.checkpoint.async_save else self.saves.succeeded
        went_well(num_rollouts_done, self._trainer.save(num_rollouts_done, state))

    def finish_save(self, *, wait: bool) -> None:
        """Let a checkpoint that is written in the background count, once it is whole; wait: until it is."""
        folder, number = self.saves.saving, self.saves.num_saved
        if folder is None:
            return
        with self.timers.phase("save"), self.saves.may_fail(number):
            for role in (self.job.critic, self.job.trainer):  # the critic's first, as in save()
                if role is not None and not role.finish_save(wait=wait):
                    return
            self.saves.succeeded(number, folder)

    def save_before_end(self, asked_by: str) -> None:
        """Leave a checkpoint of everything that was trained, however the run's last phase was left."""
        self.finish_save(wait=True)
        if self.num_done > self.saves.num_saved:
            state = self.rollout_state(self.num_done)  # nothing runs on cards that are given back
            if self.job.engines is not None:
                self.release()
            self.save(self.num_done, state)
        self.finish_save(wait=True)
        self.saves.check_saved(self.num_done, asked_by)
        self.console.note(f"{asked_by}: preempted after {self.num_done} rollouts, which are saved")

    def restore(self) -> int:
        """Continue where the loaded checkpoint stopped; returns the first step to do."""
        job, state = self.job, self.job.client_state
        self.num_done = self.saves.num_saved = job.num_rollouts_done
        if state:
            (job.rollouts or job.feed).load_state_dict(state["rollout"])
            self.weights = dataclasses.replace(self.weights, version=state["weight_version"])
            if (lost := state.get("evaluating")) is not None:
                self.console.note(f"the evaluation after {lost} rollouts was under way and has no result")
            if job.rollouts is not None:
                ahead.restore(job.rollouts, job.config.checkpoint.load or "", job.num_rollouts_done, state)
        if job.reference is not None and job.config.loss.ref_update_interval and job.num_rollouts_done:
            job.config.loss.check_resume(job.num_rollouts_done)
            self._update_reference(job.reference)
        return job.num_rollouts_done

    def rollout_state(self, num_done: int) -> dict:
        """What a checkpoint after `num_done` rollouts holds of the rollout side; what is made ahead goes to files."""
        rollouts, save = self.job.rollouts, self.job.config.checkpoint.save
        if rollouts is None or save is None:
            return {"rollout": rollouts.snapshot()[0] if rollouts else self.job.feed.state_dict()}
        one_step = self.job.config.asynchrony.async_mode == "one-step"
        with self._explained("generate"):
            rollout = None
            if one_step:  # a run that is to end waits for none
                wait = not self.preemption.is_asked
                rollout = rollouts.ahead(num_done, wait=wait, watch=self._tending.watch("generate", self._sender))
            data, stock = rollouts.snapshot()
        state, notes = ahead.kept(save, num_done, rollout, stock)
        for note in notes:
            self.console.note(note)
        return {"rollout": data} | state
