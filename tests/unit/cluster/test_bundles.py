"""Bundles in the order of machines and GPUs, whatever order Ray gave them in."""

import dataclasses
import random

import pytest

from slime_like.cluster.bundles import ReservedGpu, check_engines, gpu_sort_key
from slime_like.config.placement import PlacementConfig
from slime_like.config.run import RunConfig
from slime_like.errors import PlacementError
from slime_like.planning.placement import make_plan


def ordered(*places):
    slots = [ReservedGpu(i, address, address, gpu) for i, (address, gpu) in enumerate(places)]
    random.Random(0).shuffle(slots)
    return [(s.address, s.gpu_id) for s in sorted(slots, key=gpu_sort_key)]


def test_ipv4_addresses_sort_as_numbers():
    places = [("10.0.0.9", "0"), ("10.0.0.10", "0"), ("10.0.1.1", "0")]
    assert ordered(*places) == places


def test_gpu_ids_sort_as_numbers():
    places = [("10.0.0.1", "2"), ("10.0.0.1", "10"), ("10.0.0.2", "0")]
    assert ordered(*places) == places


def test_ipv6_after_ipv4_and_names_last():
    places = [("10.0.0.1", "0"), ("fd00::9", "0"), ("fd00::10", "0"), ("host-a", "0"), ("host-b", "0")]
    assert ordered(*places) == places


def test_gpu_names_sort_after_numbers():
    places = [("10.0.0.1", "1"), ("10.0.0.1", "MIG-a"), ("10.0.0.1", "MIG-b")]
    assert ordered(*places) == places


def test_nodes_that_share_an_address_keep_their_gpus_together():
    slots = [
        ReservedGpu(i, node, "127.0.0.1", gpu)
        for i, (gpu, node) in enumerate((gpu, node) for gpu in "01" for node in ("b", "a"))
    ]
    assert [(s.node_id, s.gpu_id) for s in sorted(slots, key=gpu_sort_key)] == [
        ("a", "0"),
        ("a", "1"),
        ("b", "0"),
        ("b", "1"),
    ]


def engines_on(nodes: str, **placement):
    """Check a plan whose bundle i lies on the node named nodes[i]."""
    plan = make_plan(dataclasses.replace(RunConfig(), placement=PlacementConfig(**placement)))
    assert not plan.problems
    check_engines(plan, [ReservedGpu(i, node, f"10.0.0.{node}", str(i)) for i, node in enumerate(nodes)])


def test_engines_must_lie_where_the_plan_put_them():
    pairs = {"actor_num_gpus_per_node": 2, "rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 2}
    engines_on("112233", **pairs)
    engines_on("111111", **pairs)
    with pytest.raises(
        PlacementError,
        match=(
            r"Ray spread engine 0 \(2 GPUs\) over machines as 10.0.0.1 \(1\) GPU 2, 10.0.0.2 \(2\) GPU 3; it must lie"
            r" on one"
        ),
    ):
        engines_on("111222", **pairs)


def test_an_engine_over_machines_must_have_equal_parts():
    halves = {
        "actor_num_gpus_per_node": 2,
        "rollout_num_gpus": 4,
        "rollout_num_gpus_per_engine": 4,
        "num_gpus_per_node": 2,
    }
    engines_on("112233", **halves)
    with pytest.raises(PlacementError, match="it must lie on 2, equally"):
        engines_on("112333", **halves)
    with pytest.raises(PlacementError, match="it must lie on 2, equally"):
        engines_on("112222", **halves)
