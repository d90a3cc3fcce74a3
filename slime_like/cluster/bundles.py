"""One placement group for the whole run, its bundles sorted by node and GPU id."""

from __future__ import annotations

import dataclasses
import logging
import time

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from slime_like.cluster.nodes import cluster_nodes, list_nodes, node_sort_key, why_never
from slime_like.cluster.ray_session import Wait, cpus_per_gpu
from slime_like.errors import PlacementError
from slime_like.planning.engines import node_ranks
from slime_like.planning.placement import PlacementPlan
from slime_like.sglang_backend.launcher import host_has_cuda

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class ReservedGpu:
    """Where a bundle of the plan really lies. `ray_index` is its index in Ray's group, has_cuda: with a real GPU."""

    ray_index: int
    node_id: str
    address: str
    gpu_id: str
    has_cuda: bool = False


def gpu_sort_key(gpu: ReservedGpu) -> tuple:
    """By node address, then node, so that a machine's GPUs stay together where several nodes share an address, then by
    GPU id.

    Numbers sort as numbers, names (MIG, UUID) after them in text order.
    """
    return (
        *node_sort_key(gpu.address),
        gpu.node_id,
        (0, int(gpu.gpu_id), "") if gpu.gpu_id.isdigit() else (1, 0, gpu.gpu_id),
    )


class Bundles:
    """The run's GPUs, reserved. gpus[i] belongs to bundle i of the plan."""

    def __init__(self, group: PlacementGroup, gpus: list[ReservedGpu], cpus: float):
        self.group, self.gpus, self.cpus = group, gpus, cpus

    def options(self, index: int, share: float) -> dict:
        """Actor options that put an actor with `share` of the GPU (and of its CPU) on bundle `index`."""
        strategy = PlacementGroupSchedulingStrategy(self.group, placement_group_bundle_index=self.gpus[index].ray_index)
        return {"num_gpus": share, "num_cpus": int(1e4 * share * self.cpus) / 1e4, "scheduling_strategy": strategy}

    def on_one_host(self) -> bool:
        """Whether everything lies on the machine that this process runs on."""
        here = ray.get_runtime_context().get_node_id()
        return all(gpu.node_id == here for gpu in self.gpus)

    @property
    def have_cuda(self) -> bool:
        """Whether these are real GPUs."""
        return any(gpu.has_cuda for gpu in self.gpus)

    def lost_machines(self) -> list[str]:
        """Addresses of machines with a bundle that Ray has given up."""
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        return sorted({gpu.address for gpu in self.gpus if gpu.node_id not in alive})

    def close(self) -> None:
        """Give the GPUs back."""
        remove_placement_group(self.group)


def reserve(plan: PlacementPlan, timeout_s: float) -> Bundles:
    """Reserve the plan's GPUs. Raises PlacementError at once if the cluster can never have them, or at the deadline."""
    never = why_never(plan, cluster_nodes())
    if never:
        raise PlacementError(never)
    cpus = cpus_per_gpu()
    shape = {"GPU": 1, "CPU": cpus} if cpus else {"GPU": 1}
    group = placement_group([shape] * plan.num_gpus, strategy="PACK")
    started, last_logged = time.monotonic(), 0.0
    while not group.wait(timeout_seconds=1):
        waited = time.monotonic() - started
        if waited <= timeout_s and waited - last_logged <= 10:
            continue
        last_logged = waited
        free_cpus = ray.available_resources().get("CPU", 0)
        missing = (
            f"{plan.num_gpus} GPUs and {plan.num_gpus * cpus:g} CPUs are needed; {list_nodes(cluster_nodes())};"
            f" {free_cpus:g} CPUs free"
        )
        if waited > timeout_s:
            remove_placement_group(group)
            raise PlacementError(
                f"waited {waited:.0f} s (--placement-timeout {timeout_s:g}) for GPUs: {missing}. Fix: end the job that"
                " holds them (`ray status`), or raise the deadline."
            )
        logger.warning("waiting for GPUs since %.0f s: %s", waited, missing)
    try:
        gpus = _probe(group, plan.num_gpus, cpus, timeout_s)
        check_engines(plan, gpus)
    except BaseException:
        remove_placement_group(group)
        raise
    return Bundles(group, gpus, cpus)


def _probe(group: PlacementGroup, count: int, cpus: float, timeout_s: float) -> list[ReservedGpu]:
    """Ask each bundle where it lies; sorted."""

    def locate(ray_index: int) -> ReservedGpu:
        context = ray.get_runtime_context()
        gpu_ids = context.get_accelerator_ids().get("GPU") or ["0"]
        address = ray.util.get_node_ip_address()
        return ReservedGpu(ray_index, context.get_node_id(), address, str(gpu_ids[0]), host_has_cuda())

    task = ray.remote(locate)
    refs = {}
    for index in range(count):
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
        refs[f"bundle {index}"] = task.options(num_gpus=1, num_cpus=cpus, scheduling_strategy=strategy).remote(index)
    return sorted(Wait(timeout_s, whom="the reserved bundles", phase="placement").gather(refs), key=gpu_sort_key)


def check_engines(plan: PlacementPlan, gpus: list[ReservedGpu]) -> None:
    """An engine's GPUs must lie on the machines that the plan put them on, counted within the engine.

    Ray's PACK does not promise it.
    """
    for engine in plan.engines:
        nodes = [gpus[i].node_id for i in engine.bundles]
        if node_ranks(nodes) != engine.node_ranks:
            machines = ", ".join(
                f"{gpus[i].address} ({gpus[i].node_id[:6]}) GPU {gpus[i].gpu_id}" for i in engine.bundles
            )
            num_nodes = engine.num_nodes
            raise PlacementError(
                f"Ray spread engine {engine.index} ({len(engine.bundles)} GPUs) over machines as {machines}; it must"
                f" lie on {'one' if num_nodes == 1 else f'{num_nodes}, equally'}.\n  --rollout-num-gpus-per-engine,"
                " --num-gpus-per-node\n  Fix: set --num-gpus-per-node to what the machines really have, or use smaller"
                " engines."
            )
