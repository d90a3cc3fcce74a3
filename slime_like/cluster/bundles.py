"""One placement group for the whole run, its bundles sorted by node and GPU id."""

from __future__ import annotations

import dataclasses
import ipaddress
import logging
import time

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime_like.cluster.ray_session import Wait, cpus_per_gpu
from slime_like.errors import PlacementError
from slime_like.planning.placement import PlacementPlan

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Slot:
    """Where a bundle of the plan really lies. `ray_index` is its index in Ray's group."""

    ray_index: int
    node_id: str
    address: str
    gpu_id: str


def node_sort_key(address: str) -> tuple:
    """Numeric order for IPv4 and IPv6 addresses (10.0.0.9 before 10.0.0.10), then names in text order."""
    try:
        ip = ipaddress.ip_address(address.split("%")[0])
        return (ip.version, int(ip), "")
    except ValueError:
        return (9, 0, address)


def slot_sort_key(slot: Slot) -> tuple:
    """By node, then by GPU id: numbers as numbers, names (MIG, UUID) after them in text order."""
    return (*node_sort_key(slot.address), (0, int(slot.gpu_id), "") if slot.gpu_id.isdigit() else (1, 0, slot.gpu_id))


class Bundles:
    """The run's GPUs, reserved. slots[i] belongs to bundle i of the plan."""

    def __init__(self, group: PlacementGroup, slots: list[Slot], cpus: float):
        self.group, self.slots, self.cpus = group, slots, cpus

    def options(self, index: int, share: float) -> dict:
        """Actor options that put an actor with `share` of the GPU (and of its CPU) on bundle `index`."""
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.slots[index].ray_index)
        return {"num_gpus": share, "num_cpus": int(1e4 * share * self.cpus) / 1e4, "scheduling_strategy": strategy}

    def on_one_host(self) -> bool:
        """Whether everything lies on the machine that this process runs on."""
        here = ray.get_runtime_context().get_node_id()
        return all(slot.node_id == here for slot in self.slots)

    def remove(self) -> None:
        """Give the GPUs back."""
        remove_placement_group(self.group)


def reserve(plan: PlacementPlan, timeout_s: float) -> Bundles:
    """Reserve the plan's GPUs. Raises PlacementError at once if the cluster can never have them, or at the deadline."""
    total = ray.cluster_resources().get("GPU", 0)
    if total < plan.num_gpus:
        raise PlacementError(
            f"the plan needs {plan.num_gpus} GPUs, but the Ray cluster has {total:g} on {len(ray.nodes())} nodes.\n"
            "  --actor-num-nodes, --actor-num-gpus-per-node, --rollout-num-gpus\n"
            f"  Fix: start Ray with more (`ray start --head --num-gpus {plan.num_gpus}` gives logical ones on a CPU host), or ask for fewer."
        )
    cpus = cpus_per_gpu()
    shape = {"GPU": 1, "CPU": cpus} if cpus else {"GPU": 1}
    group = placement_group([shape] * plan.num_gpus, strategy="PACK")
    started, told = time.monotonic(), 0.0
    while not group.wait(timeout_seconds=1):
        waited, free = time.monotonic() - started, ray.available_resources()
        missing = (
            f"{plan.num_gpus} GPUs and {plan.num_gpus * cpus:g} CPUs are needed, {free.get('GPU', 0):g} and {free.get('CPU', 0):g} are free of {total:g} GPUs"
        )
        if waited > timeout_s:
            remove_placement_group(group)
            raise PlacementError(
                f"waited {waited:.0f} s (--placement-timeout {timeout_s:g}) for GPUs: {missing}. Fix: end the job that holds them "
                "(`ray status`), or raise the deadline."
            )
        if waited - told > 10:
            told = waited
            logger.warning("waiting for GPUs since %.0f s: %s", waited, missing)
    slots = _probe(group, plan.num_gpus, cpus, timeout_s)
    bundles = Bundles(group, slots, cpus)
    _check_engines(plan, slots)
    return bundles


def _probe(group: PlacementGroup, count: int, cpus: float, timeout_s: float) -> list[Slot]:
    """Ask each bundle where it lies; sorted."""

    def locate(ray_index: int) -> Slot:
        context = ray.get_runtime_context()
        gpu_ids = context.get_accelerator_ids().get("GPU") or ["0"]
        return Slot(ray_index, context.get_node_id(), ray.util.get_node_ip_address(), str(gpu_ids[0]))

    task = ray.remote(locate)
    refs = {}
    for index in range(count):
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        refs[f"bundle {index}"] = task.options(num_gpus=1, num_cpus=cpus, scheduling_strategy=strategy).remote(index)
    return sorted(Wait(timeout_s, whom="the reserved bundles", phase="placement").gather(refs), key=slot_sort_key)


def _check_engines(plan: PlacementPlan, slots: list[Slot]) -> None:
    """An engine's GPUs must lie on one machine; Ray's PACK does not promise it."""
    for engine in plan.engines:
        nodes = {slots[i].address for i in engine.bundles}
        if len(nodes) > 1:
            raise PlacementError(
                f"Ray spread engine {engine.index} ({len(engine.bundles)} GPUs) over machines {', '.join(sorted(nodes))}; it must lie on one.\n"
                "  --rollout-num-gpus-per-engine, --num-gpus-per-node\n  Fix: set --num-gpus-per-node to what the machines really have, or use smaller engines."
            )
