"""One rank of the trainer: a plain class that whoever owns the process drives; knows nothing of Ray."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging

from slime_like.config.run import RunConfig
from slime_like.errors import RunError
from slime_like.megatron_backend import checkpoint, hf_convert
from slime_like.megatron_backend.advantages import Scores, with_picked_tokens, with_token_advantages
from slime_like.megatron_backend.async_save import PendingSave
from slime_like.megatron_backend.checkpoint_folder import find, is_megatron_folder, read_client_state
from slime_like.megatron_backend.critic import ValueRunner, critic_config, value_targets
from slime_like.megatron_backend.gradient_sync import GradientSync
from slime_like.megatron_backend.hf_save import save_hf_folder
from slime_like.megatron_backend.initialize import initialize, set_seeds, shut_down
from slime_like.megatron_backend.model_provider import build_frozen, build_model, release_hooks, trains_in_bf16, unwrap
from slime_like.megatron_backend.optimizer import build_optimizer, build_scheduler, forget_moments
from slime_like.megatron_backend.packing import record_layout
from slime_like.megatron_backend.publish import gathering
from slime_like.megatron_backend.reference import brought_log_probs, checked_row, copy_weights, put_weights, swapped
from slime_like.megatron_backend.routing_replay import Routing, RoutingReplay
from slime_like.megatron_backend.start_weights import load_weights, reference_step, start_source, start_step
from slime_like.megatron_backend.train_step import LogProbs, StepBatch, StepRunner, combine_steps, split_rollout
from slime_like.records import StepReport, SyncReceipt, TrainSample
from slime_like.weight_sync.sender import WeightSender
from slime_like.weight_sync.session import PublishOrder, run_session


class TrainWorker:
    """Builds this rank's part of the model and trains it; with a config of role "ref" it only scores: `log_probs`.

    With role "critic" the model has a value head: `values`, `train_critic` and `save` are its methods.

    Every method but the constructor is collective: all ranks call it with the same arguments, in the same order.
    """

    def __init__(self, config: RunConfig, *, rank: int, world_size: int, local_rank: int, master_address: str, master_port: int, store_path: str | None = None):
        assert config.model.is_known, "the architecture must be resolved before workers are built"
        self._is_critic = config.role == "critic"
        self.config = config = critic_config(config) if self._is_critic else config
        self.rank = rank
        self.world_size, self.local_rank = world_size, local_rank
        self.master_address, self.master_port, self._store_path = master_address, master_port, store_path
        self._sender: WeightSender | None = None
        self._sync: GradientSync  # where this role trains
        self._saving: PendingSave | None = None
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
                store_path=self._store_path,
                virtual_pipeline_size=config.parallel.virtual_pipeline_size(config.model.num_layers),
            )
            set_seeds(config.observability.seed)
        with _timed(seconds, "model"):
            self.model = (build_model if self._trains else build_frozen)(config.model, config.parallel, config.optimizer, value_head=self._is_critic)
            self.stage = unwrap(self.model)
        with _timed(seconds, "weights"):
            source = start_source(config.checkpoint)
            reference_source = config.checkpoint.ref_load if config.role == "actor" and config.swaps_reference else None
            teacher_source = config.loss.opd_teacher_load if config.role == "actor" and config.loss.use_opd else None
            load_weights(self.model, config.model, source, step=start_step(config.checkpoint), value_head=self._is_critic)
            self._reference = self._load_frozen(source, reference_source, reference_step(config.checkpoint))
            self._teacher = self._load_frozen(source, teacher_source, config.loss.opd_teacher_ckpt_step)
        resumed: dict = {"num_rollouts_done": 0, "client_state": {}}
        if self._trains:
            with _timed(seconds, "optimizer"):
                self._sync = GradientSync(self.model)
                self.optimizer = build_optimizer(self.model, config.optimizer, config.parallel)
                total_steps = (config.data.num_rollout or 1) * config.num_steps_per_rollout
                self.scheduler = build_scheduler(self.optimizer, config.optimizer, total_steps=total_steps)
            with _timed(seconds, "resume"):
                resumed = self._resume(source)
            if config.loss.ref_update_interval and self._reference is not None:
                config.loss.check_resume(resumed["num_rollouts_done"])
                self._reference = copy_weights(self.stage) if resumed["num_rollouts_done"] else self._reference
        self.runner = (ValueRunner if self._is_critic else StepRunner)(
            self.model,
            model_config=config.model,
            parallel=config.parallel,
            batch=config.batch,
            loss=config.loss,
            temperature=1.0 if config.is_sft else config.rollout.rollout_temperature,  # supervised answers were not sampled
            plugin_args=config.plugin_args(),
        )
        self.runner.replay = RoutingReplay.wanted(config, self.stage)
        if self._trains:
            self._clear_gradients()
            self._sync.whole_weights()
        return {**resumed, "num_parameters": hf_convert.num_parameters(config.model), "bf16": trains_in_bf16(config.optimizer), "seconds": seconds}

    def close(self) -> None:
        """Leave engines and process groups. Safe to call twice."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        release_hooks(getattr(self, "model", ()))
        shut_down()

    def remove_files(self) -> None:
        """Give back what would outlive this process, before it is killed."""
        if self._sender is not None:
            self._sender.remove_files()

    # ------------------------------------------------------------------ training

    def train(self, step: int, samples: list[TrainSample]) -> StepReport:
        """Train on one rollout: num_steps_per_rollout optimizer steps over consecutive parts of `samples`.

        `samples` is the whole rollout, the same list on every rank; each rank takes its part. With one step the ratio is
        taken against the step's own log-probs; with more, against those under the weights before the first step.
        """
        parts = split_rollout(samples, self.config.num_steps_per_rollout)
        batches, scores = self._ready(parts)
        if self.config.loss.reset_optimizer_states:
            forget_moments(self.optimizer)
        reports = []
        for number, batch in enumerate(batches):
            where = f"rollout step {step}, train step {number + 1} of {len(batches)}"
            metrics = self._forward_backward(batch, scores[number], where)
            reports.append(metrics | self._optimizer_step(where))
        self._sync.whole_weights()
        if self._reference is not None and self.config.loss.updates_reference_after(step):
            self._reference = copy_weights(self.stage)
        return _report(step, batches, reports)

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
        self._sync.whole_weights()
        return _report(step, batches, reports)

    def forward_backward(self, samples: Sequence[TrainSample]) -> dict[str, float]:
        """Add the gradients of one train step's loss to what is already there; returns its metrics."""
        (batch,), (scores,) = self._ready([samples])
        with self._sync.held_back():
            return self._forward_backward(batch, scores, "forward_backward")

    def optim_step(self) -> dict[str, float]:
        """Apply and clear the accumulated gradients; returns train/grad_norm and train/lr."""
        report = self._optimizer_step("optim_step")
        self._sync.whole_weights()
        return report

    def log_probs(self, samples: Sequence[TrainSample], *, model: str = "actor") -> list[np.ndarray]:
        """Log-probs [T] of every sample, as records.Sample defines them, in the order of `samples`; the same on every rank.

        model: "actor", "reference" or "teacher". Raises ValueError for another, or for one that was not loaded.
        """
        batch = self.runner.prepare(samples)
        frozen = {name: weights for name, weights in (("reference", self._reference), ("teacher", self._teacher)) if weights is not None}
        if model != "actor" and model not in frozen:
            raise ValueError(f"model {model!r} is not loaded. Known: {', '.join(['actor', *frozen])}.")
        found = self.runner.log_probs(batch, routing=Routing.REPLAY) if model == "actor" else self._log_probs_under(frozen[model], [batch])[0]
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

    def publish(self, order: PublishOrder) -> SyncReceipt:
        """One whole weight sync: engines generate with these weights when it returns. Raises on every rank; engines then stay paused.

        The connection is made at the first call and kept; it is made anew when the order's route is another.
        """
        if self._sender is not None and self._sender.route != order.route:
            self._sender.close()
            self._sender = None
        if self._sender is None:
            self._sender = WeightSender(self.config, order, gathering(self.config.model, self.weights, master_address=self.master_address))
        try:
            return run_session(order, self._sender)
        finally:
            if not self._sender.is_connected:
                self._sender.close()
                self._sender = None

    def probe(self, samples: Sequence[TrainSample]) -> list[np.ndarray]:
        """Log-probs [T] of every sample at temperature 1: what an engine says of a prompt."""
        with self.runner.at_temperature(1.0):
            return self.log_probs(samples)

    def save(self, num_rollouts_done: int, client_state: dict) -> str:
        """Write a Megatron checkpoint to --save; returns its path. With --async-save it counts only when finish_save() is True."""
        self.finish_save(wait=True)
        options = self.config.checkpoint
        assert options.save, "save() needs --save"
        state = checkpoint.TrainState(
            model=self.model,
            model_config=self.config.model,
            optimizer=None if options.no_save_optim else self.optimizer,
            scheduler=self.scheduler,
            value_head=self._is_critic,
        )
        draft = checkpoint.draft_of(
            options.save,
            state,
            num_rollouts_done=num_rollouts_done,
            client_state=client_state,
            retain_interval=options.save_retain_interval,
            num_spared=int(self._is_critic),
        )
        if not options.async_save:
            return checkpoint.save(draft, state)
        self._saving = PendingSave(draft, state, seconds=self.config.parallel.train_timeout_s)
        return self._saving.path

    def finish_save(self, wait: bool) -> bool:
        """Whether no save is under way any more; wait: until there is none. Raises SaveError if one could not be written."""
        if self._saving is not None:
            saving, self._saving = self._saving, None  # after a failure there is none either
            if not saving.finish(wait=wait):
                self._saving = saving
        return self._saving is None

    def save_hf(self, folder: str) -> None:
        """Write an HF folder: weights, and config and tokenizer files of --hf-checkpoint. Replaces the folder if it exists."""
        template, dtype = self.config.checkpoint.hf_checkpoint, torch.bfloat16 if trains_in_bf16(self.config.optimizer) else torch.float32
        assert template, "--hf-checkpoint is checked before workers are built"
        save_hf_folder(self.weights, folder, template=template, dtype=dtype)

    def take_weights(self, folder: str) -> None:
        """Continue with the weights of an HF folder: how a reference on GPUs of its own follows the policy."""
        assert not self._trains, "the optimizer's main weights would not follow"
        load_weights(self.model, self.config.model, folder)

    # ------------------------------------------------------------------ inside

    def _load_frozen(self, source: str, folder: str | None, step: int | None) -> dict[str, torch.Tensor] | None:
        """The weights in `folder`, of a model that only scores; the model ends with the actor's, which came from `source`."""
        if folder is None:
            return None
        own = copy_weights(self.stage)
        if os.path.realpath(source) == os.path.realpath(folder) and step == start_step(self.config.checkpoint):
            return own
        load_weights(self.model, self.config.model, folder, step=step)
        frozen = copy_weights(self.stage)
        put_weights(self.stage, own)
        return frozen

    def _resume(self, source: str) -> dict:
        options = self.config.checkpoint
        fresh = {"num_rollouts_done": 0, "client_state": {}}
        if options.load is None or source != options.load or not is_megatron_folder(source):
            return fresh
        path = find(source, options.ckpt_step)
        if read_client_state(path).get("weights_only"):
            return fresh  # converted weights, already loaded
        state = checkpoint.TrainState(
            model=self.model,
            model_config=self.config.model,
            optimizer=None if options.no_load_optim or options.finetune else self.optimizer,
            scheduler=None if options.finetune else self.scheduler,
            with_rng=not (options.no_load_rng or options.finetune),
            value_head=self._is_critic,
        )
        saved = checkpoint.load(path, state)
        if state.optimizer is None:
            # bf16 keeps fp32 main weights in the optimizer; they must follow the loaded ones.
            self.optimizer.reload_model_params()
        return fresh if options.finetune else {"num_rollouts_done": saved["num_rollouts_done"], "client_state": saved["client_state"]}

    def _ready(self, parts: Sequence[Sequence[TrainSample]]) -> tuple[list[StepBatch], list[Scores]]:
        """Each train step's batch, with its advantages, and all that it is compared with; everything under the present weights."""
        loss = self.config.loss
        batches = [self.runner.prepare(part) for part in parts]
        if self.config.is_sft:
            return batches, [Scores()] * len(batches)
        drifts = len(batches) > 1 and (loss.get_mismatch_metrics or not loss.use_rollout_logprobs or loss.use_routing_replay)
        needs_old = drifts or loss.kl_in_trainer or loss.use_opd or loss.picks_tokens
        old, batches = self.runner.old_log_probs(batches) if needs_old else ([None] * len(batches), batches)
        reference = self._reference_of(parts, batches)
        teacher = self._log_probs_under(self._teacher, batches) if loss.use_opd and self._teacher is not None else [None] * len(batches)
        scores = [Scores(old=o, reference=r, teacher=t) for o, r, t in zip(old, reference, teacher, strict=True)]
        batches = with_token_advantages(parts, batches, loss, scores) if loss.has_token_advantages else batches
        return with_picked_tokens(parts, batches, loss, scores) if loss.picks_tokens else batches, scores

    def _log_probs_under(self, weights: dict[str, torch.Tensor], batches: Sequence[StepBatch]) -> list[LogProbs]:
        with swapped(self.stage, weights):
            return [self.runner.log_probs(batch) for batch in batches]

    def _reference_of(self, parts: Sequence[Sequence[TrainSample]], batches: Sequence[StepBatch]) -> list[LogProbs]:
        """The reference's log-probs: our own reference's, or what a reference on other GPUs wrote into the samples."""
        if not (self.config.loss.use_kl_loss or self.config.loss.kl_in_trainer):
            return [None] * len(batches)
        if self._reference is not None:
            return self._log_probs_under(self._reference, batches)
        brought: list[LogProbs] = [brought_log_probs(part, batch.packs) for part, batch in zip(parts, batches, strict=True)]
        return brought if parallel_state.is_pipeline_last_stage() else [None] * len(batches)

    def _forward_backward(self, batch: StepBatch, scores: Scores, where: str) -> dict[str, float]:
        reference = scores.reference if self.config.loss.use_kl_loss else None
        metrics = self.runner.forward_backward(batch, old=scores.old, reference=reference, teacher=scores.teacher)
        if not math.isfinite(metrics["train/loss"]):
            raise RunError(f"trainer rank {self.rank}, {where}: the loss is {metrics['train/loss']}. Metrics: {metrics}")
        return metrics

    def _optimizer_step(self, where: str) -> dict[str, float]:
        self._sync.finish()
        learning_rate = get_canonical_lr_for_logging(self.optimizer.param_groups)
        _, grad_norm, _ = self.optimizer.step()
        if grad_norm is None or not math.isfinite(grad_norm):
            raise RunError(f"trainer rank {self.rank}, {where}: the gradient norm is {grad_norm}.")
        self._sync.stepped()
        self.scheduler.step(increment=1)
        self._clear_gradients()
        return {"train/grad_norm": float(grad_norm), "train/lr": float(learning_rate)}

    def _clear_gradients(self) -> None:
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()


def _report(step: int, batches: Sequence[StepBatch], metrics: Sequence[dict[str, float]]) -> StepReport:
    """What a rollout's train steps did, from the batch and the metrics of each."""
    return StepReport(
        step=step,
        num_train_steps=len(batches),
        num_samples=sum(batch.num_samples for batch in batches),
        num_tokens=sum(batch.num_tokens for batch in batches),
        metrics=combine_steps(metrics, [batch.num_trained_tokens for batch in batches]),
    )


@contextlib.contextmanager
def _timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    start = time.monotonic()
    try:
        yield
    finally:
        seconds[part] = round(time.monotonic() - start, 3)
