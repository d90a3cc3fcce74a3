"""The table of architecture.md: bundles and offset in every mode, and what is refused."""

import dataclasses
import functools

import pytest

from slime_like.config.asynchrony import AsyncConfig
from slime_like.config.placement import PlacementConfig
from slime_like.config.run import RunConfig
from slime_like.planning.engines import cut_engines, node_ranks, torn_engine
from slime_like.planning.placement import make_plan
from slime_like.planning.report.render import render_plan
from tests.helpers.operations import count_operations


def plan(
    *, loss_type="policy_loss", use_kl_loss=False, ppo=False, reward=False, parallel=None, sglang=None, **placement
):
    base = RunConfig()
    return make_plan(
        dataclasses.replace(
            base,
            loss=dataclasses.replace(
                base.loss, loss_type=loss_type, use_kl_loss=use_kl_loss, advantage_estimator="ppo" if ppo else "grpo"
            ),
            checkpoint=dataclasses.replace(base.checkpoint, reward_load="reward" if reward else None),
            parallel=dataclasses.replace(base.parallel, **(parallel or {})),
            engine=dataclasses.replace(base.engine, sglang=sglang or {}),
            placement=PlacementConfig(**placement),
        )
    )


@pytest.mark.parametrize(
    ("flags", "mode", "num_gpus", "offset", "engines"),
    [
        ({"actor_num_gpus_per_node": 4, "colocate": True}, "colocate", 4, 0, [(0,), (1,), (2,), (3,)]),
        (
            {"actor_num_gpus_per_node": 2, "rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 2, "colocate": True},
            "colocate",
            4,
            0,
            [(0, 1), (2, 3)],
        ),
        ({"actor_num_gpus_per_node": 4, "rollout_num_gpus": 2, "colocate": True}, "colocate", 4, 0, [(0,), (1,)]),
        (
            {"actor_num_gpus_per_node": 2, "rollout_num_gpus": 2, "rollout_num_gpus_per_engine": 2},
            "disaggregated",
            4,
            2,
            [(2, 3)],
        ),
        ({"actor_num_gpus_per_node": 4, "rollout_num_gpus": 3}, "disaggregated", 7, 4, [(4,), (5,), (6,)]),
        (
            {"actor_num_gpus_per_node": 2, "rollout_external": True, "rollout_external_engine_addrs": ["a:1", "b:2"]},
            "external",
            2,
            0,
            [(), ()],
        ),
        ({"actor_num_gpus_per_node": 2, "rollout_num_gpus": 2, "debug_train_only": True}, "train_only", 2, 0, []),
        (
            {"actor_num_gpus_per_node": 2, "rollout_num_gpus": 3, "debug_rollout_only": True},
            "rollout_only",
            3,
            0,
            [(0,), (1,), (2,)],
        ),
    ],
)
def test_table(flags, mode, num_gpus, offset, engines):
    layout = plan(**flags)
    assert not layout.problems
    assert (layout.mode, layout.num_gpus, layout.rollout_offset, [e.bundles for e in layout.engines]) == (
        mode,
        num_gpus,
        offset,
        engines,
    )
    assert len(layout.bundles) == num_gpus


def test_no_bundle_is_shared_beyond_one():
    for layout in (
        plan(actor_num_gpus_per_node=4, colocate=True, use_kl_loss=True),
        plan(actor_num_gpus_per_node=3, rollout_num_gpus=3),
    ):
        for bundle in layout.bundles:
            assert 0 < sum(bundle.roles.values()) <= 1


def test_reference_holds_no_share_of_its_own():
    layout = plan(actor_num_gpus_per_node=2, colocate=True, use_kl_loss=True)
    assert layout.roles["ref"].bundles == layout.roles["actor"].bundles
    assert layout.bundles[0].roles == {"actor": 0.5, "rollout": 0.5, "ref": 0.0}


def test_external_engines_reserve_nothing_and_carry_their_url():
    layout = plan(
        actor_num_gpus_per_node=2, rollout_external=True, rollout_external_engine_addrs=["[::1]:80", "https://x"]
    )
    assert [e.external_url for e in layout.engines] == ["http://[::1]:80", "https://x"]
    assert layout.roles["rollout"].num_gpus == 0 and "rollout" not in layout.bundles[0].roles


def test_supervised_run_has_no_engines():
    assert plan(loss_type="sft_loss", actor_num_gpus_per_node=1).mode == "train_only"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"actor_num_gpus_per_node": 2}, "--rollout-num-gpus is missing"),
        (
            {"actor_num_gpus_per_node": 2, "rollout_num_gpus": 3, "rollout_num_gpus_per_engine": 2},
            "3 rollout GPUs do not divide into engines of 2",
        ),
        (
            {"actor_num_gpus_per_node": 1, "rollout_num_gpus": 8, "rollout_num_gpus_per_engine": 8},
            "engine 0 of 8 GPUs would be torn",
        ),
        (
            {"actor_num_gpus_per_node": 8, "rollout_num_gpus": 12, "rollout_num_gpus_per_engine": 12},
            "more than a machine's 8 GPUs",
        ),
        (
            {"actor_num_gpus_per_node": 4, "rollout_num_gpus": 16, "rollout_num_gpus_per_engine": 16},
            "multiple of 8, or another",
        ),
        (
            {"actor_num_gpus_per_node": 1, "rollout_external": True, "rollout_external_engine_addrs": ["a:1", "b:1"]},
            "2 external engines (--rollout-external-engine-addrs) need as many handles",
        ),
        (
            {
                "actor_num_gpus_per_node": 2,
                "rollout_num_gpus": 3,
                "rollout_external": True,
                "rollout_external_engine_addrs": ["a:1"],
            },
            "leave --rollout-num-gpus out",
        ),
    ],
)
def test_impossible_plans_say_numbers_flags_and_fix(flags, message):
    layout = plan(**flags)
    assert any(message in p for p in layout.problems), layout.problems
    assert "This plan cannot run" in render_plan(layout)
    assert layout.to_dict()["problems"] == list(layout.problems)


