"""Trainer ranks and engine ranks on one GPU."""

from __future__ import annotations

import pytest

from slime_like.planning.cards import cards_of, environment_notes
from slime_like.planning.placement import PlacementPlan, make_plan
from slime_like.planning.report.render import make_report
from tests.helpers.plan_models import TINY, plan_config


def plan(**placement) -> PlacementPlan:
    return make_plan(plan_config(TINY, placement=placement))


@pytest.mark.parametrize(
    ("placement", "cards"),
    [
        ({"actor_num_gpus_per_node": 4, "rollout_num_gpus_per_engine": 2, "colocate": True}, ((0, 1), (2, 3))),
        ({"actor_num_gpus_per_node": 3, "colocate": True}, ((0,), (1,), (2,))),
        ({"actor_num_gpus_per_node": 4, "rollout_num_gpus": 2, "colocate": True}, ((0,), (1,))),
        # the second engine's GPUs are no trainer's
        ({"actor_num_gpus_per_node": 2, "rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 2, "colocate": True}, ()),
        ({"actor_num_gpus_per_node": 2, "rollout_num_gpus": 2}, ()),
    ],
)
def test_which_trainer_rank_is_on_an_engine_ranks_card(placement, cards):
    placed = plan(**placement)
    assert not placed.problems
    assert cards_of(placed, placed.engines) == cards
    if cards:  # of an engine that joins alone, too; one that is not of this plan has no known card
        assert cards_of(placed, placed.engines[-1:]) == cards[-1:] and cards_of(placed, [None]) == ()


def test_engines_under_the_critic_are_on_no_trainer_ranks_card():
    placement = {"actor_num_gpus_per_node": 2, "critic_num_gpus_per_node": 2, "colocate": True}
    placed = make_plan(plan_config(TINY, placement=placement, loss={"advantage_estimator": "ppo"}))
    assert not placed.problems and len(placed.engines) == 4 and cards_of(placed, placed.engines) == ()


def test_segments_whose_handles_may_not_open_are_noted():
    together = plan(actor_num_gpus_per_node=2, colocate=True)
    apart = plan(actor_num_gpus_per_node=2, rollout_num_gpus=2)
    bad = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64, expandable_segments: True"}
    (note,) = environment_notes(together, bad)
    assert "expandable_segments" in note and "--update-weight-transport disk" in note
    assert len(environment_notes(together, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})) == 1
    assert environment_notes(apart, bad) == []
    assert environment_notes(together, {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}) == []
    config = plan_config(TINY, placement={"actor_num_gpus_per_node": 2, "colocate": True})
    assert note in make_report(config, environment=bad).text()
