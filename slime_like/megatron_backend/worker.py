"""One rank of the trainer: the verbs that recipes are written in.

A plain class that whoever owns the process drives; knows nothing of Ray.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

import torch
from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging

from slime_like.config.run import RunConfig
from slime_like.megatron_backend.card_memory import TRAIN_STATE, CardMemory
from slime_like.megatron_backend.checkpoint import start_weights
from slime_like.megatron_backend.checkpoint import state as checkpoint
from slime_like.megatron_backend.checkpoint.async_save import Saver
from slime_like.megatron_backend.checkpoint.folder import find
from slime_like.megatron_backend.hf import names_and_shards as hf_convert
from slime_like.megatron_backend.initialize import initialize, set_seeds, shut_down
from slime_like.megatron_backend.lora.adapter import AdapterSwitch, dropping
from slime_like.megatron_backend.lora.held import held_beside
from slime_like.megatron_backend.lora.peft_files import first_adapters
from slime_like.megatron_backend.lora.tenant_verbs import TenantVerbs, tenants_config
from slime_like.megatron_backend.model.provider import build_frozen, build_model, release_hooks, trains_in_bf16, unwrap
from slime_like.megatron_backend.publish import gathering_for
from slime_like.megatron_backend.reference import HeldWeights
from slime_like.megatron_backend.shared_parameters import share_parameters
from slime_like.megatron_backend.step.batch import Batch, StepCutter
from slime_like.megatron_backend.step.critic import ValueRunner, critic_config
from slime_like.megatron_backend.step.forward import device_of
from slime_like.megatron_backend.step.gradient_sync import GradientSync, add_gradients_in_blocks
from slime_like.megatron_backend.step.loss_spec import LossSpec
from slime_like.megatron_backend.step.optimizer import (
    AdamParams,
    build_optimizer,
    build_scheduler,
    forget_moments,
    stepping_with,
)
from slime_like.megatron_backend.step.routing_replay import Routing, RoutingReplay
from slime_like.megatron_backend.step.runner import StepRunner
from slime_like.megatron_backend.verbs import Outputs
from slime_like.observability.metrics import timed
from slime_like.records import BASE, REFERENCE, SyncReceipt, WeightsRef
from slime_like.weight_sync.sender import WeightSender
from slime_like.weight_sync.session import PublishOrder, run_session
from slime_like.weight_sync.shared_weights import SharedWeights


class TrainWorker(TenantVerbs):
    """Builds this rank's part of the model and does what it is told with it: pass forward, add gradients, step, export,
    save, load.

    It knows of no algorithm: rl_recipe.py is GRPO and PPO in these verbs. `weights` names what a verb is about: BASE is
    what this role trains (or, with role "ref", only scores with); REFERENCE and TEACHER are frozen ones beside it, kept
    on the host and swapped in.

    Every method but the constructor is collective: all ranks call it with the same arguments, in the same order.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        rank: int,
        world_size: int,
        local_rank: int,
        master_address: str,
        master_port: int,
        store_path: str | None = None,
    ):
        assert config.model.is_known, "the architecture must be resolved before workers are built"
        self._is_critic = config.role == "critic"
        self.config = config = critic_config(config) if self._is_critic else tenants_config(config)
        self.rank = rank
        self.world_size, self.local_rank = world_size, local_rank
        self.master_address, self.master_port, self._store_path = master_address, master_port, store_path
        self._sender: WeightSender | None = None
        self.shared_weights: SharedWeights | None = None  # engines map them
        self._held: HeldWeights
        #: a train step's records -> this rank's share of them in micro-batches: for several verbs over the same records
        self.prepare: StepCutter
        self._sync: GradientSync  # where this role trains
        self._saver = Saver(in_background=config.checkpoint.async_save, seconds=config.parallel.train_timeout_s)
        self._trains = config.role in ("actor", "critic")
        self._adapters = AdapterSwitch(config.adapters) if config.adapters else None

    # ------------------------------------------------------------------ start and end

    def start(self) -> dict:
        """Join the other ranks, build everything, load the first weights.

        Returns {"num_rollouts_done", "client_state" (of the checkpoint, else {}), "num_parameters" (whole model),
        "card_bytes" (the GPU's memory), "seconds": {part: s}}.
        """
        config = self.config
        seconds: dict[str, float] = {}
        with timed(seconds, "process_groups"):
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
            set_seeds(config.observability.seed, deterministic=config.observability.deterministic)
        with timed(seconds, "model"):
            self.model = (build_model if self._trains else build_frozen)(
                config.model, config.parallel, config.optimizer, value_head=self._is_critic, adapters=self._adapters,
                own_attention=config.batch.share_prompt == "on",
            )  # fmt: skip
            self.stage = unwrap(self.model)
            self.shared_weights = share_parameters(config, self.model)
            self._held = held_beside(self.stage, self._adapters)
            offloads = config.offloads_train(on_gpu=device_of(self.stage).type == "cuda")
            self._card = CardMemory(self.stage, self.model if self._trains else (), offloads=offloads)
        source = start_weights.start_source(config.checkpoint)
        with timed(seconds, "weights"):
            self._load_first_weights(source)
        resumed: dict = {"num_rollouts_done": 0, "client_state": {}}
        if self._trains:
            with timed(seconds, "optimizer"):
                self._sync = GradientSync(self.model)
                add_gradients_in_blocks(self.model)
                self.optimizer = build_optimizer(self.model, config.optimizer, config.parallel, config.adapters)
                self._card.add_optimizer(self.optimizer)
                total_steps = (config.data.num_rollout or 1) * config.num_steps_per_rollout
                self.scheduler = build_scheduler(self.optimizer, config.optimizer, total_steps=total_steps)
            with timed(seconds, "resume"):
                resumed = self._resume()
        replay, device = RoutingReplay.for_policy(config, self.stage), device_of(self.stage)
        self.prepare = StepCutter(config, device=device, num_chunks=len(self.model), replay=replay)
        self.runner = (ValueRunner if self._is_critic else StepRunner)(config, self.model, replay=replay)
        if self._trains:
            self._clear_gradients()
            self._sync.whole_weights()
        return {
            **resumed,
            "num_parameters": hf_convert.num_parameters(config.model),
            "bf16": trains_in_bf16(config.optimizer),
            "card_bytes": torch.cuda.mem_get_info()[1] if torch.cuda.is_available() else None,
            "seconds": seconds,
        }

    def close(self) -> None:
        """Leave engines and process groups. Safe to call twice."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None
        if self.shared_weights is not None:
            self.shared_weights.close()
        release_hooks(getattr(self, "model", ()))
        shut_down()

    def remove_files(self) -> None:
        """Give back what would outlive this process, before it is killed."""
        if self._sender is not None:
            self._sender.remove_files()
        if self.shared_weights is not None:
            self.shared_weights.close()

    def release_memory(self, keep: Sequence[str] = ()) -> None:
        """Give the engines on this card what is not in `keep`, of TRAIN_STATE: to the host with --offload-train, else
        cached memory only. Verbs bring back what they need.
        """
        self._card.release(keep)

    # ------------------------------------------------------------------ passes and steps

    def forward(
        self, batch: Batch, *, weights: WeightsRef, temperature: float | None = None, record_routing: bool = False
    ) -> Outputs:
        """Log-probs and entropy of each token, or a critic's values, without gradients.

        temperature: of the softmax; by default the rollouts'. record_routing: the batch that comes back holds the
        experts that the policy's routers chose, where the flags ask train steps to replay them. Raises ValueError for
        weights that are not here.
        """
        prepared = self.prepare(batch)
        with self.using(weights), self.runner.at_temperature(temperature):
            if record_routing:
                return self.runner.forward_recording(prepared)
            return self.runner.forward(prepared, routing=Routing.REPLAY if weights.name == BASE.name else Routing.OWN)

    def forward_backward(
        self, batch: Batch, loss: LossSpec, *, weights: WeightsRef, accumulates: bool = True
    ) -> Outputs:
        """Add a loss's gradients to those that are there; gives its metrics, and the scores of the pass.

        accumulates: more may be added before optim_step; if not, ranks begin to add up theirs in this pass
        (--overlap-grad-reduce).
        """
        self._check_trained(weights)
        prepared = self.prepare(batch)
        with self._sync.held_back() if accumulates else contextlib.nullcontext(), dropping(self._adapters):
            return self.runner.forward_backward(prepared, loss)

    def optim_step(
        self, params: AdamParams | None, *, weights: WeightsRef, passes_follow: bool = False
    ) -> dict[str, float]:
        """Apply and clear the gradients; gives train/grad_norm and train/lr.

        params: this step's numbers; None: the flags', and the learning rate's schedule moves on. passes_follow: the
        next verb is a pass, in which ranks fetch each other's new weights (--overlap-param-gather).
        """
        self._check_trained(weights)
        self._sync.finish()
        with stepping_with(self.optimizer, params):
            learning_rate = get_canonical_lr_for_logging(self.optimizer.param_groups)
            _, grad_norm, _ = self.optimizer.step()
        self._sync.stepped()
        if params is None:
            self.scheduler.step(increment=1)
        self._clear_gradients()
        if not passes_follow:
            self._sync.whole_weights()
        return {
            "train/grad_norm": float("nan") if grad_norm is None else float(grad_norm),
            "train/lr": float(learning_rate),
        }

    def reset_optimizer(self, *, weights: WeightsRef) -> None:
        """Forget Adam's moments; the learning rate's schedule stays."""
        self._check_trained(weights)
        forget_moments(self.optimizer)

    # ------------------------------------------------------------------ weights

    def holds(self, weights: WeightsRef) -> bool:
        """Whether verbs can be about these weights."""
        return weights in self._held

    def is_base(self, weights: WeightsRef) -> bool:
        """Whether these frozen weights are what is trained: it has not changed since it was copied to them."""
        return self._held.is_base(weights)

    @contextlib.contextmanager
    def using(self, weights: WeightsRef) -> Iterator[None]:
        """Inside, the model holds these weights, so that several passes with them swap once.

        Raises ValueError for ones that are not here.
        """
        self._card.need("weights")
        self.show_base()
        with self._held.using(weights):
            yield

    def copy_weights(self, source: WeightsRef, target: WeightsRef) -> None:
        """Keep the present `source` as the frozen weights `target`: how a reference follows the policy."""
        self._card.need("weights")
        self._held.copy(source, target)

    def export(self, weights: WeightsRef) -> Iterator[tuple[str, torch.Tensor]]:
        """This pipeline stage's tensors under their HF names.

        Collective over the ranks with hf_convert.joins_export().
        """
        with self.using(weights):
            yield from hf_convert.export_hf(self.stage, self.config.model)

    def publish(self, order: PublishOrder) -> SyncReceipt:
        """One whole weight sync: engines generate with these weights when it returns.

        Raises on every rank; engines then stay paused.
        The connection is made at the first call and kept; it is made anew when the order's route is another.
        """
        self._card.need("weights")
        sender = self._sender
        if sender is not None and sender.route != order.route and not sender.redirect(order):
            sender.close()
            self._sender = None
        if self._sender is None:
            what = gathering_for(self, order, shared=self.shared_weights)
            self._sender = WeightSender(self.config, order, what)
        try:
            return run_session(order, self._sender)
        finally:
            if not self._sender.is_connected:
                self._sender.close()
                self._sender = None

    # ------------------------------------------------------------------ state on disk

    def save_state(self, folder: str, *, weights: WeightsRef, num_rollouts_done: int, client_state: dict) -> str:
        """Write a Megatron checkpoint; returns its path.

        With --async-save it counts only when finish_save() is True.
        """
        self._check_trained(weights)
        options = self.config.checkpoint
        state = self._state_of(optimizer=not options.no_save_optim, schedule=True)
        draft = checkpoint.draft_of(
            folder,
            state,
            num_rollouts_done=num_rollouts_done,
            client_state=client_state,
            keeps=options,
            num_spared=int(self._is_critic),
        )
        return self._saver.save(draft, state)

    def finish_save(self, wait: bool) -> bool:
        """Whether no save is under way any more; wait: until there is none.

        Raises SaveError if one could not be written.
        """
        return self._saver.finish(wait=wait)

    def load_state(
        self,
        folder: str,
        *,
        weights: WeightsRef,
        step: int | None = None,
        optimizer: bool = False,
        schedule: bool = False,
        rng: bool = False,
    ) -> dict:
        """Take a folder's weights (a checkpoint's newest, or that of `step`), and what else of it is asked for.

        Frozen weights of a new name are held from now on. Returns the checkpoint's client_state.json, {} for weights
        alone. Raises CheckpointError.
        """
        self._card.need(*TRAIN_STATE)
        if weights.name != BASE.name:
            assert not (optimizer or schedule or rng), "frozen weights have no more than themselves"
            verify = self.config.checkpoint.verify_checkpoint
            whole = checkpoint.TrainState(model=self.model, model_config=self.config.model, verify=verify)
            self._held.keep(weights, lambda: start_weights.load_weights(whole, folder, step=step))
            return {}
        self._held.base_changes()
        saved: dict = {}
        if optimizer or schedule or rng:
            state = self._state_of(optimizer=optimizer, schedule=schedule, rng=rng)
            saved = checkpoint.load(find(folder, step), state)
        else:
            start_weights.load_weights(self._state_of(), folder, step=step)
        if self._trains and not optimizer:
            # bf16 keeps fp32 main weights in the optimizer; they must follow the loaded ones.
            self.optimizer.reload_model_params()
        return saved

    # ------------------------------------------------------------------ inside

    def _load_first_weights(self, source: str) -> None:
        """The policy's or critic's first weights, and those of models that only score beside it."""
        step = start_weights.start_step(self.config.checkpoint)
        start_weights.load_weights(self._state_of(), source, step=step, whole=True)
        if self._adapters is not None:
            first_adapters(self.stage, self.config)
        for weights, folder, frozen_step in start_weights.frozen_sources(self.config):
            if os.path.realpath(source) == os.path.realpath(folder) and frozen_step == step:
                self._held.keep_start(weights)
            else:
                self.load_state(folder, weights=weights, step=frozen_step)

    def _state_of(self, *, optimizer: bool = False, schedule: bool = False, rng: bool = True) -> checkpoint.TrainState:
        return checkpoint.TrainState(
            model=self.model, model_config=self.config.model,
            optimizer=self.optimizer if optimizer else None, scheduler=self.scheduler if schedule else None,
            with_rng=rng, value_head=self._is_critic, lora=self.config.adapters,
            base=self.config.checkpoint.hf_checkpoint, verify=self.config.checkpoint.verify_checkpoint,
        )  # fmt: skip

    def _resume(self) -> dict:
        """What start() says of a checkpoint to continue from.

        A reference that follows the policy is taken from it, too.
        """
        options, loss = self.config.checkpoint, self.config.loss
        resumed: dict = {"num_rollouts_done": 0, "client_state": {}}
        if (parts := start_weights.parts_to_continue(self.config)) is not None:
            saved = self.load_state(options.load or "", weights=BASE, step=options.ckpt_step, **parts)
            if not options.finetune:
                resumed = {name: saved[name] for name in resumed}
        if loss.ref_update_interval and self.holds(REFERENCE):
            loss.check_resume(resumed["num_rollouts_done"])
            if resumed["num_rollouts_done"]:
                self.copy_weights(BASE, REFERENCE)
        return resumed

    def _check_trained(self, weights: WeightsRef) -> None:
        if not self._trains or weights.name != BASE.name or not self._held.has_base:
            raise ValueError(
                f"weights {weights.name!r} are not trained here (role {self.config.role}): they can be scored with,"
                " loaded and exported."
            )
        self._card.need(*TRAIN_STATE)
        self._held.base_changes()  # in a pass, too: routers learn their bias there

    def _clear_gradients(self) -> None:
        for chunk in self.model:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
