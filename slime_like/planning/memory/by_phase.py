"""Config + placement -> bytes on every GPU in every phase of a step, and whether they fit.

Weights, gradients and optimizer state of the trainer are exact; everything else is an estimate (docs/planning.md says
how good). It tells what this version does, not what could be done: on shared GPUs engines give their memory back while
training (--offload-rollout) and trainers theirs while engines generate (--offload-train); a swapped reference lies in
the host's memory.
"""

from __future__ import annotations

import dataclasses
import functools

from slime_like.config.run import RunConfig
from slime_like.planning.hardware import GIB, PROCESS_BYTES, card_bytes
from slime_like.planning.memory.adapters import TenantRoom
from slime_like.planning.memory.engine_bytes import EngineBytes, engine_bytes, has_share
from slime_like.planning.memory.role_bytes import PhaseBytes, RankKey, RoleBytes
from slime_like.planning.placement import PlacementPlan

#: The phases of one step, in order; "start" stands before the first.
PHASES = ("start", "generate", "score", "train", "sync")

#: What an engine's --sglang-mem-fraction-static is for.
_STATIC = ("engine weights", "engine adapter weights", "kv_cache")
#: Phases in which nothing of the run happens, by mode.
_ABSENT = {"train_only": ("generate", "sync"), "rollout_only": ("score", "train", "sync")}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhaseMemory:
    """Bytes on one GPU during one phase, by what they are for."""

    name: str
    bytes: dict[str, int]

    @functools.cached_property
    def total_bytes(self) -> int:
        """All of them."""
        return sum(self.bytes.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class GpuMemory:
    """One GPU over one step. host_bytes: what its processes keep in the host's memory for it."""

    bundle: int
    phases: tuple[PhaseMemory, ...]
    limit_bytes: int
    host_bytes: int = 0
    engine_fits: bool = True  # whether the engine's weights fit in its own share of the card

    @functools.cached_property
    def peak_bytes(self) -> int:
        """The fullest phase."""
        return max((phase.total_bytes for phase in self.phases), default=0)

    @functools.cached_property
    def fits(self) -> bool:
        """Whether the fullest phase is within the card, and the engine's weights within its share."""
        return self.peak_bytes <= self.limit_bytes and self.engine_fits


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryPlan:
    """Every GPU of the run. advice: flags that would make it fit, best first; empty where it does.

    mem_fraction_static: what engines on the trainer's GPUs are started with, where --sglang-mem-fraction-static does
    not say it.
    """

    limit_bytes: int
    per_gpu: tuple[GpuMemory, ...]
    advice: tuple[str, ...] = ()
    mem_fraction_static: float | None = None

    @property
    def fits(self) -> bool:
        """Whether every GPU is within the card."""
        return all(gpu.fits for gpu in self.per_gpu)

    @property
    def fullest(self) -> GpuMemory | None:
        """The GPU with the highest peak."""
        return max(self.per_gpu, key=lambda gpu: (not gpu.fits, gpu.peak_bytes), default=None)

    def to_dict(self) -> dict:
        """The "memory" of `--plan json`."""
        shared: dict[int, list[dict]] = {}  # GPUs with the same phases share one list: there may be thousands
        for gpu in self.per_gpu:
            if id(gpu.phases) not in shared:
                shared[id(gpu.phases)] = [
                    {"name": p.name, "bytes": p.bytes, "total_bytes": p.total_bytes} for p in gpu.phases
                ]
        per_gpu = [
            {
                "bundle": gpu.bundle,
                "phases": shared[id(gpu.phases)],
                "peak_bytes": max((phase["total_bytes"] for phase in shared[id(gpu.phases)]), default=0),
                "fits": gpu.fits,
                "host_bytes": gpu.host_bytes,
            }
            for gpu in self.per_gpu
        ]
        share = {} if self.mem_fraction_static is None else {"mem_fraction_static": self.mem_fraction_static}
        return {
            "limit_bytes": self.limit_bytes, "fits": self.fits, "advice": list(self.advice), **share, "per_gpu": per_gpu
        }  # fmt: skip


def memory_plan(config: RunConfig, plan: PlacementPlan, tenants: TenantRoom | None = None) -> MemoryPlan:
    """Bytes of every GPU of `plan` in every phase. The architecture must be known. tenants: of a Tinker server."""
    limit, cards = card_bytes(config.placement), _Cards(config, plan, tenants)
    engine = None
    if cards.engine_bundles:
        engine = engine_bytes(config, limit, cards.beside_engines() if config.shares_cards else None)
    gpus = _gpus(config, cards, engine, limit)
    fullest = max(gpus, key=lambda gpu: (not gpu.fits, gpu.peak_bytes), default=None)
    advice = () if fullest is None or fullest.fits else tuple(_advice(config, plan, fullest))
    derives = engine is not None and config.shares_cards and not has_share(config)
    return MemoryPlan(
        limit_bytes=limit,
        per_gpu=gpus,
        advice=advice,
        mem_fraction_static=engine.share if engine is not None and derives else None,
    )


#: What holds one GPU: (role, what tells its rank from others), and whether an engine does.
_Holders = tuple[tuple[tuple[str, RankKey], ...], bool]


class _Cards:
    """Which roles hold each GPU of a plan; GPUs with the same holders have the same bytes."""

    def __init__(self, config: RunConfig, plan: PlacementPlan, tenants: TenantRoom | None):
        self.plan = plan
        self.phases = tuple(name for name in PHASES if name not in _ABSENT.get(plan.mode, ()))
        self.engine_bundles = {index for engine in plan.engines for index in engine.bundles}
        self._roles = {name: RoleBytes(config, plan, name, tenants) for name in plan.roles if name != "rollout"}
        positions = [
            (name, {index: rank for rank, index in enumerate(plan.roles[name].bundles)}) for name in self._roles
        ]
        self.holders: list[_Holders] = [
            (
                tuple((name, self._roles[name].key(at[index])) for name, at in positions if index in at),
                index in self.engine_bundles,
            )
            for index in (bundle.index for bundle in plan.bundles)
        ]

    def role_phases(self, holders: _Holders) -> list[PhaseBytes]:
        """What each training role holds there."""
        return [self._roles[name].phases(key) for name, key in holders[0]]

    def host_bytes(self, holders: _Holders) -> int:
        """In the host's memory."""
        return sum(self._roles[name].host_bytes(key) for name, key in holders[0])

    def beside_engines(self) -> dict[str, int]:
        """Most bytes of training roles on a GPU with an engine, by phase."""
        most = dict.fromkeys(self.phases, 0)
        for holders in dict.fromkeys(held for held in self.holders if held[1]):
            for phase in _add(self.role_phases(holders), self.phases):
                most[phase.name] = max(most[phase.name], phase.total_bytes)
        return most


def _gpus(config: RunConfig, cards: _Cards, engine: EngineBytes | None, limit: int) -> tuple[GpuMemory, ...]:
    known: dict[_Holders, tuple[tuple[PhaseMemory, ...], int, bool]] = {}
    gpus = []
    for bundle, holders in zip(cards.plan.bundles, cards.holders, strict=True):
        if holders not in known:
            parts, fits = cards.role_phases(holders), True
            if holders[1] and engine is not None:
                parts.append(_engine_phases(config, engine))
                fits = engine.kv_cache > 0
            known[holders] = (_add(parts, cards.phases), cards.host_bytes(holders), fits)
        memory, host, fits = known[holders]
        gpus.append(GpuMemory(bundle=bundle.index, phases=memory, limit_bytes=limit, host_bytes=host, engine_fits=fits))
    return tuple(gpus)


def _engine_phases(config: RunConfig, engine: EngineBytes) -> PhaseBytes:
    """Engines on the trainer's GPUs give weights and KV cache back after generating, weights first come back for the
    sync; the base of adapters stays.
    """
    weights = {
        "engine weights": engine.weights,
        "engine adapter weights": engine.adapters,
        "communication": PROCESS_BYTES,
        "engine graphs": engine.graphs,
    }
    held = weights | {"kv_cache": max(0, engine.kv_cache)}
    bucket = {"sync buffers": config.sync.update_weight_buffer_size}
    back = weights if config.offload_rollout else held
    own = ("communication", "engine graphs")
    idle = {name: weights[name] for name in own} if "weights" in config.released_by_engines else back
    return {
        "start": held,
        "generate": held | {"engine work": engine.work},
        "score": idle,
        "train": idle,
        "sync": back | bucket,
    }


def _add(parts: list[PhaseBytes], names: tuple[str, ...]) -> tuple[PhaseMemory, ...]:
    """Roles on one GPU are processes of their own: what they hold adds up; their allocators share nothing."""
    phases = []
    for name in names:
        total: dict[str, int] = {}
        for part in parts:
            for what, size in part.get(name, {}).items():
                total[what] = total.get(what, 0) + int(size)
        phases.append(PhaseMemory(name=name, bytes={what: size for what, size in total.items() if size}))
    return tuple(phases)


def _advice(config: RunConfig, plan: PlacementPlan, gpu: GpuMemory) -> list[str]:
    """Flags that lower the fullest phase of the fullest GPU, by how much each can give."""
    phase = max(gpu.phases, key=lambda p: p.total_bytes)
    over, parts, advice = phase.total_bytes - gpu.limit_bytes, phase.bytes, []
    if not gpu.engine_fits:
        advice.append(
            "--rollout-num-gpus-per-engine: a larger engine, or a larger --sglang-mem-fraction-static; its weights do"
            " not fit in its share"
        )
    gib = {name: f"{size / GIB:.1f} GiB" for name, size in parts.items()}
    static = gpu.limit_bytes - sum(size for name, size in parts.items() if name not in _STATIC)
    if parts.get("kv_cache", 0) > max(0, over) > 0 and static > 0:
        share = int(100 * static / gpu.limit_bytes) / 100
        advice.append(
            f"--sglang-mem-fraction-static {share:g}: {phase.name} is {over / GIB:.1f} GiB too full, the KV cache has"
            f" {gib['kv_cache']}"
        )
    if config.shares_cards and not config.offloads_train(on_gpu=True) and phase.name in ("start", "generate"):
        advice.append("--offload-train: the trainer leaves its GPUs while engines generate")
    if plan.mode == "colocate" and not config.offload_rollout and phase.name in ("score", "train"):
        advice.append("--offload-rollout: the engines give their memory back while training")
    if parts.get("activations", 0) and config.parallel.recompute_granularity != "full":
        advice.append(
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1: activations are"
            f" {gib['activations']}"
        )
    if parts.get("logits", 0) > 2 * GIB and config.batch.log_probs_chunk_size == -1:
        advice.append(f"--log-probs-chunk-size 1024: what stands around the logits is {gib['logits']}")
    if parts.get("logits", 0) + parts.get("activations", 0) > 2 * GIB and config.batch.max_tokens_per_gpu:
        advice.append(
            f"a smaller --max-tokens-per-gpu than {config.batch.max_tokens_per_gpu}, and --sequence-parallel where"
            " there is tensor parallelism"
        )
    if parts.get("optimizer", 0):
        if not config.parallel.use_distributed_optimizer and config.data_parallel_size > 1:
            advice.append(
                f"--use-distributed-optimizer: splits {gib['optimizer']} of optimizer state over"
                f" {config.data_parallel_size} data parallel ranks"
            )
        advice.append(f"--optimizer-cpu-offload: moves {gib['optimizer']} of optimizer state to the host")
    if parts.get("weights", 0):
        model = config.parallel.model_parallel_size
        advice.append(
            f"a larger --tensor-model-parallel-size or --pipeline-model-parallel-size than their product {model}, or"
            " more --actor-num-nodes"
        )
    if plan.mode == "colocate":
        advice.append("engines on GPUs of their own: --rollout-num-gpus instead of --colocate")
    return advice
