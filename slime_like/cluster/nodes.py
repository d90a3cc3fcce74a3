"""The machines of a Ray cluster: their order, what they have, and whether a plan can ever be placed on them."""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Sequence

import ray

from slime_like.planning.placement import PlacementPlan

#: Machines that a message lists; above, their number is given.
_LISTED = 16


@dataclasses.dataclass(frozen=True)
class Node:
    """One machine of the cluster (on a test cluster, several may share an address)."""

    node_id: str
    address: str
    total_gpus: float
    free_gpus: float

    def __str__(self) -> str:
        return f"{self.address} ({self.node_id[:6]}): {self.free_gpus:g} of {self.total_gpus:g} GPUs free"


def node_sort_key(address: str) -> tuple:
    """Numeric order for IPv4 and IPv6 addresses (10.0.0.9 before 10.0.0.10), then names in text order."""
    try:
        ip = ipaddress.ip_address(address.split("%")[0])
        return (ip.version, int(ip), "")
    except ValueError:
        return (9, 0, address)


def cluster_nodes() -> list[Node]:
    """The living machines with GPUs, in the order in which bundles are numbered."""
    # The only per-node count of free resources in Ray 2.60 that needs no dashboard.
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    nodes = []
    for node in ray.nodes():
        if node["Alive"] and node["Resources"].get("GPU"):
            node_id = node["NodeID"]
            nodes.append(
                Node(
                    node_id, node["NodeManagerAddress"], node["Resources"]["GPU"], free.get(node_id, {}).get("GPU", 0.0)
                )
            )
    return sorted(nodes, key=lambda node: (*node_sort_key(node.address), node.node_id))


def list_nodes(nodes: Sequence[Node]) -> str:
    """What each machine has, for a message."""
    if not nodes:
        return "no machine of the cluster has a GPU"
    more = f"; and {len(nodes) - _LISTED} more machines" if len(nodes) > _LISTED else ""
    return "; ".join(map(str, nodes[:_LISTED])) + more


def why_never(plan: PlacementPlan, nodes: Sequence[Node]) -> str | None:
    """Why these machines can never hold the plan, even when all their GPUs are free; None if they may.

    Necessary conditions only: what passes may still have to wait, and the places that Ray gave are checked afterwards.
    """
    total = sum(node.total_gpus for node in nodes)
    if total < plan.num_gpus:
        return (
            f"the plan needs {plan.num_gpus} GPUs, but the Ray cluster has {total:g} on {len(nodes)} nodes:"
            f" {list_nodes(nodes)}.\n  --actor-num-nodes, --actor-num-gpus-per-node, --rollout-num-gpus\n  Fix: start"
            f" Ray with more (`ray start --head --num-gpus {plan.num_gpus}` gives logical ones on a CPU host), or ask"
            " for fewer."
        )
    held = [engine for engine in plan.engines if engine.bundles]
    if not held:
        return None
    size, machines = len(held[0].bundles), held[0].num_nodes
    part = size // machines
    room = sum(int(node.total_gpus // part) for node in nodes)
    if room < len(held) * machines:
        where = "on one machine" if machines == 1 else f"on each of {machines} machines"
        have = (
            "no machine has them"
            if room == 0
            else f"the machines have room for {room // machines} of {len(held)} such engines"
        )
        return (
            f"each engine needs {part} GPUs {where}, but {have}, though there are {total:g} GPUs in all:"
            f" {list_nodes(nodes)}.\n  --rollout-num-gpus-per-engine {size}, --num-gpus-per-node\n  Fix: smaller"
            " engines, or --num-gpus-per-node with what the machines really have."
        )
    return None
