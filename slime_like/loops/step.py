"""The phases of a rollout step, written once: generate, train, sync, save, evaluate. Loops only order them."""

from __future__ import annotations

import dataclasses
import os
import time

from slime_like.cluster.build import Job
from slime_like.errors import RunError
from slime_like.loops.probe import compare_probe, probe_samples
from slime_like.observability.console import ProgressConsole
from slime_like.observability.metrics import MetricsLog, PhaseTimers
from slime_like.observability.tracing import PhaseTrace
from slime_like.records import SampleGroup, StepReport, SyncReceipt, TrainSample
from slime_like.rollout.debug_data import load_rollout, save_rollout
from slime_like.rollout.supervised import supervised_samples
from slime_like.rollout.train_samples import custom_advantages, to_train_samples


@dataclasses.dataclass
class Phases:
    """One run's phases over a Job; `version` is the weight version that the engines hold. Each phase's seconds go to `timers`."""

    job: Job
    log: MetricsLog
    console: ProgressConsole
    trace: PhaseTrace
    timers: PhaseTimers = dataclasses.field(default_factory=PhaseTimers)
    version: int = 0
    saving: str | None = None  # the checkpoint that is being written in the background
    _num_syncs: int = 0  # of this process: a resumed run probes its first sync too

    def begin_step(self, step: int) -> None:
        """Count and trace phases as of `step` from now on."""
        self.timers = PhaseTimers(self.trace, step)

    def generate(self, step: int) -> tuple[tuple[SampleGroup, ...], dict[str, float]]:
        """One rollout step's scored groups, and its metrics."""
        try:
            with self.timers.phase("generate"):
                result = self.job.manager.generate(step, self.job.watch("generate"))
        except RunError:
            self.job.engines.check_after_failure()  # a dead engine explains the failure better than its last request does
            raise
        path = self.job.config.observability.save_debug_rollout_data
        if path:
            save_rollout(path, step, result.groups)
        self.log.log("rollout", step, result.metrics)
        return result.groups, result.metrics

    def train_samples(self, step: int) -> tuple[list[TrainSample], dict[str, float]]:
        """What step `step` trains on: generated, loaded from a debug file, or supervised rows."""
        config = self.job.config
        if config.is_sft:
            return supervised_samples(self.job.data, config.rollout.rollout_batch_size), {}
        path = config.observability.load_debug_rollout_data
        groups, metrics = (load_rollout(path, step), {}) if path else self.generate(step)
        options = {"mask_truncated": config.rollout.mask_truncated_samples, "group_size": config.rollout.n_samples_per_prompt}
        return to_train_samples(groups, config.loss, custom_advantages(config), **options), metrics

    def train(self, step: int, samples: list[TrainSample]) -> tuple[StepReport, dict[str, float]]:
        """Train on one rollout's samples."""
        started, extra = time.monotonic(), {}
        with self.timers.phase("train"):
            if self.job.reference is not None:
                samples = self.job.reference.with_reference(samples)
                extra["train/reference_seconds"] = time.monotonic() - started
            if self.job.critic is not None:
                samples, report = self._train_critic(step, samples)
                extra |= report.metrics
            if step >= self.job.config.loss.num_critic_only_steps:
                report = self.job.train.train(step, samples)
                extra |= report.metrics
            if self.job.reference is not None and self.job.config.loss.updates_reference_after(step):
                self._update_reference()
        metrics = extra | {"train/seconds": time.monotonic() - started, "train/tokens": float(report.num_tokens)}
        self.log.log("train", step, metrics)
        return report, metrics

    def _train_critic(self, step: int, samples: list[TrainSample]) -> tuple[list[TrainSample], StepReport]:
        """The samples with what advantages need, and what fitting the critic to them did. Its values are from before."""
        started = time.monotonic()
        if self.job.config.loss.kl_coef:
            samples = self.job.train.with_kl(samples)
        samples = self.job.critic.with_values(samples)
        report = self.job.critic.train_critic(step, samples)
        return samples, dataclasses.replace(report, metrics=report.metrics | {"train/critic_seconds": time.monotonic() - started})

    def _update_reference(self) -> None:
        """A reference on GPUs of its own becomes the present policy; by way of the run directory, which every host sees."""
        folder = os.path.join(self.job.run.path, "reference")
        self.job.train.save_hf(folder)
        self.job.reference.take_weights(folder)

    def release(self) -> None:
        """Engines give their memory to the trainer (colocated runs)."""
        if self.job.config.offload_rollout:
            self.job.engines.release_memory()

    def sync(self, step: int) -> SyncReceipt:
        """Engines get the trainer's weights and prove the version; their memory comes back around it."""
        started = time.monotonic()
        with self.timers.phase("sync"):
            receipt = self._sync(self.version + 1)
        self.version = receipt.version
        self._num_syncs += 1
        self.job.manager.set_weight_version(receipt.version)
        metrics: dict = {
            "sync/version": receipt.version,
            "sync/bytes": receipt.num_bytes,
            "sync/tensors": receipt.num_tensors,
            "sync/seconds": time.monotonic() - started,
            "sync/engines_proven": receipt.engines_proven,
            "sync/tensors_unproven": receipt.tensors_unproven,
            "sync/verify_seconds": receipt.verify_seconds,
        }
        if receipt.bound_share is not None:
            metrics["sync/bound_share"] = receipt.bound_share
        if receipt.probe_difference is not None:
            metrics |= {"sync/probe_logprob_abs_diff": receipt.probe_difference, "sync/probe_seconds": receipt.probe_seconds}
        if receipt.delta is not None:
            metrics |= receipt.delta.metrics()
        self.log.log("sync", step, metrics | {"sync/digest": receipt.digest, "sync/transport": receipt.transport})
        num_engines = len(self.job.engines.clients)
        if self._num_syncs == 1 and self.job.config.sync.compares_digests and receipt.engines_proven < num_engines:
            self.console.note(f"digests prove the weights of {receipt.engines_proven} of {num_engines} engines; logs/actor-*.log say why not of the others")
        return receipt

    def _sync(self, version: int) -> SyncReceipt:
        offload = self.job.config.offload_rollout
        try:
            if offload:
                self.job.engines.resume_memory("weights")
            receipt = self.job.engines.update_weights(version, self.job.train)
            if offload:
                self.job.engines.resume_memory("kv_cache")
            if self.job.config.sync.probes_at(self._num_syncs):
                receipt = self._probe(receipt)
        except RunError:
            self.job.engines.check_after_failure()
            raise
        return receipt

    def _probe(self, receipt: SyncReceipt) -> SyncReceipt:
        """The receipt with what engines and trainer make of fixed prompts. Raises WeightSyncError if they disagree."""
        started = time.monotonic()
        job, samples = self.job, probe_samples(self.job.config)
        found = compare_probe(job.config, job.engines.clients, samples, job.train.probe(samples), version=receipt.version, bf16=job.bf16)
        return dataclasses.replace(receipt, probe_difference=found, probe_seconds=time.monotonic() - started)

    def evaluate(self, step: int) -> dict[str, float]:
        """Mean reward and pass@k on each evaluation set."""
        with self.timers.phase("eval"):
            metrics = self.job.manager.evaluate(step, self.job.watch("eval"))
        self.log.log("eval", step, metrics)
        self.console.evaluation(step, metrics)
        return metrics

    def save(self, num_rollouts_done: int) -> None:
        """A Megatron checkpoint with the data position in it, and an HF folder if asked for. With --async-save the former is only begun."""
        self.finish_save(wait=True)
        in_background = self.job.config.checkpoint.async_save
        with self.timers.phase("save"):
            if self.job.critic is not None:  # first: every checkpoint of the policy has the critic's beside it
                self.job.critic.save(num_rollouts_done, {})
            folder = self.job.train.save(num_rollouts_done, {"rollout": self._data_state(), "weight_version": self.version})
            self.saving = folder if in_background else None
            self.console.note(f"saving {folder} while the run goes on" if in_background else f"saved {folder}")
            save_hf = self.job.config.checkpoint.save_hf
            if save_hf:
                folder = os.path.abspath(save_hf.replace("{rollout_id}", str(num_rollouts_done)))
                self.job.train.save_hf(folder)
                self.console.note(f"saved {folder} (HF)")

    def finish_save(self, *, wait: bool) -> None:
        """Let a checkpoint that is written in the background count, once it is whole; wait: until it is."""
        if self.saving is None:
            return
        with self.timers.phase("save"):
            for group in (self.job.critic, self.job.train):  # the critic's first, as in save()
                if group is not None and not group.finish_save(wait=wait):
                    return
        self.console.note(f"saved {self.saving}")
        self.saving = None

    def restore(self) -> int:
        """Continue where the loaded checkpoint stopped; returns the first step to do."""
        state = self.job.client_state
        if state:
            holder = self.job.manager if self.job.manager is not None else self.job.data
            if holder is not None:
                holder.load_state_dict(state["rollout"])
            self.version = state["weight_version"]
        if self.job.reference is not None and self.job.config.loss.ref_update_interval and self.job.num_rollouts_done:
            self.job.config.loss.check_resume(self.job.num_rollouts_done)
            self._update_reference()
        return self.job.num_rollouts_done

    def _data_state(self) -> dict:
        holder = self.job.manager if self.job.manager is not None else self.job.data
        return holder.state_dict() if holder is not None else {}