def test_the_text_says_how_many_engines_an_evaluation_has_for_itself():
    placement = PlacementConfig(actor_num_gpus_per_node=2, rollout_num_gpus=3)
    shared = make_plan(RunConfig(placement=placement, asynchrony=AsyncConfig(eval_async=True, eval_num_engines=1)))
    assert "note: during an evaluation 1 of 3 engines keep its weights" in render_plan(shared)
    whole = dataclasses.replace(placement, rollout_num_gpus=1)
    refused = make_plan(RunConfig(placement=whole, asynchrony=AsyncConfig(eval_async=True, eval_num_engines=1)))
    assert any("leaves none for rollouts" in problem for problem in refused.problems)


def test_text_names_every_gpu_and_engine():
    text = render_plan(plan(actor_num_gpus_per_node=2, rollout_num_gpus=2, rollout_num_gpus_per_engine=2))
    assert "mode disaggregated: 4 GPUs, engines from GPU 2" in text
    assert "node 0 gpu 3  bundle 3   rollout 1   [engine 0 rank 1]" in text
    assert "weights travel by broadcast" in text


ROLES = {"use_kl_loss": True, "ppo": True, "reward": True, "actor_num_gpus_per_node": 2}
OWN = {**ROLES, "colocate_policy_ref": False}


@pytest.mark.parametrize(
    ("flags", "trainer_gpus", "seats"),
    [
        # Who has which bundles, in the order actor, critic, ref, reward.
        ({**ROLES}, 6, {"actor": (0, 1), "critic": (2, 3), "ref": (0, 1), "reward": (4, 5)}),
        ({**OWN}, 8, {"actor": (0, 1), "critic": (2, 3), "ref": (4, 5), "reward": (6, 7)}),
        (
            {**OWN, "colocate_critic_reward": True},
            6,
            {"actor": (0, 1), "critic": (2, 3), "ref": (4, 5), "reward": (2, 3)},
        ),
        ({**ROLES, "colocate_training": True}, 2, {"actor": (0, 1), "critic": (0, 1), "ref": (0, 1), "reward": (0, 1)}),
        (
            {**OWN, "critic_num_gpus_per_node": 1, "ref_num_gpus_per_node": 3, "reward_num_gpus_per_node": 1},
            7,
            {"actor": (0, 1), "critic": (2,), "ref": (3, 4, 5), "reward": (6,)},
        ),
        (
            {**ROLES, "reward": False, "colocate_critic_reward": True, "critic_num_gpus_per_node": 4},
            6,
            {"actor": (0, 1), "critic": (2, 3, 4, 5), "ref": (0, 1)},
        ),
        ({**ROLES, "ppo": False, "reward": False, "colocate_policy_ref": False}, 4, {"actor": (0, 1), "ref": (2, 3)}),
    ],
)
@pytest.mark.parametrize("mode", ["disaggregated", "colocate", "external", "train_only", "rollout_only"])
def test_roles_in_every_mode(flags, trainer_gpus, seats, mode):
    how = {
        "disaggregated": {"rollout_num_gpus": 2},
        "colocate": {"colocate": True},
        "external": {"rollout_external": True, "rollout_external_engine_addrs": ["a:1"]},
        "train_only": {"debug_train_only": True},
        "rollout_only": {"debug_rollout_only": True, "rollout_num_gpus": 2},
    }[mode]
    layout = plan(**flags, **how)
    assert layout.mode == mode and not layout.problems
    if mode == "rollout_only":
        assert set(layout.roles) == {"rollout"} and layout.num_gpus == 2
        return
    if mode == "train_only":  # no samples to score: they come with their rewards
        seats = {role: bundles for role, bundles in seats.items() if role != "reward"}
        trainer_gpus = 1 + max(max(bundles) for bundles in seats.values())
    assert {role: size.bundles for role, size in layout.roles.items() if role != "rollout"} == seats
    assert layout.rollout_offset == (trainer_gpus if mode == "disaggregated" else 0)
    assert layout.num_gpus == trainer_gpus + (2 if mode == "disaggregated" else 0)
    assert all(sum(bundle.roles.values()) <= 1 for bundle in layout.bundles)
    assert layout.has_processes("ref") == (seats["ref"] != seats["actor"])


