"""How many bytes a weight sync moves, and how long it must take at least.

A bound, not a forecast: bytes over the rate of the slowest wire that each byte must cross, nothing for starting, converting, hashing.
"""

from __future__ import annotations

import dataclasses

from slime_like.config.run import RunConfig
from slime_like.planning.hardware import bandwidths
from slime_like.planning.parameters import model_parameters
from slime_like.planning.placement import PlacementPlan
from slime_like.planning.trainer_bytes import Precision

#: Share of the weights that a sync finds changed, for the delta row: an assumption, not a measurement.
DELTA_SHARE = 0.05
#: A changed value is sent with its 4-byte position.
_POSITION_BYTES = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class SyncBound:
    """One way of syncing. available: whether this version can do it on these GPUs."""

    transport: str
    bytes: int
    bound_s: float
    how: str
    available: bool = True


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
        others = [{"transport": o.transport, "bytes": o.bytes, "bound_s": o.bound_s, "available": o.available} for o in self.others]
        return {"transport": self.transport, "bytes": self.bytes, "bound_s": self.bound_s, "how": self.how, "others": others}


def weight_bytes(config: RunConfig) -> int:
    """Bytes of all HF tensors: unpadded, a tied embedding once, routers' fp32 biases with them."""
    model = config.model
    routers = sum(model.expert_layers) * 4 * model.num_experts if model.moe_router_enable_expert_bias else 0
    return Precision.of(config.optimizer).weight * model_parameters(model) + routers


def bounds(
    size: int, rates: dict[str, float], *, same_node: bool, engine_gpus: int, width: int = 2, num_sources: int = 1, num_engines: int = 2
) -> dict[str, SyncBound]:
    """Every transport's bound for `size` bytes. rates: bytes a second by name. engine_gpus: of one engine, which split what they load.

    num_sources: pipeline stages, each of which sends its share from a card of its own.
    """
    wire, name = (rates["nvlink"], "nvlink") if same_node else (rates["network"], "network")
    # Engines load one bucket while the next is copied to the host, and pcie goes both ways at once.
    host = max(size / num_sources, size / engine_gpus) / rates["pcie"]
    disk = size / rates["disk"] * (1 if same_node else 2)
    delta = int(size / width * DELTA_SHARE * (width + _POSITION_BYTES))
    return {
        "ipc": SyncBound(
            transport="ipc", bytes=size, bound_s=host, available=same_node,
            how=f"over pcie to the host, each source its {1 / num_sources:.0%}, and back at the same time, each engine GPU its {1 / engine_gpus:.0%}"
            + ("" if same_node else "; engines on other machines than their source cannot be reached this way"),
        ),
        "ipc-handles": SyncBound(
            transport="ipc-handles", bytes=size, bound_s=size / engine_gpus / rates["ipc"],
            available=same_node and num_sources == num_engines == 1,
            how="CUDA IPC: each GPU copies its share within the card (with one engine and one pipeline stage)",
        ),
        "broadcast": SyncBound(transport="broadcast", bytes=size, bound_s=size / wire, how=f"one source at a time over {name}"),
        "disk": SyncBound(
            transport="disk", bytes=size, bound_s=disk,
            how="written once; read from the page cache of the same machine" if same_node else "written once, then read once by all engines together",
        ),
        "delta": SyncBound(
            transport="delta", bytes=delta, bound_s=delta / rates["network"],
            how=f"if {DELTA_SHARE:.0%} of the weights changed, value and position of each over network",
        ),
    }  # fmt: skip


def sync_plan(config: RunConfig, plan: PlacementPlan) -> SyncPlan | None:
    """The sync of `plan`; None where there is none (debug modes, supervised)."""
    if plan.transport is None:
        return None
    trainer = {plan.bundles[i].node for i in plan.roles["actor"].bundles}
    engines = {plan.bundles[i].node for engine in plan.engines for i in engine.bundles}
    # External engines are elsewhere. A source sends from its own machine to every engine, wherever their trainer ranks are.
    same_node = bool(engines) and len(trainer | engines) == 1
    size, width = weight_bytes(config), Precision.of(config.optimizer).weight
    sizes = {"engine_gpus": config.placement.rollout_num_gpus_per_engine, "num_engines": len(plan.engines)}
    sizes["num_sources"] = config.parallel.pipeline_model_parallel_size
    found = bounds(size, bandwidths(config.placement), same_node=same_node, width=width, **sizes)
    on_device = plan.transport == "ipc" and found["ipc-handles"].available
    chosen = found.pop("ipc-handles" if on_device else plan.transport)
    return SyncPlan(transport=plan.transport, bytes=chosen.bytes, bound_s=chosen.bound_s, how=chosen.how, others=tuple(found.values()))


def render_sync(plan: SyncPlan | None) -> str:
    """Several lines for a terminal."""
    if plan is None:
        return ""
    lines = [f"weight sync by {plan.transport}: {plan.bytes / 1e9:.2f} GB, at least {_seconds(plan.bound_s)} ({plan.how})"]
    for other in plan.others:
        lines.append(f"  {other.transport:<12} {other.bytes / 1e9:8.2f} GB  at least {_seconds(other.bound_s):>9}  {other.how}")
    return "\n".join(lines)


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"
