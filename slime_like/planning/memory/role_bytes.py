"""What one rank of a training role (actor, critic, reference, reward model) holds in each phase."""

from __future__ import annotations

import dataclasses

from slime_like.config.batch import BatchConfig
from slime_like.config.parallel import ParallelConfig
from slime_like.config.run import RunConfig
from slime_like.config.transports import transport_of
from slime_like.config.tree import TENANTS
from slime_like.planning.cards import cards_are_shared
from slime_like.planning.hardware import PROCESS_BYTES
from slime_like.planning.memory.activations import ActivationSizes
from slime_like.planning.memory.adapters import TenantRoom, adapter_chunks
from slime_like.planning.memory.parameters import Variant, stage_buffer_bytes, stage_chunks
from slime_like.planning.memory.trainer_bytes import Precision, StageBytes, TrainerBytes, bucket_elements
from slime_like.planning.placement import PlacementPlan

#: phase -> {part: bytes}
PhaseBytes = dict[str, dict[str, int]]

_PHASES = ("start", "generate", "score", "train", "sync")
#: In which engines have weights and KV cache.
_ENGINES_ALONE = ("start", "generate")


@dataclasses.dataclass(frozen=True)
class RankKey:
    """All that tells one rank's bytes from another's.

    source: 2 sends weights in a sync, 1 helps to gather them, 0 waits.
    """

    stage: int
    held: TrainerBytes
    source: int


