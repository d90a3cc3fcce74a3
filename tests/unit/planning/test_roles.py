"""Training roles: who gets GPUs of its own, who shares whose, and how each is split."""

from __future__ import annotations

import dataclasses

from slime_like.config.placement import PlacementConfig
from slime_like.config.run import RunConfig
from slime_like.planning.roles import RolePlan, RoleSize, crossing_notes, role_plans, training_roles


def run(*, ppo: bool = False, kl: bool = False, tensor: int = 1, **placement) -> RunConfig:
    base = RunConfig()
    return dataclasses.replace(
        base,
        loss=dataclasses.replace(base.loss, use_kl_loss=kl, advantage_estimator="ppo" if ppo else "grpo"),
        parallel=dataclasses.replace(base.parallel, tensor_model_parallel_size=tensor),
        placement=PlacementConfig(**({"actor_num_gpus_per_node": 4} | placement)),
    )


def bundles(config: RunConfig) -> dict[str, tuple[int, ...]]:
    sizes, problems, _ = training_roles(config)
    assert problems == []
    return {name: plan.bundles for name, plan in role_plans(config, sizes).items()}


def test_without_other_roles_there_is_the_actor():
    assert bundles(run()) == {"actor": (0, 1, 2, 3)}


def test_a_critic_stands_behind_the_actor_with_as_many_gpus():
    assert bundles(run(ppo=True)) == {"actor": (0, 1, 2, 3), "critic": (4, 5, 6, 7)}
    assert bundles(run(ppo=True, critic_num_gpus_per_node=2)) == {"actor": (0, 1, 2, 3), "critic": (4, 5)}
    assert bundles(run(ppo=True, colocate_training=True)) == {"actor": (0, 1, 2, 3), "critic": (0, 1, 2, 3)}


def test_the_reference_is_swapped_into_the_actor_unless_it_stands_apart():
    sizes, _, _ = training_roles(run(kl=True, colocate_policy_ref=True))
    assert [(size.name, size.host, size.swapped) for size in sizes] == [("actor", None, False), ("ref", "actor", True)]
    assert bundles(run(kl=True, colocate_policy_ref=False, ref_num_gpus_per_node=2))["ref"] == (4, 5)


def test_each_role_is_split_like_the_actor():
    config = run(ppo=True, tensor=2)
    plan = role_plans(config, training_roles(config)[0])["critic"]
    assert (plan.num_gpus, plan.tp, plan.dp) == (4, 2, 2)


def test_roles_on_the_same_gpus_want_as_many():
    _, (problem,), _ = training_roles(run(ppo=True, colocate_training=True, critic_num_gpus_per_node=2))
    assert problem.startswith("--critic-num-gpus-per-node 2 and --actor-num-gpus-per-node 4 must be the same")


def test_tensor_parallel_groups_across_machines_cost():
    size = RoleSize(name="actor", num_nodes=2, num_gpus_per_node=4)
    inside = RolePlan(num_gpus=8, bundles=tuple(range(8)), tp=4)
    assert crossing_notes({"actor": inside}, [size], 4) == []
    (note,) = crossing_notes({"actor": dataclasses.replace(inside, tp=8)}, [size], 4)
    assert note.startswith("1 of the actor's 1 tensor parallel groups of 8 GPUs")
