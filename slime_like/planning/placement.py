"""Config -> PlacementPlan: which role sits on which GPU. Pure; what is printed is what is executed.

A = the trainer's GPUs, R = the engines' GPUs.

  mode            bundles     rollout_offset
  colocate        max(A, R)   0
  disaggregated   A + R       A
  external        A           0   engines are elsewhere: their handles hold no GPU
  train_only      A           0
  rollout_only    R           0
"""

from __future__ import annotations

import dataclasses
import json

from slime_like.config.run import RunConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bundle:
    """One GPU (a logical one on a CPU host) and the share of it that each role holds."""

    index: int
    node: int
    gpu: int
    roles: dict[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolePlan:
    """The GPUs of one role and how its model is split over them."""

    num_gpus: int
    bundles: tuple[int, ...]
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """One engine: the bundles under it, or the URL of one that already runs."""

    index: int
    bundles: tuple[int, ...]
    tp: int
    pp: int = 1
    dp: int = 1
    external_url: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacementPlan:
    """Everything that the cluster layer needs to know; problems lists what makes it impossible."""

    mode: str
    num_gpus: int
    rollout_offset: int
    gpus_per_node: int
    bundles: tuple[Bundle, ...]
    roles: dict[str, RolePlan]
    engines: tuple[EnginePlan, ...]
    transport: str | None
    problems: tuple[str, ...] = ()

    def to_dict(self) -> dict:
        """The object of `--plan json`."""
        plan = {key: value for key, value in dataclasses.asdict(self).items() if key not in ("transport", "gpus_per_node")}
        plan["weight_sync"] = {"transport": self.transport} if self.transport else None
        return json.loads(json.dumps(plan))


def mode_of(config: RunConfig) -> str:
    """colocate, disaggregated, external, train_only or rollout_only."""
    if not config.uses_engines:
        return "train_only"
    if config.placement.debug_rollout_only:
        return "rollout_only"
    if config.placement.rollout_external:
        return "external"
    return "colocate" if config.placement.colocate else "disaggregated"


def make_plan(config: RunConfig) -> PlacementPlan:
    """The plan of a config. Impossible sizes are listed in its `problems`, never raised."""
    placement, mode = config.placement, mode_of(config)
    actor_gpus = 0 if mode == "rollout_only" else placement.actor_num_gpus
    rollout_gpus, problems = _rollout_gpus(config, mode)
    offset = actor_gpus if mode == "disaggregated" else 0
    held = 0 if mode == "external" else rollout_gpus  # GPUs that engines hold on this cluster
    num_gpus = max(actor_gpus, offset + held)
    per_node = placement.num_gpus_per_node or (
        placement.actor_num_gpus_per_node if placement.actor_num_nodes > 1 else max(8, placement.actor_num_gpus_per_node)
    )
    problems += _node_problems(config, held, offset, per_node)
    roles: dict[str, RolePlan] = {}
    if actor_gpus:
        roles["actor"] = _actor_role(config, actor_gpus)
        if config.needs_reference:  # weights swapped into the actor's own processes: no GPU share of its own
            roles["ref"] = dataclasses.replace(roles["actor"])
    if config.uses_engines:
        size = placement.rollout_num_gpus_per_engine
        roles["rollout"] = RolePlan(num_gpus=held, bundles=tuple(range(offset, offset + held)), tp=size, dp=max(1, rollout_gpus // size))
    return PlacementPlan(
        mode=mode,
        num_gpus=num_gpus,
        rollout_offset=offset,
        gpus_per_node=per_node,
        bundles=_bundles(roles, num_gpus, per_node),
        roles=roles,
        engines=_engines(config, mode, held, offset),
        transport=_transport(config, mode),
        problems=tuple(problems),
    )


def _transport(config: RunConfig, mode: str) -> str | None:
    if mode in ("train_only", "rollout_only"):
        return None
    return config.sync.update_weight_transport or ("ipc" if mode == "colocate" else "broadcast")


def _actor_role(config: RunConfig, num_gpus: int) -> RolePlan:
    parallel = config.parallel
    return RolePlan(
        num_gpus=num_gpus,
        bundles=tuple(range(num_gpus)),
        tp=parallel.tensor_model_parallel_size,
        pp=parallel.pipeline_model_parallel_size,
        cp=parallel.context_parallel_size,
        ep=parallel.expert_model_parallel_size,
        dp=max(1, config.data_parallel_size),
    )


def _rollout_gpus(config: RunConfig, mode: str) -> tuple[int, list[str]]:
    """GPUs of all engines, and what is wrong with the number."""
    placement, per_engine = config.placement, config.placement.rollout_num_gpus_per_engine
    given = placement.rollout_num_gpus
    if mode == "train_only":
        return 0, []
    if mode == "external":
        derived = len(placement.rollout_external_engine_addrs or []) * per_engine
        problems = []
        if given is not None and given != derived:
            problems.append(
                f"--rollout-num-gpus {given}, but {derived // per_engine} external engines of --rollout-num-gpus-per-engine "
                f"{per_engine} make {derived}. Fix: leave --rollout-num-gpus out; it is derived."
            )
        if derived // per_engine > placement.actor_num_gpus:
            problems.append(
                f"{derived // per_engine} external engines need as many handles, but the actor has {placement.actor_num_gpus} "
                "bundles to hold them: --rollout-external-engine-addrs, --actor-num-nodes, --actor-num-gpus-per-node. Fix: at most one engine per actor GPU."
            )
        return derived, problems
    if given is None:
        if mode != "colocate":
            return 0, [
                f"--rollout-num-gpus is missing: how many GPUs the engines get beside the actor's {placement.actor_num_gpus}. Fix: give it, or --colocate."
            ]
        given = placement.actor_num_gpus
    if given < per_engine or given % per_engine:
        return given, [f"{given} rollout GPUs do not divide into engines of {per_engine}: --rollout-num-gpus, --rollout-num-gpus-per-engine."]
    return given, []


def _node_problems(config: RunConfig, held: int, offset: int, per_node: int) -> list[str]:
    """Engines that would not sit on one machine; machines smaller than the trainer's share."""
    placement, size = config.placement, config.placement.rollout_num_gpus_per_engine
    if placement.actor_num_gpus_per_node > per_node:
        return [f"--actor-num-gpus-per-node {placement.actor_num_gpus_per_node} is more than --num-gpus-per-node {per_node}."]
    if not held:
        return []
    if size > per_node:
        return [
            (
                f"--rollout-num-gpus-per-engine {size} is more than a machine's {per_node} GPUs (--num-gpus-per-node), and engines "
                "across machines are not supported yet. Fix: a smaller engine."
            )
        ]
    torn = [i for i in range(held // size) if (offset + i * size) // per_node != (offset + (i + 1) * size - 1) // per_node]
    if torn:
        return [
            (
                f"engine {torn[0]} of {size} GPUs would be torn across machines of {per_node} GPUs: the engines start at GPU {offset}. "
                f"Fix: an actor size that is a multiple of {size}, or other --rollout-num-gpus-per-engine / --num-gpus-per-node."
            )
        ]
    return []


def _engines(config: RunConfig, mode: str, held: int, offset: int) -> tuple[EnginePlan, ...]:
    size = config.placement.rollout_num_gpus_per_engine
    if mode == "external":
        return tuple(EnginePlan(index=i, bundles=(), tp=size, external_url=url) for i, url in enumerate(config.placement.external_urls()))
    return tuple(EnginePlan(index=i, bundles=tuple(range(offset + i * size, offset + (i + 1) * size)), tp=size) for i in range(held // size))


def _bundles(roles: dict[str, RolePlan], num_gpus: int, per_node: int) -> tuple[Bundle, ...]:
    """Each process on a GPU holds an equal share of it; the reference lives inside the actor's."""
    found = []
    for index in range(num_gpus):
        names = [name for name, role in roles.items() if index in role.bundles]
        holders = [name for name in names if name != "ref"]
        shares = {name: int(1e4 / len(holders)) / 1e4 for name in holders}  # Ray counts in ten-thousandths
        found.append(Bundle(index=index, node=index // per_node, gpu=index % per_node, roles=shares | ({"ref": 0.0} if "ref" in names else {})))
    return tuple(found)
