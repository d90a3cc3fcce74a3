"""What a cluster can never hold is known from its machines' sizes alone, and said with them."""

import dataclasses

import pytest

from slime_like.cluster.nodes import Node, list_nodes, why_never
from slime_like.config.placement import PlacementConfig
from slime_like.config.run import RunConfig
from slime_like.planning.placement import make_plan


def plan(**placement):
    layout = make_plan(dataclasses.replace(RunConfig(), placement=PlacementConfig(**placement)))
    assert not layout.problems
    return layout


def nodes(*sizes):
    return [Node(f"{i}abcdefgh", f"10.0.0.{i}", size, 0) for i, size in enumerate(sizes)]


FOUR = {"actor_num_gpus_per_node": 4, "rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 4}


@pytest.mark.parametrize(
    ("sizes", "placement", "said"),
    [
        ((8,), FOUR, None),
        ((4, 4), FOUR, None),
        (
            (4,),
            FOUR,
            "the plan needs 8 GPUs, but the Ray cluster has 4 on 1 nodes: 10.0.0.0 (0abcde): 0 of 4 GPUs free",
        ),
        ((), FOUR, "no machine of the cluster has a GPU"),
        (
            (3, 3, 3),
            FOUR,
            "each engine needs 4 GPUs on one machine, but no machine has them, though there are 9 GPUs in all",
        ),
        (
            (3, 3),
            {"actor_num_gpus_per_node": 6, "rollout_num_gpus_per_engine": 2, "colocate": True},
            "the machines have room for 2 of 3 such engines",
        ),
        (
            (4, 4),
            {
                "colocate": True,
                "rollout_num_gpus_per_engine": 8,
                "num_gpus_per_node": 4,
                "actor_num_gpus_per_node": 4,
                "actor_num_nodes": 2,
            },
            None,
        ),
        (
            (6, 2),
            {
                "colocate": True,
                "rollout_num_gpus_per_engine": 8,
                "num_gpus_per_node": 4,
                "actor_num_gpus_per_node": 4,
                "actor_num_nodes": 2,
            },
            "each engine needs 4 GPUs on each of 2 machines, but the machines have room for 0 of 1 such engines",
        ),
    ],
)
def test_never(sizes, placement, said):
    answer = why_never(plan(**placement), nodes(*sizes))
    assert (answer is None) if said is None else said in answer
    assert said is None or "Fix:" in answer and "--" in answer


def test_long_lists_are_cut():
    assert list_nodes(nodes(*[8] * 20)).endswith("; and 4 more machines")
