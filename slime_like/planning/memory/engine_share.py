"""The share of a card that engines beside a trainer are started with, for the cards that are really there."""

from __future__ import annotations

import dataclasses

from slime_like.config.run import RunConfig
from slime_like.errors import PlacementError
from slime_like.planning.hardware import GIB
from slime_like.planning.memory.adapters import TenantRoom
from slime_like.planning.memory.by_phase import memory_plan
from slime_like.planning.placement import PlacementPlan


def with_engine_share(
    config: RunConfig, plan: PlacementPlan, card_bytes: int | None, tenants: TenantRoom | None = None
) -> RunConfig:
    """The config with --sglang-mem-fraction-static as the plan derives it; as it is where the flag is given, or engines
    have GPUs of their own.

    card_bytes: of the trainer's cards, for which --gpu-memory-gib stands in where it is given. tenants: of
    a Tinker server. Raises PlacementError if the trainer leaves no room for a KV cache.
    """
    placement = config.placement
    if placement.gpu_memory_gib is None and card_bytes is not None:
        placement = dataclasses.replace(placement, gpu_memory_gib=card_bytes / GIB)
    memory = memory_plan(dataclasses.replace(config, placement=placement), plan, tenants)
    share = memory.mem_fraction_static
    if share is None:
        return config
    full = [gpu for gpu in memory.per_gpu if not gpu.engine_fits]
    if full:
        (parts,) = (phase.bytes for phase in full[0].phases if phase.name == "generate")
        held = ", ".join(f"{part} {size / GIB:.1f}" for part, size in parts.items() if part != "kv_cache")
        raise PlacementError(
            f"the trainer leaves an engine on GPU {full[0].bundle} no room for a KV cache: {held} GiB of"
            f" {memory.limit_bytes / GIB:.1f}.\n  --colocate --offload-train --rollout-num-gpus-per-engine"
            f" {placement.rollout_num_gpus_per_engine}\n  Fix: --offload-train, larger engines, or"
            " --sglang-mem-fraction-static where you know better than this estimate."
        )
    engine = dataclasses.replace(config.engine, sglang=config.engine.sglang | {"mem_fraction_static": f"{share:g}"})
    return dataclasses.replace(config, engine=engine)
