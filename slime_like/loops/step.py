"""The phases of a rollout step, written once: generate, train, sync, save, evaluate. Loops only order them."""

from __future__ import annotations

import dataclasses
import os
import time

from slime_like.cluster.build import Job
from slime_like.errors import RunError
from slime_like.observability.console import ProgressConsole
from slime_like.observability.metrics import MetricsLog, PhaseTimers
from slime_like.observability.tracing import PhaseTrace
from slime_like.records import SampleGroup, StepReport, SyncReceipt, TrainSample
from slime_like.rollout.debug_data import load_rollout, save_rollout
from slime_like.rollout.manager import to_train_samples
from slime_like.rollout.supervised import supervised_samples


@dataclasses.dataclass
class Phases:
    """One run's phases over a Job; `version` is the weight version that the engines hold. Each phase's seconds go to `timers`."""

    job: Job
    log: MetricsLog
    console: ProgressConsole
    trace: PhaseTrace
    timers: PhaseTimers = dataclasses.field(default_factory=PhaseTimers)
    version: int = 0

    def begin_step(self, step: int) -> None:
        """Count and trace phases as of `step` from now on."""
        self.timers = PhaseTimers(self.trace, step)

    def generate(self, step: int) -> tuple[tuple[SampleGroup, ...], dict[str, float]]:
        """One rollout step's scored groups, and its metrics."""
        try:
            with self.timers.phase("generate"):
                result = self.job.manager.generate(step, self.job.engines.check_watch)
        except RunError:
            self.job.engines.check()  # a dead engine explains the failure better than its last request does
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
        return to_train_samples(groups, config.loss), metrics

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
        self.job.manager.set_weight_version(receipt.version)
        metrics: dict = {
            "sync/version": receipt.version,
            "sync/bytes": receipt.num_bytes,
            "sync/tensors": receipt.num_tensors,
            "sync/seconds": time.monotonic() - started,
        }
        self.log.log("sync", step, metrics | {"sync/digest": receipt.digest, "sync/transport": receipt.transport})
        return receipt

    def _sync(self, version: int) -> SyncReceipt:
        offload = self.job.config.offload_rollout
        try:
            if offload:
                self.job.engines.resume_memory("weights")
            receipt = self.job.engines.update_weights(version, self.job.train.publish)
            if offload:
                self.job.engines.resume_memory("kv_cache")
        except RunError:
            self.job.engines.check()
            raise
        return receipt

    def evaluate(self, step: int) -> dict[str, float]:
        """pass@1 on each evaluation set."""
        with self.timers.phase("eval"):
            metrics = self.job.manager.evaluate(step, self.job.engines.check_watch)
        self.log.log("eval", step, metrics)
        self.console.evaluation(step, metrics)
        return metrics

    def save(self, num_rollouts_done: int) -> None:
        """A Megatron checkpoint with the data position in it, and an HF folder if asked for."""
        with self.timers.phase("save"):
            if self.job.critic is not None:  # first: every checkpoint of the policy has the critic's beside it
                self.job.critic.save(num_rollouts_done, {})
            folder = self.job.train.save(num_rollouts_done, {"rollout": self._data_state(), "weight_version": self.version})
            self.console.note(f"saved {folder}")
            save_hf = self.job.config.checkpoint.save_hf
            if save_hf:
                folder = os.path.abspath(save_hf.replace("{rollout_id}", str(num_rollouts_done)))
                self.job.train.save_hf(folder)
                self.console.note(f"saved {folder} (HF)")

    def restore(self) -> int:
        """Continue where the loaded checkpoint stopped; returns the first step to do."""
        state = self.job.client_state
        if state:
            holder = self.job.manager if self.job.manager is not None else self.job.data
            if holder is not None:
                holder.load_state_dict(state["rollout"])
            self.version = state["weight_version"]
        return self.job.num_rollouts_done

    def _data_state(self) -> dict:
        holder = self.job.manager if self.job.manager is not None else self.job.data
        return holder.state_dict() if holder is not None else {}
