"""How many bytes a weight sync moves, and how long it must take at least.

A bound, not a forecast: bytes over the rate of the slowest wire that each byte must cross, nothing for starting,
converting, hashing.
"""

from __future__ import annotations

import dataclasses

from slime_like.config.parallel import ParallelConfig
from slime_like.config.quantisation import NONE
from slime_like.config.run import RunConfig
from slime_like.config.transports import TRANSPORTS, SyncBound, SyncShape, transport_of
from slime_like.planning.cards import cards_are_shared
from slime_like.planning.hardware import bandwidths
from slime_like.planning.memory.adapters import adapter_chunks
from slime_like.planning.memory.eight_bits import model_bytes
from slime_like.planning.memory.trainer_bytes import Precision
from slime_like.planning.placement import PlacementPlan


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyncPlan:
    """One weight sync by the chosen transport, and what the others would take."""

    transport: str
    bytes: int
    bound_s: float
    how: str
    others: tuple[SyncBound, ...] = ()

    def to_dict(self) -> dict:
        """The "weight_sync" of `--plan json`."""
        others = [
            {"transport": o.transport, "bytes": o.bytes, "bound_s": o.bound_s, "available": o.available}
            for o in self.others
        ]
        return {
            "transport": self.transport,
            "bytes": self.bytes,
            "bound_s": self.bound_s,
            "how": self.how,
            "others": others,
        }


def weight_bytes(config: RunConfig) -> int:
    """Bytes of all HF tensors that are sent: unpadded, a tied embedding once, routers' fp32 biases and the scales of
    what is in eight bits with them.
    """
    model, width = config.model, Precision.of(config.optimizer).weight
    routers = sum(model.expert_layers) * 4 * model.num_experts if model.moe_router_enable_expert_bias else 0
    return model_bytes(model, width=width, quantization=config.sync.rollout_quantization) + routers


def adapter_bytes(config: RunConfig) -> int:
    """Bytes of all adapters, unsplit; 0 without any."""
    if config.adapters is None:
        return 0
    chunks = adapter_chunks(config.model, ParallelConfig(), 0, config.adapters)
    return Precision.of(config.optimizer).weight * sum(p.numel for chunk in chunks for p in chunk)


def bounds(shape: SyncShape) -> dict[str, SyncBound]:
    """Every way's bound, by its name."""
    every = (bound for row in TRANSPORTS.values() for bound in row.bounds(shape))
    return {bound.transport: bound for bound in every if bound.bytes}


def sync_plan(config: RunConfig, plan: PlacementPlan) -> SyncPlan | None:
    """The sync of `plan`; None where there is none (debug modes, supervised)."""
    if plan.transport is None:
        return None
    trainer = {plan.bundles[i].node for i in plan.roles["actor"].bundles}
    engines = {plan.bundles[i].node for engine in plan.engines for i in engine.bundles}
    # External engines are elsewhere. A source sends from its own machine to every engine, wherever their trainer ranks
    # are.
    same_node = bool(engines) and len(trainer | engines) == 1
    tp_size, pp_size = config.parallel.tensor_model_parallel_size, config.parallel.pipeline_model_parallel_size
    shape = SyncShape(
        num_bytes=weight_bytes(config),
        rates=bandwidths(config.placement),
        same_node=same_node,
        engine_gpus=config.placement.rollout_num_gpus_per_engine,
        width=Precision.of(config.optimizer).weight if config.sync.rollout_quantization == NONE else 1,
        num_sources=pp_size,
        adapter_bytes=adapter_bytes(config),
        model_gpus=tp_size * pp_size if cards_are_shared(plan, plan.engines) else 0,
    )
    every, own = bounds(shape), transport_of(plan.transport).bounds(shape)
    chosen = every.pop(next((bound for bound in reversed(own) if bound.available), own[0]).transport)
    return SyncPlan(
        transport=plan.transport,
        bytes=chosen.bytes,
        bound_s=chosen.bound_s,
        how=chosen.how,
        others=tuple(every.values()),
    )


def render_sync(plan: SyncPlan | None) -> str:
    """Several lines for a terminal."""
    if plan is None:
        return ""
    lines = [
        f"weight sync by {plan.transport}: {plan.bytes / 1e9:.2f} GB, at least {_seconds(plan.bound_s)} ({plan.how})"
    ]
    for other in plan.others:
        lines.append(
            f"  {other.transport:<12} {other.bytes / 1e9:8.2f} GB  at least {_seconds(other.bound_s):>9}  {other.how}"
        )
    return "\n".join(lines)


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"
