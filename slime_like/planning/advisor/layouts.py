"""Tries splits of a model over a number of GPUs and keeps those whose plan fits; used by advise."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from slime_like.config.batch import BatchConfig
from slime_like.config.data import DataConfig
from slime_like.config.engine import EngineConfig
from slime_like.config.model import ModelConfig
from slime_like.config.optimizer import OptimizerConfig
from slime_like.config.parallel import ParallelConfig
from slime_like.config.placement import PlacementConfig
from slime_like.config.reward import RewardConfig
from slime_like.config.rollout import RolloutConfig
from slime_like.config.run import RunConfig
from slime_like.config.sync import SyncConfig
from slime_like.config.transports import fitting
from slime_like.errors import ConfigError
from slime_like.planning.hardware import GIB
from slime_like.planning.memory.by_phase import MemoryPlan, memory_plan
from slime_like.planning.memory.engine_bytes import engine_elements
from slime_like.planning.memory.parameters import model_parameters
from slime_like.planning.placement import PlacementPlan, make_plan
from slime_like.planning.sync_bound import SyncPlan, sync_plan

_GROUPS = {
    "placement": PlacementConfig, "parallel": ParallelConfig, "data": DataConfig, "rollout": RolloutConfig,
    "reward": RewardConfig, "batch": BatchConfig,
    "optimizer": OptimizerConfig, "sync": SyncConfig,
}  # fmt: skip

_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
#: What is tried when a split does not fit, cheapest first: (parallel flags, optimizer flags, what it costs).
_REMEDIES: tuple[tuple[dict, dict, float], ...] = (
    ({}, {}, 0.0),
    (_RECOMPUTE, {}, 1.0),
    (_RECOMPUTE, {"optimizer_cpu_offload": True}, 4.0),
)

#: A KV cache below this share of the card keeps too few sequences in flight.
_LEAST_CACHE = 0.08
#: Left free on the card: fragmentation, and the error of the estimates.
_MARGIN = 0.04


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked for."""

    model: ModelConfig
    gpus: int
    gpu_memory_gib: float = 80.0
    gpus_per_node: int = 8
    max_tokens_per_gpu: int = 8192
    max_response_tokens: int = 8192
    rollout_batch_size: int = 32
    samples_per_prompt: int = 8

    def check(self) -> None:
        """Raises ConfigError for impossible numbers."""
        names = ("gpus", "gpu_memory_gib", "gpus_per_node", "max_tokens_per_gpu", "max_response_tokens")
        problems = [f"{name} {getattr(self, name)}: must be above 0." for name in names if not getattr(self, name) > 0]
        if not problems and self.gpus > self.gpus_per_node and self.gpus % self.gpus_per_node:
            problems.append(f"--gpus {self.gpus} are no whole machines of --gpus-per-node {self.gpus_per_node}.")
        if problems:
            raise ConfigError(problems)

    def why_nothing(self) -> list[str]:
        """The arithmetic that forbids every layout."""
        size = model_parameters(self.model)
        least = 6 * size / self.gpus / GIB
        arithmetic = (
            f"Nothing fits. Weights in bf16 and gradients in fp32 are 6 bytes a parameter: {least:.1f} GiB on each of"
            f" {self.gpus} GPUs even with the optimizer on the host, and {18 * size / self.gpus / GIB:.1f} GiB with it"
            " (18 bytes), before engines, activations and caches."
        )
        return [arithmetic, "Fix: more --gpus, a larger --gpu-memory-gib, or a smaller --max-tokens-per-gpu."]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Proposal:
    """One layout that fits."""

    settings: dict[str, dict]  # group -> field -> value, as given; "engine" holds --sglang- flags
    config: RunConfig
    plan: PlacementPlan
    memory: MemoryPlan
    sync: SyncPlan | None
    cost: float

    @property
    def title(self) -> str:
        """`colocated, 64 GPUs: trainer tensor 8 x pipeline 2 x data 4, 8 engines of 8`."""
        actor, engines = self.plan.roles["actor"], self.plan.engines
        expert = f" (experts over {actor.ep})" if actor.ep > 1 else ""
        mode = "colocated" if self.plan.mode == "colocate" else "disaggregated"
        where = "" if self.plan.mode == "colocate" else f" on {actor.num_gpus} GPUs"
        split = f"tensor {actor.tp} x pipeline {actor.pp} x data {actor.dp}{expert}"
        return (
            f"{mode}, {self.plan.num_gpus} GPUs: trainer{where} {split}, {len(engines)}"
            f" engine{'s' * (len(engines) > 1)} of {len(engines[0].bundles)}"
        )

    def reasons(self) -> list[str]:
        """Why it stands where it stands: peaks, caches, what it costs, the sync's bound."""
        fullest, limit = self.memory.fullest, self.memory.limit_bytes
        assert fullest is not None, "a proposal has GPUs"
        phase = max(fullest.phases, key=lambda p: p.total_bytes)
        cache = max(p.bytes.get("kv_cache", 0) for gpu in self.memory.per_gpu for p in gpu.phases)
        reasons = [
            (
                f"fullest GPU {phase.total_bytes / GIB:.1f} of {limit / GIB:.1f} GiB, in phase {phase.name}; KV cache"
                f" {cache / GIB:.1f} GiB on each engine GPU"
            )
        ]
        if self.config.optimizer.optimizer_cpu_offload:
            host = max(gpu.host_bytes for gpu in self.memory.per_gpu) / GIB
            reasons.append(
                f"slow steps: the optimizer is on the host ({host:.0f} GiB for each GPU), nothing else fits this split"
            )
        if self.config.parallel.recompute_granularity:
            reasons.append("activations are computed twice (about a third more work in training)")
        if self.plan.roles["actor"].pp > 1:
            reasons.append(
                f"{self.plan.roles['actor'].pp} pipeline stages: bubbles unless there are many micro-batches"
            )
        reasons.append(
            "trainer and engines take turns on all GPUs"
            if self.plan.mode == "colocate"
            else "each side waits while the other works, in the sync loop"
        )
        if self.sync is not None:
            reasons.append(
                f"weight sync {self.sync.bytes / 1e9:.1f} GB by {self.sync.transport}: at least"
                f" {self.sync.bound_s:.2f} s"
            )
        missing = "; ".join(problem.split(": a real run")[0] for problem in self.config.not_yet())
        return reasons + ([f"not in this version yet, only in its plan: {missing}"] if missing else [])

    def flags(self) -> list[str]:
        """The command line of this config, beside MODEL_ARGS."""
        flags = []
        for group, fields in self.settings.items():
            for name, value in fields.items():
                flag = f"--{'sglang-' if group == 'engine' else ''}{name.replace('_', '-')}"
                flags += [flag] if value is True else [flag, str(value)]
        return flags

    def flag_lines(self) -> list[str]:
        """The flags, a few on each line."""
        lines, current = [], ""
        for word in self.flags():
            if word.startswith("--") and len(current) > 100:
                lines.append(current.strip())
                current = ""
            current += word + " "
        return [line + " \\" for line in lines] + [current.strip()]