class RoleBytes:
    """Bytes of every rank of one role.

    Ranks are in Megatron's order: tensor, context, data, pipeline parallel, the first fastest.
    """

    def __init__(self, config: RunConfig, plan: PlacementPlan, name: str, tenants: TenantRoom | None = None):
        """tenants: whom the actor's ranks hold adapters for, over a frozen base; None: they train as train.py does."""
        if name == "reward":  # a whole copy a GPU, and batches of its own
            batch = dataclasses.replace(
                config.batch, use_dynamic_batch_size=False, micro_batch_size=config.reward.reward_batch_size
            )
            config = dataclasses.replace(config, parallel=ParallelConfig(), batch=batch)
        self.name, self._config, self._plan, self._role = name, config, plan, plan.roles[name]
        self._precision = Precision.of(config.optimizer)
        self._trained = name in ("actor", "critic")
        self._tenants = tenants if name in ("actor", TENANTS) else None
        self._tenant_elements: dict[int, int] = {}  # stage -> of one adapter
        self._offloads = name != "reward" and config.offloads_train(on_gpu=True)
        self._swapped = name == "ref" and not plan.has_processes("ref")
        self._adapters = config.adapters if self._trained else None
        self._variant = Variant(value_head=name in ("critic", "reward"))
        parallel, model = config.parallel, config.model
        self._per_stage = max(1, self._role.num_gpus // parallel.pipeline_model_parallel_size)
        self._experts = (
            parallel.expert_tp_size * parallel.expert_model_parallel_size
            if model.num_experts
            else parallel.tensor_model_parallel_size
        )
        self._sizes = ActivationSizes(model=model, parallel=parallel, width=self._precision.weight)
        self._stages: dict[int, StageBytes] = {}
        self._largest: dict[int, int] = {}
        # to engines on the trainer's own cards every rank sends the whole model
        self._all_send = (
            name == "actor"
            and plan.transport is not None
            and transport_of(plan.transport).by_card
            and cards_are_shared(plan, plan.engines)
        )
        self._largest_of_all = 0
        self._keys: dict[tuple[int, int, int, int], RankKey] = {}

    def key(self, rank: int) -> RankKey:
        """What distinguishes this rank."""
        parallel = self._config.parallel
        stage, within = divmod(rank, self._per_stage)
        if stage not in self._stages:
            chunks = stage_chunks(self._config.model, parallel, stage, self._variant)
            dp_size = max(1, self._per_stage // parallel.tensor_model_parallel_size)
            trained, frozen = chunks, 0
            if self._tenants is not None:
                trained, frozen = [], sum(p.numel for chunk in chunks for p in chunk)
                adapters = adapter_chunks(self._config.model, parallel, stage, self._tenants.lora)
                self._tenant_elements[stage] = sum(p.numel for chunk in adapters for p in chunk)
            elif self._adapters is not None:
                head = self._variant.value_head
                trained = adapter_chunks(self._config.model, parallel, stage, self._adapters, value_head=head)
                both = {p.name for chunk in trained for p in chunk}  # a critic's head
                frozen = sum(p.numel for chunk in chunks for p in chunk if p.name not in both)
            self._stages[stage] = StageBytes(
                trained, parallel, self._precision, dp_size=dp_size,
                expert_dp_size=max(1, self._per_stage // self._experts),
                bucket_elements=bucket_elements(parallel, stage=stage, dp_size=dp_size), frozen_elements=frozen,
            )  # fmt: skip
            self._largest[stage] = (
                max((p.numel for chunk in chunks for p in chunk), default=0)
                * parallel.tensor_model_parallel_size
                * self._precision.weight
            )
        data_rank = within // parallel.tensor_model_parallel_size
        first_copy = data_rank < parallel.context_parallel_size
        source = 2 if self._all_send else (2 if within == 0 else 1) if first_copy else 0
        short = (stage, data_rank, within // self._experts, source)
        if short not in self._keys:
            self._keys[short] = RankKey(stage, self._stages[stage].of(data_rank, within // self._experts), source)
        return self._keys[short]

    def host_bytes(self, key: RankKey) -> int:
        """In the host's memory: the swapped reference and, while it is swapped in, the actor's own weights; what
        leaves the GPU while engines generate (gradients are zeros then, of which no copy is kept).

        Offloaded optimizer state.
        """
        held, only_weights = key.held, key.held.num_parameters * self._precision.weight
        if self._swapped:
            # Beside adapters the base itself is the reference.
            return 0 if self._config.lora.enabled else 2 * only_weights
        if self._tenants is not None:
            return self._tenants.on_host(self._tenant_elements[key.stage])
        offloaded = held.weights + held.optimizer if self._trained else only_weights
        return (offloaded if self._offloads else 0) + (held.host_optimizer if self._trained else 0)

    def phases(self, key: RankKey) -> PhaseBytes:
        """phase -> {part: bytes} of one rank."""
        if self._swapped:
            return {}
        model, parallel = self._config.model, self._config.parallel
        prefix, held = "" if self.name in ("actor", TENANTS) else self.name + " ", key.held
        buffers = stage_buffer_bytes(model, parallel, key.stage, weight_bytes=self._precision.weight)
        away = {"communication": PROCESS_BYTES}
        process = {prefix + "weights": held.weights + buffers, **away}
        if self.name in ("ref", "reward"):  # score only: no gradient buffers, no optimizer
            process[prefix + "weights"] = held.num_parameters * self._precision.weight + buffers
            scoring = "score" if self.name == "ref" else "generate"  # rewards are computed while engines still generate
            leaves = (*_ENGINES_ALONE, "sync") if self._offloads else ()
            return {
                phase: away if phase in leaves else process | (self._scoring(key, prefix) if phase == scoring else {})
                for phase in _PHASES
            }
        if self._tenants is not None:
            return self._tenant_phases(key, process)
        weights = process
        process = process | {prefix + "gradients": held.gradients}
        main_weights = self._main_weights(held)
        first = process | {prefix + "optimizer": main_weights}
        full = process | {prefix + "optimizer": held.optimizer}
        return {
            "start": away if self._offloads else first,  # when engines start: trainers are built before them
            "generate": away if self._offloads else full,
            "score": full | (self._scoring(key, prefix) if self._scores else {}),
            "train": full | self._training(key, prefix),
            "sync": self._sync_holds(full, weights, away) | (self._syncing(key) if self.name == "actor" else {}),
        }

    def _tenant_phases(self, key: RankKey, base: dict[str, int]) -> PhaseBytes:
        """Clients train and sample at any moment: their adapters are there in every phase but the start."""
        assert self._tenants is not None, "asked for tenants only"
        elements, width = self._tenant_elements[key.stage], self._precision.weight
        idle, passing = (
            base | self._tenants.on_device(elements, width=width, passing=passing) for passing in (False, True)
        )
        return {
            "start": base,
            "generate": idle,
            "score": idle | self._scoring(key, ""),
            "train": passing | self._training(key, ""),
            "sync": idle,
        }

    def _sync_holds(self, full: dict[str, int], weights: dict[str, int], away: dict[str, int]) -> dict[str, int]:
        """While engines take the policy's weights."""
        if not self._offloads:
            return full
        return weights if self.name == "actor" else away

    def _main_weights(self, held: TrainerBytes) -> int:
        """fp32 main weights: Adam's moments come with the first step."""
        state = self._precision.state
        return 0 if not state else held.optimizer * (state - 8) // state

    @property
    def _scores(self) -> bool:
        """Whether this role computes log-probs or values apart from training."""
        config = self._config
        return (
            self.name != "actor" or config.swaps_reference or (config.num_steps_per_rollout > 1 and not config.is_sft)
        )

    @property
    def tokens(self) -> int:
        """Most tokens of a micro-batch on one GPU: a pack, or one sample that is longer than a pack may be.

        Context parallel ranks share it.
        """
        return self._most_tokens(self._config.batch)

    def _most_tokens(self, batch: BatchConfig) -> int:
        config, rollout = self._config, self._config.rollout
        longest = (config.data.rollout_max_prompt_len or 0) + rollout.rollout_max_response_len
        longest = min(
            longest, rollout.rollout_max_context_len or config.model.context_tokens, config.model.context_tokens
        )
        # --max-tokens-per-gpu already counts one context parallel rank's share.
        share = -(-longest // config.parallel.context_parallel_size)
        if batch.use_dynamic_batch_size and batch.max_tokens_per_gpu:
            return max(batch.max_tokens_per_gpu, share)
        return share * batch.micro_batch_size

    def _logits(self, key: RankKey, tokens: int) -> int:
        if self._variant.value_head or key.stage != self._config.parallel.pipeline_model_parallel_size - 1:
            return 0
        return int(self._sizes.logits(tokens, chunk_tokens=self._config.batch.log_probs_chunk_tokens(on_gpu=True)))

    def _scoring(self, key: RankKey, prefix: str) -> dict[str, int]:
        tokens = self._most_tokens(self._config.batch.scoring)
        return {
            prefix + "activations": int(tokens * self._sizes.forward_only()),
            prefix + "logits": self._logits(key, tokens),
        }

    def _training(self, key: RankKey, prefix: str) -> dict[str, int]:
        """The first stage starts as many micro-batches as there are stages before the first one comes back (1F1B).

        Interleaved, stage s of p starts 2 (p - s - 1) + (v - 1) p + 1 micro-batches of one of its v chunks (Megatron's
        get_pp_rank_microbatches).
        """
        config = self._config
        per_rank = max(1, config.global_batch_size // max(1, self._role.dp))
        batches = per_rank if config.batch.use_dynamic_batch_size else max(1, per_rank // config.batch.micro_batch_size)
        stages, chunks = (
            config.parallel.pipeline_model_parallel_size,
            config.parallel.virtual_pipeline_size(config.model.num_layers) or 1,
        )
        in_flight: float = min(stages - key.stage, batches)
        if chunks > 1:
            batches = max(batches, stages)  # filled up with empty ones
            in_flight = min(2 * (stages - key.stage - 1) + (chunks - 1) * stages + 1, batches * chunks) / chunks
        every, once = self._sizes.kept_bytes(key.stage)
        sizes = {
            prefix + "activations": int(self.tokens * (in_flight * every + once)),
            prefix + "logits": self._logits(key, self.tokens),
        }
        # the step works on an fp32 copy of the owned gradients
        if self._precision.gradient == 2 and self._precision.state and self._tenants is None:
            sizes[prefix + "gradient copy"] = held_elements(key.held, self._precision) * 4
        return sizes

    def _syncing(self, key: RankKey) -> dict[str, int]:
        """A source gathers whole tensors up to a bucket and sends them as one flat copy.

        Its neighbours gather one tensor with it.
        """
        buffer, stages = self._config.sync.update_weight_buffer_size, self._config.parallel.pipeline_model_parallel_size
        if not self._all_send or stages == 1:
            bucket = max(buffer, self._largest[key.stage])
            return {"sync buffers": (0, self._largest[key.stage], 2 * bucket)[key.source]}
        if not self._largest_of_all:
            for stage in range(stages):
                self.key(stage * self._per_stage)
            self._largest_of_all = max(self._largest.values())  # of all stages
        largest = self._largest_of_all
        # and what goes from stage to stage
        return {"sync buffers": 2 * max(buffer, largest) + max(buffer // 2, largest)}


def held_elements(held: TrainerBytes, precision: Precision) -> int:
    """Elements whose optimizer state a rank owns."""
    return held.optimizer // precision.state if precision.state else 0
