"""Engines' bundles, one behind the other, and how many GPUs they get."""

from __future__ import annotations

import pytest

from slime_like.config.asynchrony import AsyncConfig
from slime_like.config.placement import PlacementConfig
from slime_like.config.run import RunConfig
from slime_like.planning.engines import EnginePlan, cut_engines, eval_share, node_ranks, rollout_gpus, torn_engine


def gpus(mode: str, trainer_gpus: int, **placement) -> tuple[int, list[str], list[str]]:
    return rollout_gpus(RunConfig(placement=PlacementConfig(**placement)), mode, trainer_gpus)


def test_engines_lie_one_behind_the_other():
    assert cut_engines([2, 1, 3], 4) == [(4, 5), (6,), (7, 8, 9)]
    assert cut_engines([], 4) == []


def test_machines_are_counted_within_an_engine():
    assert node_ranks([3, 3, 1, 1]) == (0, 0, 1, 1)
    assert EnginePlan(index=0, bundles=(0, 1), tp=2, node_ranks=(0, 1)).num_nodes == 2
    assert EnginePlan(index=0, bundles=(), tp=2, external_url="http://a:1").num_nodes == 0


def test_an_engine_within_a_machine_or_on_whole_ones_is_not_torn():
    assert torn_engine([(0, 1), (2, 3)], 4) is None
    assert torn_engine([(0, 1, 2, 3, 4, 5, 6, 7)], 4) is None
    assert torn_engine([(0, 1), (2, 3, 4, 5)], 4) == 1


@pytest.mark.parametrize(
    ("mode", "placement", "count"),
    [
        ("colocate", {}, 8),
        ("colocate", {"rollout_num_gpus": 4}, 4),
        ("disaggregated", {"rollout_num_gpus": 6}, 6),
        ("train_only", {"rollout_num_gpus": 6}, 0),
    ],
)
def test_gpus_of_all_engines(mode: str, placement: dict, count: int):
    assert gpus(mode, 8, **placement)[:2] == (count, [])


def test_gpus_that_are_missing_or_do_not_divide():
    assert (
        "--rollout-num-gpus is missing: how many GPUs the engines get beside the trainer's 8"
        in gpus("disaggregated", 8)[1][0]
    )
    assert (
        "6 rollout GPUs do not divide into engines of 4"
        in gpus("disaggregated", 8, rollout_num_gpus=6, rollout_num_gpus_per_engine=4)[1][0]
    )
    assert (
        "Fix: --rollout-num-gpus 4" in gpus("disaggregated", 8, rollout_num_gpus=6, rollout_num_gpus_per_engine=4)[1][0]
    )


def test_the_share_of_an_evaluation_leaves_some_for_rollouts():
    def share(count: int, of: int):
        config = RunConfig(asynchrony=AsyncConfig(eval_async=True, eval_num_engines=count))
        return eval_share(config, of)

    assert share(0, 2) == ([], []) and share(1, 0) == ([], [])
    (note,) = share(1, 3)[1]
    assert "1 of 3 engines keep its weights" in note and "go on with 2" in note and not share(1, 3)[0]
    (problem,) = share(2, 2)[0]
    assert "--eval-num-engines 2 of 2 engines leaves none for rollouts. Fix: at most 1" in problem
    assert "Fix: more engines" in share(1, 1)[0][0]


def test_idle_gpus_are_noted():
    (note,) = gpus("colocate", 8, rollout_num_gpus=6)[2]
    assert "2 GPUs idle" in note
