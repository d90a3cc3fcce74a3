"""The table of architecture.md: bundles and offset in every mode, and what is refused."""

import dataclasses

import pytest

from slime_like.config.run import RunConfig
from slime_like.config.system import PlacementConfig
from slime_like.planning.placement import make_plan
from slime_like.planning.render import render_plan


def plan(*, loss_type="policy_loss", use_kl_loss=False, **placement):
    base = RunConfig()
    loss = dataclasses.replace(base.loss, loss_type=loss_type, use_kl_loss=use_kl_loss)
    return make_plan(dataclasses.replace(base, loss=loss, placement=PlacementConfig(**placement)))


@pytest.mark.parametrize(
    ("flags", "mode", "num_gpus", "offset", "engines"),
    [
        ({"actor_num_gpus_per_node": 4, "colocate": True}, "colocate", 4, 0, [(0,), (1,), (2,), (3,)]),
        ({"actor_num_gpus_per_node": 2, "rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 2, "colocate": True}, "colocate", 4, 0, [(0, 1), (2, 3)]),
        ({"actor_num_gpus_per_node": 4, "rollout_num_gpus": 2, "colocate": True}, "colocate", 4, 0, [(0,), (1,)]),
        ({"actor_num_gpus_per_node": 2, "rollout_num_gpus": 2, "rollout_num_gpus_per_engine": 2}, "disaggregated", 4, 2, [(2, 3)]),
        ({"actor_num_gpus_per_node": 4, "rollout_num_gpus": 3}, "disaggregated", 7, 4, [(4,), (5,), (6,)]),
        ({"actor_num_gpus_per_node": 2, "rollout_external": True, "rollout_external_engine_addrs": ["a:1", "b:2"]}, "external", 2, 0, [(), ()]),
        ({"actor_num_gpus_per_node": 2, "rollout_num_gpus": 2, "debug_train_only": True}, "train_only", 2, 0, []),
        ({"actor_num_gpus_per_node": 2, "rollout_num_gpus": 3, "debug_rollout_only": True}, "rollout_only", 3, 0, [(0,), (1,), (2,)]),
    ],
)
def test_table(flags, mode, num_gpus, offset, engines):
    made = plan(**flags)
    assert not made.problems
    assert (made.mode, made.num_gpus, made.rollout_offset, [e.bundles for e in made.engines]) == (mode, num_gpus, offset, engines)
    assert len(made.bundles) == num_gpus


def test_no_bundle_is_shared_beyond_one():
    for made in (plan(actor_num_gpus_per_node=4, colocate=True, use_kl_loss=True), plan(actor_num_gpus_per_node=3, rollout_num_gpus=3)):
        for bundle in made.bundles:
            assert 0 < sum(bundle.roles.values()) <= 1


def test_reference_holds_no_share_of_its_own():
    made = plan(actor_num_gpus_per_node=2, colocate=True, use_kl_loss=True)
    assert made.roles["ref"].bundles == made.roles["actor"].bundles
    assert made.bundles[0].roles == {"actor": 0.5, "rollout": 0.5, "ref": 0.0}


def test_external_engines_reserve_nothing_and_carry_their_url():
    made = plan(actor_num_gpus_per_node=2, rollout_external=True, rollout_external_engine_addrs=["[::1]:80", "https://x"])
    assert [e.external_url for e in made.engines] == ["http://[::1]:80", "https://x"]
    assert made.roles["rollout"].num_gpus == 0 and "rollout" not in made.bundles[0].roles


def test_supervised_run_has_no_engines():
    assert plan(loss_type="sft_loss", actor_num_gpus_per_node=1).mode == "train_only"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"actor_num_gpus_per_node": 2}, "--rollout-num-gpus is missing"),
        ({"actor_num_gpus_per_node": 2, "rollout_num_gpus": 3, "rollout_num_gpus_per_engine": 2}, "3 rollout GPUs do not divide into engines of 2"),
        ({"actor_num_gpus_per_node": 1, "rollout_num_gpus": 8, "rollout_num_gpus_per_engine": 8}, "engine 0 of 8 GPUs would be torn"),
        ({"actor_num_gpus_per_node": 8, "rollout_num_gpus": 16, "rollout_num_gpus_per_engine": 16}, "more than a machine's 8 GPUs"),
        ({"actor_num_gpus_per_node": 1, "rollout_external": True, "rollout_external_engine_addrs": ["a:1", "b:1"]}, "2 external engines need as many handles"),
        (
            {"actor_num_gpus_per_node": 2, "rollout_num_gpus": 3, "rollout_external": True, "rollout_external_engine_addrs": ["a:1"]},
            "leave --rollout-num-gpus out",
        ),
    ],
)
def test_impossible_plans_say_numbers_flags_and_fix(flags, message):
    made = plan(**flags)
    assert any(message in p for p in made.problems), made.problems
    assert "This plan cannot run" in render_plan(made)
    assert made.to_dict()["problems"] == list(made.problems)


def test_text_names_every_gpu_and_engine():
    text = render_plan(plan(actor_num_gpus_per_node=2, rollout_num_gpus=2, rollout_num_gpus_per_engine=2))
    assert "mode disaggregated: 4 GPUs, engines from GPU 2" in text
    assert "node 0 gpu 3  bundle 3   rollout 1   [engine 0 rank 1]" in text
    assert "weights travel by broadcast" in text