def test_the_reward_model_is_whole_on_each_of_its_gpus():
    split = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
    layout = plan(
        reward=True, parallel=split, actor_num_gpus_per_node=4, reward_num_gpus_per_node=3, rollout_num_gpus=1
    )
    assert not layout.problems
    reward, actor = layout.roles["reward"], layout.roles["actor"]
    assert (reward.tp, reward.pp, reward.dp) == (1, 1, 3) and (actor.tp, actor.pp, actor.dp) == (2, 2, 1)


@pytest.mark.parametrize(
    ("flags", "messages"),
    [
        (
            {**ROLES, "ref_num_gpus_per_node": 1},
            [
                "--ref-num-gpus-per-node 1 and --actor-num-gpus-per-node 2 must be the same",
                "(--colocate-policy-ref)",
                "or --no-colocate-policy-ref.",
            ],
        ),
        (
            {**ROLES, "ref_num_nodes": 3},
            ["--ref-num-nodes 3 and --actor-num-nodes 1 must be the same", "Fix: --ref-num-nodes 1"],
        ),
        (
            {**ROLES, "colocate_training": True, "critic_num_nodes": 2},
            [
                (
                    "--critic-num-nodes 2 and --actor-num-nodes 1 must be the same: the critic shares the actor's GPUs"
                    " (--colocate-training)"
                )
            ],
        ),
        (
            {**ROLES, "colocate_training": True, "reward_num_gpus_per_node": 1, "ref_num_gpus_per_node": 4},
            [
                "--reward-num-gpus-per-node 1 and --actor-num-gpus-per-node 2",
                "--ref-num-gpus-per-node 4 and --actor-num-gpus-per-node 2",
            ],
        ),
        (
            {**ROLES, "colocate_critic_reward": True, "critic_num_gpus_per_node": 1, "reward_num_gpus_per_node": 2},
            [
                "--reward-num-gpus-per-node 2 and --critic-num-gpus-per-node 1 must be the same",
                "or drop --colocate-critic-reward.",
            ],
        ),
        (
            {**ROLES, "colocate_critic_reward": True, "ppo": False},
            ["there is no critic: --advantage-estimator is grpo. Fix: --advantage-estimator ppo"],
        ),
        (
            {**ROLES, "parallel": {"tensor_model_parallel_size": 2}, "critic_num_gpus_per_node": 3},
            [
                "the critic's 3 GPUs do not divide by tensor x pipeline x context parallel size 2",
                "--critic-num-gpus-per-node 3",
                "multiple of 2",
            ],
        ),
        ({**ROLES, "critic_num_gpus_per_node": 3}, ["does not divide by the critic's data parallel size 3"]),
        (
            {**OWN, "ref_num_gpus_per_node": 9, "num_gpus_per_node": 8},
            ["--ref-num-gpus-per-node 9 is more than a machine's --num-gpus-per-node 8"],
        ),
    ],
)
def test_roles_that_cannot_share_are_refused(flags, messages):
    problems = plan(**flags, rollout_num_gpus=2).problems
    for message in messages:
        assert any(message in problem for problem in problems), problems


