"""One rank of the trainer: a plain class that whoever owns the process drives; knows nothing of Ray."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging

from slime_like.config.run import RunConfig
from slime_like.errors import RunError
from slime_like.megatron_backend import checkpoint, hf_convert
from slime_like.megatron_backend.critic import ValueRunner, critic_config, value_targets, with_token_advantages
from slime_like.megatron_backend.hf_files import finish_folder, save_stage
from slime_like.megatron_backend.initialize import initialize, set_seeds, shut_down
from slime_like.megatron_backend.model_provider import build_frozen, build_model, trains_in_bf16, unwrap
from slime_like.megatron_backend.optimizer import build_optimizer, build_scheduler
from slime_like.megatron_backend.packing import record_layout
from slime_like.megatron_backend.publish import WeightPublisher
from slime_like.megatron_backend.reference import brought_log_probs, checked_row, copy_weights, put_weights, swapped
from slime_like.megatron_backend.start_weights import load_weights, start_source
from slime_like.megatron_backend.train_step import LogProbs, StepBatch, StepRunner, combine_steps, split_rollout
from slime_like.records import EngineEndpoint, StepReport, SyncReceipt, TrainSample


class TrainWorker:
    """Builds this rank's part of the model and trains it; with a config of role "ref" it only scores: `log_probs`.

    With role "critic" the model has a value head: `values`, `train_critic` and `save` are its methods.

    Every method but the constructor is collective: all ranks call it with the same arguments, in the same order.
    """

    def __init__(self, config: RunConfig, *, rank: int, world_size: int, local_rank: int, master_address: str, master_port: int):
        assert config.model.num_layers is not None, "the architecture must be resolved before workers are built"
        self._is_critic = config.role == "critic"
        self.config = config = critic_config(config) if self._is_critic else config
        self.rank = rank
        self.world_size, self.local_rank = world_size, local_rank
        self.master_address, self.master_port = master_address, master_port
        self._publisher: WeightPublisher | None = None
        self._trains = config.role in ("actor", "critic")

    # ------------------------------------------------------------------ start and end

    def start(self) -> dict:
        """Join the other ranks, build everything, load the first weights.

        Returns {"num_rollouts_done", "client_state" (of the checkpoint, else {}), "num_parameters" (whole model), "seconds": {part: s}}.
        """
        config = self.config
        seconds: dict[str, float] = {}
        with _timed(seconds, "process_groups"):
            initialize(
                config.parallel,
                rank=self.rank,
                world_size=self.world_size,
                local_rank=self.local_rank,
                master_address=self.master_address,
                master_port=self.master_port,
            )
            set_seeds(config.observability.seed)
        with _timed(seconds, "model"):
            self.model = (build_model if self._trains else build_frozen)(config.model, config.parallel, config.optimizer, value_head=self._is_critic)
            self.stage = unwrap(self.model)
        with _timed(seconds, "weights"):
            source = start_source(config.checkpoint)
            reference_source = config.checkpoint.ref_load if config.role == "actor" and config.swaps_reference else None
            load_weights(self.model, config.model, source, value_head=self._is_critic)
            self._reference = self._load_reference(source, reference_source)
        resumed: dict = {"num_rollouts_done": 0, "client_state": {}}
        if self._trains:
            with _timed(seconds, "optimizer"):
                self.optimizer = build_optimizer(self.model, config.optimizer, config.parallel)
                total_steps = (config.data.num_rollout or 1) * config.num_steps_per_rollout
                self.scheduler = build_scheduler(self.optimizer, config.optimizer, total_steps=total_steps)
            with _timed(seconds, "resume"):
                resumed = self._resume(source)
        self.runner = (ValueRunner if self._is_critic else StepRunner)(
            self.model,
            model_config=config.model,
            parallel=config.parallel,
            batch=config.batch,
            loss=config.loss,
            temperature=1.0 if config.is_sft else config.rollout.rollout_temperature,  # supervised answers were not sampled
        )
        if self._trains:
            self._clear_gradients()
        return {**resumed, "num_parameters": hf_convert.num_parameters(config.model), "seconds": seconds}

    def close(self) -> None:
        """Leave engines and process groups. Safe to call twice."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None
        shut_down()

    # ------------------------------------------------------------------ training

    def train(self, step: int, samples: list[TrainSample]) -> StepReport:
        """Train on one rollout: num_steps_per_rollout optimizer steps over consecutive parts of `samples`.

        `samples` is the whole rollout, the same list on every rank; each rank takes its part. With one step the ratio is
        taken against the step's own log-probs; with more, against those under the weights before the first step.
        """
        parts = split_rollout(samples, self.config.num_steps_per_rollout)
        batches = [self.runner.prepare(part) for part in parts]
        if self.config.needs_critic:
            batches = with_token_advantages(parts, batches, self.config.loss)
        needs_old = len(batches) > 1 and not self.config.is_sft
        old = [self.runner.log_probs(batch) if needs_old else None for batch in batches]
        reference = self._reference_for_loss(parts, batches)
        reports = []
        for number, batch in enumerate(batches):
            where = f"rollout step {step}, train step {number + 1} of {len(batches)}"
            metrics = self._forward_backward(batch, old[number], reference[number], where)
            reports.append(metrics | self._optimizer_step(where))
        return StepReport(
            step=step,
            num_train_steps=len(batches),
            num_samples=len(samples),
            num_tokens=sum(b.num_tokens for b in batches),
            metrics=combine_steps(reports, [b.num_trained_tokens for b in batches]),
        )

    def train_critic(self, step: int, samples: list[TrainSample]) -> StepReport:
        """Fit the critic to the returns of one rollout, in as many steps as the policy takes; `samples` carry its `values`."""
        assert isinstance(self.runner, ValueRunner), "train_critic() needs the role critic"
        parts = split_rollout(samples, self.config.num_steps_per_rollout)
        batches = [self.runner.prepare(part) for part in parts]
        reports = []
        for number, (batch, (old, returns)) in enumerate(zip(batches, value_targets(parts, batches, self.config.loss), strict=True)):
            where = f"critic, rollout step {step}, train step {number + 1} of {len(batches)}"
            metrics = self.runner.value_step(batch, old=old, returns=returns)
            if not math.isfinite(metrics["train/value_loss"]):
                raise RunError(f"trainer rank {self.rank}, {where}: the loss is {metrics['train/value_loss']}. Metrics: {metrics}")
            done = self._optimizer_step(where)
            reports.append(metrics | {"train/critic_grad_norm": done["train/grad_norm"], "train/critic_lr": done["train/lr"]})
        return StepReport(
            step=step,
            num_train_steps=len(batches),
            num_samples=len(samples),
            num_tokens=sum(b.num_tokens for b in batches),
            metrics=combine_steps(reports, [b.num_trained_tokens for b in batches]),
        )

    def forward_backward(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """Add the gradients of one train step's loss to what is already there; returns its metrics."""
        batch = self.runner.prepare(samples)
        return self._forward_backward(batch, None, self._reference_for_loss([samples], [batch])[0], "forward_backward")

    def optim_step(self) -> dict[str, float]:
        """Apply and clear the accumulated gradients; returns train/grad_norm and train/lr."""
        return self._optimizer_step("optim_step")

    def log_probs(self, samples: Sequence[TrainSample], *, model: str = "actor") -> list[np.ndarray]:
        """Log-probs [T] of every sample, as records.Sample defines them, in the order of `samples`; the same on every rank.

        model: "actor" or "reference". Raises ValueError for another, or if no reference was loaded.
        """
        batch = self.runner.prepare(samples)
        if model == "actor":
            found = self.runner.log_probs(batch)
        elif model == "reference" and self._reference is not None:
            found = self._reference_log_probs([batch])[0]
        else:
            raise ValueError(f"model {model!r} is not loaded. Known: actor{', reference' if self._reference is not None else ''}.")
        return self._gathered(batch, found, len(samples))

    def values(self, samples: Sequence[TrainSample]) -> list[np.ndarray]:
        """The critic's values [T] of every sample, as records.TrainSample defines them, in the order of `samples`; the same on every rank."""
        assert isinstance(self.runner, ValueRunner), "values() needs the role critic"
        batch = self.runner.prepare(samples)
        return self._gathered(batch, self.runner.values(batch), len(samples))

    def kl_to_reference(self, samples: Sequence[TrainSample]) -> list[np.ndarray]:
        """Log-prob of the policy minus the reference's, [T] of every sample: what --kl-coef punishes."""
        if self._reference is not None:
            reference = self.log_probs(samples, model="reference")
        else:
            reference = [checked_row(sample) for sample in samples]
        return [ours - theirs for ours, theirs in zip(self.log_probs(samples), reference, strict=True)]

    @staticmethod
    def _gathered(batch: StepBatch, found: LogProbs, num_samples: int) -> list[np.ndarray]:
        mine: dict[int, np.ndarray] = {}
        is_first = parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_context_parallel_rank() == 0
        if found is not None and is_first:
            for pack_, values in zip(batch.packs, found, strict=True):
                mine.update(zip(pack_.samples, record_layout(values, pack_.lengths), strict=True))
        parts: list = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(parts, mine)
        merged = {index: row for part in parts for index, row in part.items()}
        return [merged[i] for i in range(num_samples)]

    # ------------------------------------------------------------------ weights out

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This pipeline stage's tensors under their HF names. Collective over the ranks with hf_convert.joins_export()."""
        return hf_convert.export_hf(self.stage, self.config.model)

    def publish(self, version: int, endpoints: Sequence[EngineEndpoint]) -> SyncReceipt:
        """Send the weights to the engines as `version`. Pausing and checking the engines is the caller's part.

        The connection is made at the first call and kept; it is made anew when the engines are others.
        """
        if self._publisher is not None and self._publisher.endpoints != tuple(endpoints):
            self._publisher.close()
            self._publisher = None
        if self._publisher is None:
            publisher = WeightPublisher(self.config, endpoints, master_address=self.master_address)
            publisher.connect()
            self._publisher = publisher
        return self._publisher.send(version, self.weights)

    def save(self, num_rollouts_done: int, client_state: dict) -> str:
        """Write a Megatron checkpoint to --save; returns its path."""
        options = self.config.checkpoint
        assert options.save, "save() needs --save"
        state = checkpoint.TrainState(
            model=self.model,
            model_config=self.config.model,
            optimizer=None if options.no_save_optim else self.optimizer,
            scheduler=self.scheduler,
            value_head=self._is_critic,
        )
        return checkpoint.save(options.save, state, num_rollouts_done=num_rollouts_done, client_state=client_state)

    def save_hf(self, folder: str) -> None:
        """Write an HF folder: weights, and config and tokenizer files of --hf-checkpoint. Replaces the folder if it exists."""
        draft = folder.rstrip("/") + ".tmp"
        if self.rank == 0:
            shutil.rmtree(draft, ignore_errors=True)
            os.makedirs(draft)
        torch.distributed.barrier()
        file_of: dict[str, str] = {}
        num_bytes = 0
        if hf_convert.is_export_source():
            file_of, num_bytes = save_stage(self.weights(), draft, f"model-stage{parallel_state.get_pipeline_model_parallel_rank():02d}")
        elif hf_convert.joins_export():
            for _ in self.weights():
                pass
        parts: list = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(parts, (file_of, num_bytes))
        if self.rank == 0:
            merged = {name: file for part, _ in parts for name, file in part.items()}
            dtype = torch.bfloat16 if trains_in_bf16(self.config.optimizer) else torch.float32
            finish_folder(draft, template=self.config.checkpoint.hf_checkpoint, file_of=merged, total_bytes=sum(n for _, n in parts), dtype=dtype)
            checkpoint.swap_in(draft, folder.rstrip("/"))
        torch.distributed.barrier()

    # ------------------------------------------------------------------ inside

    def _load_reference(self, source: str, reference_source: str | None) -> dict[str, torch.Tensor] | None:
        """The reference's weights; the model ends with the actor's."""
        if reference_source is None:
            return None
        own = copy_weights(self.stage)
        if os.path.realpath(source) == os.path.realpath(reference_source):
            return own
        load_weights(self.model, self.config.model, reference_source)
        reference = copy_weights(self.stage)
        put_weights(self.stage, own)
        return reference

    def _resume(self, source: str) -> dict:
        options = self.config.checkpoint
        fresh = {"num_rollouts_done": 0, "client_state": {}}
        if options.load is None or source != options.load or not checkpoint.is_megatron_folder(source):
            return fresh
        state = checkpoint.TrainState(
            model=self.model,
            model_config=self.config.model,
            optimizer=None if options.no_load_optim or options.finetune else self.optimizer,
            scheduler=None if options.finetune else self.scheduler,
            with_rng=not (options.no_load_rng or options.finetune),
            value_head=self._is_critic,
        )
        saved = checkpoint.load(checkpoint.latest(source), state)
        if state.optimizer is None:
            # bf16 keeps fp32 main weights in the optimizer; they must follow the loaded ones.
            self.optimizer.reload_model_params()
        return fresh if options.finetune else {"num_rollouts_done": saved["num_rollouts_done"], "client_state": saved["client_state"]}

    def _reference_log_probs(self, batches: Sequence[StepBatch]) -> list[LogProbs]:
        if self._reference is None:
            return [None] * len(batches)
        with swapped(self.stage, self._reference):
            return [self.runner.log_probs(batch) for batch in batches]

    def _reference_for_loss(self, parts: Sequence[Sequence[TrainSample]], batches: Sequence[StepBatch]) -> list[LogProbs]:
        """The reference's log-probs: our own reference's, or what a reference on other GPUs wrote into the samples."""
        if not self.config.loss.use_kl_loss or self.config.is_sft:
            return [None] * len(batches)
        if self._reference is not None:
            return self._reference_log_probs(batches)
        brought: list[LogProbs] = [brought_log_probs(part, batch.packs) for part, batch in zip(parts, batches, strict=True)]
        return brought if parallel_state.is_pipeline_last_stage() else [None] * len(batches)

    def _forward_backward(self, batch: StepBatch, old: LogProbs, reference: LogProbs, where: str) -> dict[str, float]:
        metrics = self.runner.forward_backward(batch, old=old, reference=reference)
        if not math.isfinite(metrics["train/loss"]):
            raise RunError(f"trainer rank {self.rank}, {where}: the loss is {metrics['train/loss']}. Metrics: {metrics}")
        return metrics

    def _optimizer_step(self, where: str) -> dict[str, float]:
        # Only now are gradients summed over ranks, so that several forward_backward calls may add to them before.
        finalize_model_grads([self.model])
        learning_rate = get_canonical_lr_for_logging(self.optimizer.param_groups)
        _, grad_norm, _ = self.optimizer.step()
        if grad_norm is None or not math.isfinite(grad_norm):
            raise RunError(f"trainer rank {self.rank}, {where}: the gradient norm is {grad_norm}.")
        self.scheduler.step(increment=1)
        self._clear_gradients()
        return {"train/grad_norm": float(grad_norm), "train/lr": float(learning_rate)}

    def _clear_gradients(self) -> None:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()


@contextlib.contextmanager
def _timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    start = time.monotonic()
    try:
        yield
    finally:
        seconds[part] = round(time.monotonic() - start, 3)
