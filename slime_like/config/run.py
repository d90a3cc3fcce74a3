"""The frozen tree of all config groups, and the rules that reach across groups."""

from __future__ import annotations

import dataclasses
import json

from slime_like.config.base import PluginArgs
from slime_like.config.model import ModelConfig, ParallelConfig
from slime_like.config.not_yet import engine_not_yet, model_not_yet, training_not_yet
from slime_like.config.rollout import DataConfig, EvalConfig, RewardConfig, RolloutConfig
from slime_like.config.system import EngineConfig, ObservabilityConfig, PlacementConfig, SyncConfig
from slime_like.config.training import BatchConfig, CheckpointConfig, LossConfig, OptimizerConfig
from slime_like.config.transports import fitting

GROUPS = {
    "placement": PlacementConfig,
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "checkpoint": CheckpointConfig,
    "data": DataConfig,
    "rollout": RolloutConfig,
    "reward": RewardConfig,
    "eval": EvalConfig,
    "batch": BatchConfig,
    "loss": LossConfig,
    "optimizer": OptimizerConfig,
    "engine": EngineConfig,
    "sync": SyncConfig,
    "observability": ObservabilityConfig,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Everything a run was told. Frozen; functions take the group they need, not the tree."""

    placement: PlacementConfig = PlacementConfig()
    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    eval: EvalConfig = EvalConfig()
    batch: BatchConfig = BatchConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    engine: EngineConfig = EngineConfig()
    sync: SyncConfig = SyncConfig()
    observability: ObservabilityConfig = ObservabilityConfig()
    role: str = "actor"  # whose config this is: "actor", "critic", or "ref" in the processes of a reference on GPUs of its own

    @property
    def data_parallel_size(self) -> int:
        """Copies of the model that train on different samples."""
        return self.placement.actor_num_gpus // self.parallel.model_parallel_size

    @property
    def is_sft(self) -> bool:
        """Supervised: one row, one sample, no engines."""
        return self.loss.loss_type == "sft_loss"

    @property
    def uses_engines(self) -> bool:
        """Whether anything generates."""
        return not (self.is_sft or self.placement.debug_train_only)

    @property
    def offload_rollout(self) -> bool:
        """Whether engines release their memory around training; never external ones."""
        if self.placement.rollout_external or not self.uses_engines:
            return False
        value = self.placement.offload_rollout
        return self.placement.colocate if value is None else value

    @property
    def samples_per_rollout(self) -> int:
        """Samples of one rollout step."""
        return self.rollout.rollout_batch_size * self.rollout.n_samples_per_prompt

    @property
    def num_steps_per_rollout(self) -> int:
        """Optimizer steps per rollout step."""
        if self.batch.num_steps_per_rollout:
            return self.batch.num_steps_per_rollout
        return max(1, self.samples_per_rollout // (self.batch.global_batch_size or self.samples_per_rollout))

    @property
    def global_batch_size(self) -> int:
        """Samples per optimizer step."""
        return self.batch.global_batch_size or self.samples_per_rollout // self.num_steps_per_rollout

    @property
    def needs_reference(self) -> bool:
        """Whether the reference model's log-probs are computed."""
        return (self.loss.use_kl_loss or self.loss.kl_coef > 0) and not self.is_sft

    @property
    def swaps_reference(self) -> bool:
        """Whether the reference's weights live in the actor's processes."""
        return self.needs_reference and (self.placement.colocate_policy_ref or self.placement.colocate_training)

    @property
    def needs_critic(self) -> bool:
        """Whether a critic is trained."""
        return self.loss.estimator.compares_with == "critic" and not self.is_sft

    @property
    def needs_reward_model(self) -> bool:
        """Whether a reward model scores the samples."""
        return bool(self.checkpoint.reward_load) and self.uses_engines and not self.placement.debug_rollout_only

    @property
    def engine_tp_size(self) -> int:
        """Tensor parallel size of one engine: its GPUs / its pipeline stages."""
        return self.engine.tp_size(self.placement.rollout_num_gpus_per_engine)

    @property
    def engine_pp_size(self) -> int:
        """Pipeline stages of one engine."""
        return self.engine.pp_size

    @property
    def engine_dp_size(self) -> int:
        """Data parallel copies of one engine's attention."""
        return self.engine.dp_size

    @property
    def engine_ep_size(self) -> int:
        """GPUs of one engine that share the experts."""
        return self.engine.ep_size

    def not_yet(self) -> list[str]:
        """What the plan knows but a run cannot do yet; train.py adds it to the problems when not planning."""
        return model_not_yet(self.model) + training_not_yet(self.loss, self.optimizer) + (engine_not_yet(self.model) if self.uses_engines else [])

    def plugin_args(self) -> PluginArgs:
        """The flat, read-only view given to user plugins."""
        return PluginArgs(*(getattr(self, name) for name in GROUPS))

    def to_json(self) -> str:
        """The resolved config, for config.json in the run directory."""
        return json.dumps(dataclasses.asdict(self), indent=1, sort_keys=True)

    def problems(self) -> list[str]:
        """Everything impossible that needs no file to see."""
        found: list[str] = []
        for name in GROUPS:
            group = getattr(self, name)
            if name == "model":
                found += group.problems() if group.is_known else []
            elif name == "parallel":
                found += group.problems(self.model)
            else:
                found += group.problems()
        return found + (self._batch_problems() + self._engine_problems() if not found else []) + self._role_problems()

    def missing_files(self) -> list[str]:
        """Every path that a run needs and that is not there."""
        found = self.checkpoint.missing_files() + self.loss.missing_files() + self.eval.missing_files() + self.observability.missing_files()
        if not self.observability.load_debug_rollout_data:
            found += self.data.missing_files()
        return found

    def _batch_problems(self) -> list[str]:
        samples, steps, size = self.samples_per_rollout, self.num_steps_per_rollout, self.global_batch_size
        origin = f"--rollout-batch-size {self.rollout.rollout_batch_size} x --n-samples-per-prompt {self.rollout.n_samples_per_prompt}"
        if steps * size != samples:
            return [
                (
                    f"{steps} steps of {size} samples are not the rollout's {samples}: {origin}, --num-steps-per-rollout, "
                    "--global-batch-size. Fix: make their products equal."
                )
            ]
        if self.placement.debug_rollout_only:
            return []
        gpus, model = self.placement.actor_num_gpus, self.parallel.model_parallel_size
        if gpus % model:
            return [
                (
                    f"the trainer's {gpus} GPUs do not divide by tensor x pipeline x context parallel size {model}: --actor-num-nodes, "
                    "--actor-num-gpus-per-node, --tensor-model-parallel-size, --pipeline-model-parallel-size."
                )
            ]
        block = self.parallel.expert_parallel_block if self.model.num_experts else 1
        if gpus % block:
            return [
                (
                    f"the trainer's {gpus} GPUs do not divide by expert tensor x expert x pipeline parallel size {block}: --actor-num-nodes, "
                    "--actor-num-gpus-per-node, --expert-tensor-parallel-size, --expert-model-parallel-size, --pipeline-model-parallel-size."
                )
            ]
        if size % self.data_parallel_size:
            return [f"--global-batch-size {size} does not divide by the data parallel size {self.data_parallel_size} ({gpus} GPUs / {model})."]
        per_rank = size // self.data_parallel_size
        if not self.batch.use_dynamic_batch_size and per_rank % self.batch.micro_batch_size:
            return [
                (
                    f"{per_rank} samples per data parallel rank do not divide by --micro-batch-size {self.batch.micro_batch_size}. Fix: "
                    "another size, or --use-dynamic-batch-size."
                )
            ]
        return []

    def _engine_problems(self) -> list[str]:
        if not self.uses_engines:
            return []
        gpus, pp, dp, ep = self.placement.rollout_num_gpus_per_engine, self.engine.pp_size, self.engine.dp_size, self.engine.ep_size
        if gpus % pp:
            return [f"an engine of {gpus} GPUs does not divide into {pp} pipeline stages: --rollout-num-gpus-per-engine, --sglang-pp-size."]
        found, tp = [], gpus // pp
        origin = f"tensor parallel size {tp} (--rollout-num-gpus-per-engine {gpus} / --sglang-pp-size {pp})"
        if dp > 1 and not self.engine.dp_attention:
            found.append(
                f"--sglang-dp-size {dp} needs --sglang-enable-dp-attention. Fix: add it; or drop both: whole copies of the model are more engines "
                "(--rollout-num-gpus / --rollout-num-gpus-per-engine)."
            )
        if tp % dp:
            found.append(f"--sglang-dp-size {dp} does not divide the engine's {origin}.")
        if tp % ep:
            found.append(f"--sglang-ep-size {ep} does not divide the engine's {origin}.")
        if ep > 1 and self.model.is_known and not self.model.num_experts:
            found.append(f"--sglang-ep-size {ep} needs a model with experts (--num-experts).")
        return found

    def _routing_problems(self) -> list[str]:
        """What routing replay needs."""
        found = []
        for name in ("use_routing_replay", "use_rollout_routing_replay"):
            flag_name = f"--{name.replace('_', '-')}"
            if not getattr(self.loss, name):
                continue
            if self.model.is_known and not self.model.num_experts:
                found.append(f"{flag_name} needs a model with experts (--num-experts). Fix: drop it.")
            if self.is_sft:
                found.append(f"{flag_name} is about sampled responses; --loss-type sft_loss samples none. Fix: drop it.")
        if self.loss.use_rollout_routing_replay and str(self.engine.sglang.get("enable_return_routed_experts", True)).lower() == "false":
            found.append("--sglang-enable-return-routed-experts false keeps from the trainer what --use-rollout-routing-replay needs. Fix: drop one of them.")
        return found

    def _sampling_problems(self) -> list[str]:
        """Samples that are not what training takes them for."""
        if self.is_sft and (self.rollout.mask_truncated_samples or self.reward.overlong_buffer_len is not None):
            return ["--mask-truncated-samples and --overlong-buffer-len are about sampled responses; --loss-type sft_loss samples none. Fix: drop them."]
        if not self.uses_engines:
            return []
        found, rollout, buffer = [], self.rollout, self.reward.overlong_buffer_len
        if rollout.filters_sampling and not rollout.rollout_allow_filtered_sampling and not self.placement.debug_rollout_only:
            found.append(
                f"--rollout-top-p {rollout.rollout_top_p:g} and --rollout-top-k {rollout.rollout_top_k} keep unlikely tokens from being drawn, but the "
                "log-probs of engines and trainer are of the whole distribution: the policy gradient is biased, and neither the ratio nor --use-tis sees it. "
                "Fix: leave them out (--eval-top-p and --eval-top-k are free), or accept it with --rollout-allow-filtered-sampling."
            )
        if buffer is not None and buffer > rollout.rollout_max_response_len:
            found.append(f"--overlong-buffer-len {buffer} is above --rollout-max-response-len {rollout.rollout_max_response_len}, whose end it is.")
        return found

    def _reference_problems(self) -> list[str]:
        """--ref-update-interval, which reaches into checkpoints and placement."""
        interval, save_interval = self.loss.ref_update_interval, self.checkpoint.save_interval
        if not interval:
            return []
        if not self.needs_reference:
            return [f"--ref-update-interval {interval} needs a reference: --use-kl-loss or --kl-coef. Fix: one of them, or drop it."]
        if save_interval and save_interval % interval:
            return [
                (
                    f"--save-interval {save_interval} is no multiple of --ref-update-interval {interval}: a checkpoint between two updates cannot be "
                    "resumed, as it does not hold the reference. Fix: a multiple."
                )
            ]
        return []

    def _role_problems(self) -> list[str]:
        found = self._routing_problems() + self._sampling_problems()
        found += self._reference_problems()
        if self.needs_reference and not self.checkpoint.ref_load:
            found.append(f"{'--use-kl-loss' if self.loss.use_kl_loss else '--kl-coef'} needs --ref-load, the reference model.")
        if self.placement.debug_train_only and not self.is_sft and not self.observability.load_debug_rollout_data:
            found.append("--debug-train-only needs --load-debug-rollout-data (or --loss-type sft_loss).")
        if self.uses_engines and self.observability.load_debug_rollout_data:
            found.append("--load-debug-rollout-data needs --debug-train-only: the loaded samples replace generation.")
        if self.is_sft and self.placement.debug_rollout_only:
            found.append("--loss-type sft_loss generates nothing: drop --debug-rollout-only.")
        if self.is_sft and self.rollout.n_samples_per_prompt != 1:
            found.append(f"--n-samples-per-prompt {self.rollout.n_samples_per_prompt}: supervised rows have one answer. Fix: 1.")
        if self.is_sft and self.eval.eval_prompt_data:
            found.append("--eval-prompt-data needs engines, and --loss-type sft_loss starts none.")
        if self.checkpoint.reward_load and self.placement.debug_rollout_only:
            found.append("--debug-rollout-only starts engines only, not the model of --reward-load. Fix: --rm-type or --custom-rm-path instead.")
        if self.reward.reward_model_weight != 1.0 and not self.checkpoint.reward_load:
            found.append("--reward-model-weight does nothing without --reward-load. Fix: add it, or drop this.")
        given = self.reward.rm_type or self.reward.custom_rm_path or self.checkpoint.reward_load
        if self.uses_engines and not given:
            found.append("samples need a reward: give --rm-type, --custom-rm-path or --reward-load.")
        if self.checkpoint.critic_load and not self.needs_critic:
            found.append("--critic-load does nothing without --advantage-estimator ppo. Fix: add it, or drop this.")
        if self.optimizer.critic_lr is not None and not self.needs_critic:
            found.append("--critic-lr does nothing without --advantage-estimator ppo. Fix: add it, or drop this.")
        if self.sync.custom_weight_transform_path and (not self.uses_engines or self.placement.debug_rollout_only):
            found.append("--custom-weight-transform-path: this run sends no weights. Fix: leave it out.")
        if self.sync.update_weight_interface and self.placement.colocate:
            found.append("--update-weight-interface does nothing with --colocate: weights stay on the machine. Fix: drop it.")
        return found + self._transport_problems() + self._delta_problems()

    def _transport_problems(self) -> list[str]:
        """A transport for engines on the trainer's GPUs where they are apart, and the other way round."""
        row, colocate = self.sync.transport_row, self.placement.colocate
        if row is None or row.is_mode or row.goes_with(colocate=colocate):
            return []
        wrong = f"does not go with --colocate: {row.why_not_colocated}" if colocate else "needs --colocate"
        return [f"--update-weight-transport {row.name} {wrong}. Fix: {' or '.join(fitting(colocate=colocate))}."]

    def _delta_problems(self) -> list[str]:
        """What --update-weight-mode delta needs, and what is given without it."""
        receivers, engines = self.placement.rollout_external_receiver_addrs or [], self.placement.rollout_external_engine_addrs or []
        if not self.sync.sends_deltas:
            return ["--rollout-external-receiver-addrs does nothing without --update-weight-mode delta. Fix: add it, or drop this."] if receivers else []
        if not self.uses_engines or self.placement.debug_rollout_only:
            return ["--update-weight-mode delta: this run sends no weights. Fix: leave it out."]
        if self.placement.colocate:
            return ["--update-weight-mode delta is for slow links and does not go with --colocate. Fix: leave it out; ipc copies within the machine."]
        if len(receivers) != len(engines):
            given = f"{len(receivers)} are given for {len(engines)}. Fix: start python -m slime_like.weight_sync.delta.receiver on each engine's machine."
            return [f"--update-weight-mode delta needs one of --rollout-external-receiver-addrs for each external engine: {given}"]
        if engines and self.sync.update_weight_local_checkpoint_dir:
            return ["--update-weight-local-checkpoint-dir is for receivers that we start. Fix: --directory of the running receivers."]
        return []