def test_colocated_engines_take_all_training_gpus_by_default():
    layout = plan(**OWN, colocate=True)
    assert (layout.num_gpus, layout.roles["rollout"].num_gpus, len(layout.engines)) == (8, 8, 8) and not layout.notes
    assert any("GPUs idle" in note for note in plan(**OWN, colocate=True, rollout_num_gpus=4).notes)


def test_flags_of_roles_that_do_not_exist_are_noted():
    notes = plan(actor_num_gpus_per_node=2, rollout_num_gpus=2, critic_num_nodes=2, ref_num_gpus_per_node=1).notes
    assert any("--critic-num-nodes 2: there is no critic without --advantage-estimator ppo" in note for note in notes)
    assert any("--ref-num-gpus-per-node 1: there is no ref without --use-kl-loss" in note for note in notes)


def test_node_ranks_count_within_the_engine():
    # slime gave [1, 0] to a two-node engine behind a one-node one.
    one_node, two_nodes = cut_engines([8, 16], 0)
    assert node_ranks([bundle // 8 for bundle in one_node]) == (0,) * 8
    assert node_ranks([bundle // 8 for bundle in two_nodes]) == (0,) * 8 + (1,) * 8
    assert node_ranks(["b", "b", "a", "a"]) == (0, 0, 1, 1)


@pytest.mark.parametrize(
    ("sizes", "offset", "torn"),
    [
        ([8, 16], 0, None),
        ([16, 8], 8, None),
        ([4, 4, 8], 0, None),
        ([4, 8], 0, 1),
        ([16], 4, 0),
        ([3, 3, 3], 0, 2),
        ([2, 2], 7, 0),
        ([12], 0, 0),
    ],
)
def test_torn_engines(sizes, offset, torn):
    assert torn_engine(cut_engines(sizes, offset), 8) == torn


def test_an_engine_over_two_machines():
    layout = plan(
        actor_num_gpus_per_node=8,
        rollout_num_gpus=32,
        rollout_num_gpus_per_engine=16,
        sglang={"pp_size": "2", "dp_size": "2", "ep_size": "8"},
    )
    assert not layout.problems
    assert [(e.tp, e.pp, e.dp, e.ep, e.num_nodes, e.bundles[0]) for e in layout.engines] == [
        (8, 2, 2, 8, 2, 8),
        (8, 2, 2, 8, 2, 24),
    ]
    assert "engine 1 spans nodes 3 (rank 0), 4 (rank 1)" in render_plan(layout)


def test_tensor_parallel_groups_across_machines_are_noted():
    layout = plan(
        actor_num_nodes=2, actor_num_gpus_per_node=4, parallel={"tensor_model_parallel_size": 8}, colocate=True
    )
    assert any(
        "1 of the actor's 1 tensor parallel groups of 8 GPUs (--tensor-model-parallel-size) span machines of 4" in note
        for note in layout.notes
    )
    assert not plan(
        actor_num_nodes=2, actor_num_gpus_per_node=4, parallel={"tensor_model_parallel_size": 4}, colocate=True
    ).notes


def plan_and_show(nodes: int) -> None:
    """Actor and reference on `nodes` machines each, engines on eight times as many: 80 GPUs for each of `nodes`."""
    sizes = {
        "actor_num_nodes": nodes,
        "actor_num_gpus_per_node": 8,
        "rollout_num_gpus": 64 * nodes,
        "rollout_num_gpus_per_engine": 8,
    }
    placement = plan(use_kl_loss=True, colocate_policy_ref=False, **sizes)
    assert placement.num_gpus == 80 * nodes and not placement.problems
    assert len(render_plan(placement).splitlines()) < 1500 and placement.to_dict()["num_gpus"] == 80 * nodes


@pytest.mark.slow
def test_the_work_of_a_plan_grows_with_the_gpus_and_no_faster():
    """Ten thousand GPUs take under a second: counted, since a loaded host is slower.

    A tenth of the GPUs takes a tenth of the operations.
    """
    thousand, ten_thousand = (count_operations(functools.partial(plan_and_show, nodes)) for nodes in (12, 125))
    assert ten_thousand / 10_000 < 1.1 * thousand / 960
    assert ten_thousand < 18_000_000  # 13.3 million took 0.25 s; a third more would be 0.35 s