def propose(request: Request) -> list[Proposal]:
    """Every layout that fits, the cheapest by rules of thumb first; of one split only the best."""
    proposals: list[Proposal] = []
    for trainer_gpus, engine_gpus in _shares(request):
        engine = engine_size(request, engine_gpus or trainer_gpus)
        if engine is None:
            continue
        for tp, pp, ep in _splits(request, trainer_gpus):
            for recompute, offload, cost in _REMEDIES:
                proposal = _try(
                    request,
                    (trainer_gpus, engine_gpus, engine),
                    {**_split_flags(request, tp, pp, ep), **recompute},
                    offload,
                    cost,
                )
                if proposal is not None:
                    proposals.append(proposal)
                    break
    return sorted(proposals, key=lambda p: (p.cost, p.title))


def _shares(request: Request) -> Iterator[tuple[int, int]]:
    """(trainer's GPUs, engines' own GPUs): 0 engines' GPUs is colocated.

    Apart in whole machines, or in halves of one.
    """
    gpus, node = request.gpus, min(request.gpus, request.gpus_per_node)
    yield gpus, 0
    step = node if gpus > node else max(1, node // 2)
    for quarter in (1, 2, 3):
        trainer = gpus * quarter // 4 // step * step
        if 0 < trainer < gpus and (quarter == 2 or gpus > node):
            yield trainer, gpus - trainer


def engine_size(request: Request, gpus: int) -> int | None:
    """The smallest engine whose weights leave most of its cards to the KV cache, or, once it needs a whole machine, a
    good part of them.

    Else the largest that can hold them; None if none can.
    """
    model, card, possible = request.model, request.gpu_memory_gib * GIB, None
    size = 1
    while size <= gpus and (size <= request.gpus_per_node or size % request.gpus_per_node == 0):
        if gpus % size == 0 and model.num_attention_heads % size == 0:
            weights = 2 * engine_elements(model, tp=size, attention_tp=size, pp=1)
            if weights < (0.25 if size <= request.gpus_per_node // 2 else 0.6) * card:
                return size
            possible = size if weights < (1 - _LEAST_CACHE - 0.2) * card else possible
        size *= 2
    return possible


def _splits(request: Request, gpus: int) -> Iterator[tuple[int, int, int]]:
    """(tensor, pipeline, expert) sizes that divide the model and the GPUs, and could hold weights and gradients."""
    model, size = request.model, model_parameters(request.model)
    for tp in (1, 2, 4, 8):
        if (
            tp > min(request.gpus_per_node, gpus)
            or model.num_attention_heads % tp
            or model.num_kv_heads % tp
            or model.mlp_size % tp
        ):
            continue
        for pp in (1, 2, 4, 8, 16):
            if gpus % (tp * pp) or pp > model.num_layers:
                continue
            for ep in (1, 2, 4, 8, 16, 32, 64) if model.num_experts else (1,):
                data = gpus // (tp * pp)
                if (model.num_experts or 1) % ep or (data * tp) % ep:
                    continue
                # Experts are most of such a model; what is not divided by ep is checked by the plan.
                if 6 * size / (pp * (ep if model.num_experts else tp)) < request.gpu_memory_gib * GIB:
                    yield tp, pp, ep


def _split_flags(request: Request, tp: int, pp: int, ep: int) -> dict:
    """Parallel flags; where the layers do not divide, the last stage takes fewer, since it also has the logits."""
    flags: dict = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    layers = request.model.num_layers or 0
    if layers % pp:
        flags["decoder_last_pipeline_num_layers"] = layers - (pp - 1) * math.ceil(layers / pp)
    if tp > 1:
        flags["sequence_parallel"] = True
    if request.model.num_experts:
        flags |= {"expert_model_parallel_size": ep, "expert_tensor_parallel_size": 1}
    return flags


def _try(
    request: Request, gpus: tuple[int, int, int], parallel: dict, optimizer: dict, remedy_cost: float
) -> Proposal | None:
    """The proposal, or None if it is impossible or does not fit.

    gpus: the trainer's, the engines' own, of one engine.
    """
    if parallel.get("decoder_last_pipeline_num_layers", 1) < 1:
        return None
    settings = _settings(request, gpus, parallel, optimizer)
    config, plan = _plan(request, settings)
    if plan is None:
        return None
    memory = memory_plan(config, plan)
    fullest = memory.fullest
    cache = min(
        p.bytes.get("kv_cache", 0)
        for gpu in memory.per_gpu
        for p in gpu.phases
        if p.name == "generate" and "engine weights" in p.bytes
    )
    # Engines alone fill their cards on purpose; a trainer needs room for what the estimates miss.
    trainer = max(memory.per_gpu[index].peak_bytes for index in plan.roles["actor"].bundles)
    if (
        fullest is None
        or not memory.fits
        or trainer > (1 - _MARGIN) * memory.limit_bytes + GIB // 100
        or cache < _LEAST_CACHE * memory.limit_bytes
    ):
        return None
    sync = sync_plan(config, plan)
    # Half a minute of syncing in every step costs as much as a doubling of communication.
    cost = (
        _cost(request, plan, cache / memory.limit_bytes) + remedy_cost + (min(3.0, sync.bound_s / 30) if sync else 0.0)
    )
    return Proposal(settings=settings, config=config, plan=plan, memory=memory, sync=sync, cost=cost)


def _settings(request: Request, gpus: tuple[int, int, int], parallel: dict, optimizer: dict) -> dict[str, dict]:
    trainer, apart, engine = gpus
    node = min(trainer, request.gpus_per_node)
    placement: dict = {
        "actor_num_nodes": trainer // node,
        "actor_num_gpus_per_node": node,
        "rollout_num_gpus_per_engine": engine,
    }
    placement |= {"colocate": True} if not apart else {"rollout_num_gpus": apart}
    return {
        "placement": placement | {"num_gpus_per_node": request.gpus_per_node, "gpu_memory_gib": request.gpu_memory_gib},
        "parallel": parallel,
        "batch": {"use_dynamic_batch_size": True, "max_tokens_per_gpu": request.max_tokens_per_gpu},
        "rollout": {
            "rollout_batch_size": request.rollout_batch_size,
            "n_samples_per_prompt": request.samples_per_prompt,
            "rollout_max_response_len": request.max_response_tokens,
        },
        "optimizer": {"bf16": True} | optimizer,
        "data": {"num_rollout": 1},
        "reward": {"rm_type": "math"},
        # Shared memory ends at the machine, and NCCL refuses two ranks on one GPU.
        "sync": (
            {}
            if apart or trainer <= request.gpus_per_node
            else {"update_weight_transport": fitting(colocate=True, several_machines=True)[0]}
        ),
        # Engines apart from the trainer fill their cards up to a tenth that SGLang works in; the plan derives the share
        # of others.
        "engine": {"mem_fraction_static": 0.85} if apart else {},
    }


def _plan(request: Request, settings: dict[str, dict]) -> tuple[RunConfig, PlacementPlan | None]:
    groups = {name: _GROUPS[name](**fields) for name, fields in settings.items() if name != "engine"}
    engine = EngineConfig(sglang={name: str(value) for name, value in settings["engine"].items()})
    config = RunConfig(model=request.model, engine=engine, **groups)
    if config.problems():
        return config, None
    plan = make_plan(config)
    return config, None if plan.problems else plan


def _cost(request: Request, plan: PlacementPlan, cache: float) -> float:
    """Rules of thumb, in doublings of communication: tensor parallelism costs each layer a wait, pipelines bubbles,
    small caches queues.
    """
    actor, engine = plan.roles["actor"], len(plan.engines[0].bundles)
    cost = math.log2(actor.tp) + 1.2 * math.log2(actor.pp) + 0.3 * math.log2(actor.ep) + 0.5 * math.log2(engine)
    cost += max(0.0, 0.3 - cache) * 10
    if plan.mode != "colocate":
        # Trainer and engines idle in turns; least where both have the same.
        share = actor.num_gpus / plan.num_gpus
        cost += 1.5 + 2 * abs(share - 0.5)
    elif model_parameters(request.model) > 2e11:
        cost += 3.0  # the usual guideline for the largest models: engines and trainer apart
    return cost
