"""The frozen tree of all config groups, and the rules that reach across groups."""

from __future__ import annotations

import dataclasses
import json

from slime_like.config.base import PluginArgs
from slime_like.config.model import ModelConfig, ParallelConfig
from slime_like.config.rollout import DataConfig, EvalConfig, RewardConfig, RolloutConfig
from slime_like.config.system import EngineConfig, ObservabilityConfig, PlacementConfig, SyncConfig
from slime_like.config.training import BatchConfig, CheckpointConfig, LossConfig, OptimizerConfig

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
        return self.loss.use_kl_loss and not self.is_sft

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
                found += group.problems() if group.num_layers is not None else []
            elif name == "parallel":
                found += group.problems(self.model)
            else:
                found += group.problems()
        return found + (self._batch_problems() if not found else []) + self._role_problems()

    def missing_files(self) -> list[str]:
        """Every path that a run needs and that is not there."""
        found = self.checkpoint.missing_files() + self.eval.missing_files() + self.observability.missing_files()
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

    def _role_problems(self) -> list[str]:
        found = []
        if self.needs_reference and not self.checkpoint.ref_load:
            found.append("--use-kl-loss needs --ref-load, the reference model.")
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
        if self.uses_engines and not self.reward.rm_type and not self.reward.custom_rm_path:
            found.append("samples need a reward: give --rm-type or --custom-rm-path.")
        sync = self.sync.update_weight_transport
        if sync == "ipc" and not self.placement.colocate:
            found.append("--update-weight-transport ipc needs --colocate. Fix: broadcast or disk.")
        if sync == "broadcast" and self.placement.colocate:
            found.append("--update-weight-transport broadcast does not go with --colocate: NCCL refuses two ranks on one GPU. Fix: ipc or disk.")
        return found
