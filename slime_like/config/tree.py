"""The frozen tree of all config groups, and what follows from several of them together."""

from __future__ import annotations

import dataclasses

from slime_like.config.agents import AgentConfig
from slime_like.config.asynchrony import AsyncConfig
from slime_like.config.batch import BatchConfig
from slime_like.config.checkpoint import CheckpointConfig
from slime_like.config.data import DataConfig
from slime_like.config.engine import EngineConfig
from slime_like.config.evaluation import EvalConfig
from slime_like.config.lora import LoraConfig
from slime_like.config.loss import LossConfig
from slime_like.config.model import ModelConfig
from slime_like.config.observability import ObservabilityConfig
from slime_like.config.optimizer import OptimizerConfig
from slime_like.config.parallel import ParallelConfig
from slime_like.config.placement import PlacementConfig
from slime_like.config.reward import RewardConfig
from slime_like.config.rollout import RolloutConfig
from slime_like.config.serving import ServingConfig
from slime_like.config.sync import SyncConfig

GROUPS = {
    "placement": PlacementConfig,
    "model": ModelConfig,
    "parallel": ParallelConfig,
    "checkpoint": CheckpointConfig,
    "data": DataConfig,
    "rollout": RolloutConfig,
    "asynchrony": AsyncConfig,
    "agents": AgentConfig,
    "serving": ServingConfig,
    "reward": RewardConfig,
    "eval": EvalConfig,
    "batch": BatchConfig,
    "loss": LossConfig,
    "optimizer": OptimizerConfig,
    "lora": LoraConfig,
    "engine": EngineConfig,
    "sync": SyncConfig,
    "observability": ObservabilityConfig,
}


#: The role of a trainer whose base is frozen and whose clients each bring what they train.
TENANTS = "tenants"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigTree:
    """All groups, and values derived from them; RunConfig is this with its rules."""

    placement: PlacementConfig = PlacementConfig()
    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    data: DataConfig = DataConfig()
    rollout: RolloutConfig = RolloutConfig()
    asynchrony: AsyncConfig = AsyncConfig()
    agents: AgentConfig = AgentConfig()
    serving: ServingConfig = ServingConfig()
    reward: RewardConfig = RewardConfig()
    eval: EvalConfig = EvalConfig()
    batch: BatchConfig = BatchConfig()
    loss: LossConfig = LossConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    lora: LoraConfig = LoraConfig()
    engine: EngineConfig = EngineConfig()
    sync: SyncConfig = SyncConfig()
    observability: ObservabilityConfig = ObservabilityConfig()
    #: whose config this is: "actor", "critic", "ref" in the processes of a reference on GPUs of its own, or TENANTS
    role: str = "actor"
    #: what --custom-config-path holds: args.<key> of the user's functions
    custom: dict = dataclasses.field(default_factory=dict)

    @property
    def data_parallel_size(self) -> int:
        """Copies of the model that train on different samples."""
        return self.placement.actor_num_gpus // self.parallel.model_parallel_size

    @property
    def adapters(self) -> LoraConfig | None:
        """What this role trains over a frozen base: with --lora-rank adapters, a critic its own and its head
        (megatron_backend/step/critic.py); None: the model itself.
        """
        return self.lora if self.lora.enabled and self.role in ("actor", "critic") else None

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
        value = self.placement.offload if value is None else value
        return self.placement.colocate if value is None else value

    @property
    def released_by_engines(self) -> tuple[str, ...]:
        """What engines give back around training, by SGLang's names; nothing without --offload-rollout.

        Weights come back without their contents, which a sync sends again; of engines that are sent adapters only, the
        base stays.
        """
        if not self.offload_rollout:
            return ()
        return ("kv_cache",) if self.sync.sends_adapters else ("kv_cache", "weights")

    @property
    def shares_cards(self) -> bool:
        """Whether trainer and engines take turns on the same GPUs."""
        return self.placement.colocate and self.uses_engines and not self.placement.debug_rollout_only

    def offloads_train(self, *, on_gpu: bool) -> bool:
        """Whether the train state leaves its device while engines generate. on_gpu: whether that is a GPU."""
        value = self.placement.offload_train
        value = self.placement.offload if value is None else value
        return self.shares_cards and (on_gpu if value is None else value)

    def starts_in_turn(self, *, on_gpu: bool) -> bool:
        """Whether engines start when trainers are up and have made room: SGLang sizes its cache by what is free then,
        which must not change meanwhile. On a CPU host all start at once, which is faster.
        """
        return self.shares_cards and (on_gpu or self.offloads_train(on_gpu=False))

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
    def pause_mode(self) -> str:
        """What becomes of requests that run when weights change: --update-weight-pause-mode with its default."""
        return self.sync.update_weight_pause_mode or ("retract" if self.asynchrony.is_full else "abort")

    @property
    def keeps_partial_answers(self) -> bool:
        """Whether an answer that we end ourselves is gone on with later, instead of being asked for again."""
        return self.asynchrony.partial_rollout or (self.asynchrony.is_full and self.pause_mode == "abort")

    @property
    def plays_episodes(self) -> bool:
        """Whether a sample is an episode of several answers: with our environment, or with a foreign agent."""
        return bool(self.agents.env) or self.serving.serve_rollout

    @property
    def router_policy(self) -> str:
        """How our router picks an engine: an episode's turns go to one that has its beginning in the cache."""
        return self.engine.sglang_router_policy or ("manual" if self.plays_episodes else "cache_aware")

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
