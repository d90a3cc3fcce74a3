"""Which trainer rank shares a GPU with which rank of an engine, and what handles of that GPU's memory need. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from slime_like.config.transports import transport_of
from slime_like.planning.engines import EnginePlan
from slime_like.planning.placement import PlacementPlan


def cards_are_shared(plan: PlacementPlan, engines: Sequence[EnginePlan]) -> bool:
    """Whether each rank of each of these engines has a trainer rank on its GPU."""
    if plan.mode != "colocate":
        return False
    trainers = set(plan.roles["actor"].bundles)
    return all(len(engine.bundles) == engine.tp and trainers.issuperset(engine.bundles) for engine in engines)


def cards_of(plan: PlacementPlan, engines: Sequence[EnginePlan | None]) -> tuple[tuple[int, ...], ...]:
    """Of each of these engines, of each of its ranks: the trainer rank on the same GPU. () unless all ranks have one;
    of an engine without a plan (None) nothing is known.

    The trainer's rank i is on bundle i of the actor, an engine's rank on its bundle of that number.
    Example: two engines of two GPUs on the four of the trainer -> ((0, 1), (2, 3)).
    """
    known = [engine for engine in engines if engine is not None]
    if len(known) < len(engines) or not cards_are_shared(plan, known):
        return ()
    rank_on = {bundle: rank for rank, bundle in enumerate(plan.roles["actor"].bundles)}
    return tuple(tuple(rank_on[bundle] for bundle in engine.bundles) for engine in known)


def environment_notes(plan: PlacementPlan, environment: Mapping[str, str]) -> list[str]:
    """What variables of torch's mean for this plan."""
    if plan.transport is None or not transport_of(plan.transport).by_card:
        return []
    return [
        f"{name}={environment[name]}: weights go to engines by CUDA IPC handles, and handles of expandable segments"
        " need file descriptors to pass between processes, which containers forbid (pidfd_getfd) and some versions of"
        " torch cannot do. Fix: leave expandable_segments out, or --update-weight-transport disk."
        for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
        if "expandable_segments:true" in environment.get(name, "").replace(" ", "").lower()
    ]
