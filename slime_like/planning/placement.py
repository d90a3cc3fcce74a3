"""Config -> PlacementPlan: which role sits on which GPU. Pure; what is printed is what is executed.

T = the GPUs of all training roles (actor, critic, ref, reward: those that stand apart add up), R = the engines' GPUs.

  mode            bundles     rollout_offset
  colocate        max(T, R)   0
  disaggregated   T + R       T
  external        T           0   engines are elsewhere: their handles hold no GPU
  train_only      T           0
  rollout_only    R           0
"""

from __future__ import annotations

import dataclasses
import json

from slime_like.config.run import RunConfig
from slime_like.config.transports import fitting, transport_of
from slime_like.planning.engines import EnginePlan, eval_share, make_engines, rollout_gpus
from slime_like.planning.roles import RolePlan, RoleSize, crossing_notes, role_plans, training_roles


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bundle:
    """One GPU (a logical one on a CPU host) and the share of it that each role's process holds.

    0 for a role without one.
    """

    index: int
    node: int
    gpu: int
    roles: dict[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlacementPlan:
    """Everything that the cluster layer needs to know.

    Problems lists what makes it impossible, notes what is worth knowing.
    """

    mode: str
    num_gpus: int
    rollout_offset: int
    gpus_per_node: int
    bundles: tuple[Bundle, ...]
    roles: dict[str, RolePlan]
    engines: tuple[EnginePlan, ...]
    transport: str | None
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def has_processes(self, role: str) -> bool:
        """Whether a role runs in processes of its own (the reference may live in the actor's)."""
        return role in self.roles and any(self.bundles[i].roles.get(role, 0) > 0 for i in self.roles[role].bundles)

    def to_dict(self) -> dict:
        """The placement's part of `--plan json`."""
        plan = {
            key: value
            for key, value in dataclasses.asdict(self).items()
            if key not in ("transport", "gpus_per_node", "notes")
        }
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
    mode = mode_of(config)
    sizes, problems, notes = ([], [], []) if mode == "rollout_only" else training_roles(config)
    roles = role_plans(config, sizes)
    trainer_gpus = sum(size.num_gpus for size in sizes if size.host is None)
    num_rollout, rollout_problems, rollout_notes = rollout_gpus(config, mode, trainer_gpus)
    offset = trainer_gpus if mode == "disaggregated" else 0
    held = 0 if mode == "external" else num_rollout  # GPUs that engines hold on this cluster
    per_node = _gpus_per_node(config, sizes)
    engines, engine_problems = make_engines(config, mode, held, offset, per_node)
    share_problems, share_notes = eval_share(config, len(engines))
    if config.uses_engines:
        roles["rollout"] = RolePlan(
            num_gpus=held,
            bundles=tuple(range(offset, offset + held)),
            tp=config.engine_tp_size,
            pp=config.engine_pp_size,
            ep=config.engine_ep_size,
            dp=max(1, len(engines)),
        )
    num_gpus = max(trainer_gpus, offset + held)
    return PlacementPlan(
        mode=mode,
        num_gpus=num_gpus,
        rollout_offset=offset,
        gpus_per_node=per_node,
        bundles=_bundles(roles, {size.name for size in sizes if size.swapped}, num_gpus, per_node),
        roles=roles,
        engines=engines,
        transport=_transport(config, mode),
        problems=(*problems, *rollout_problems, *_node_problems(sizes, per_node), *engine_problems, *share_problems),
        notes=(*notes, *rollout_notes, *share_notes, *crossing_notes(roles, sizes, per_node)),
    )


def cannot_run_yet(plan: PlacementPlan) -> list[str]:
    """What a plan may hold but a real run cannot do yet: ways of sending weights to engines of several machines or
    pipeline stages.
    """
    held = [engine for engine in plan.engines if engine.bundles]
    problems = []
    machines = sorted({plan.bundles[index].node for engine in held for index in engine.bundles})
    row = None if plan.transport is None else transport_of(plan.transport)
    if row is not None and row.one_machine and len(machines) > 1:
        problems.append(
            f"--colocate over {len(machines)} machines: weights sent by {row.name} reach only engines on the machine of"
            " the trainer's first rank. Fix: --update-weight-transport disk, with --update-weight-disk-dir on a file"
            " system that all machines share."
        )
    staged = [engine for engine in plan.engines if engine.pp > 1]
    if staged and row is not None and not row.reaches_stages:
        problems.append(
            f"engine {staged[0].index} has {staged[0].pp} pipeline stages (--sglang-pp-size): weights cannot be sent to"
            f" them by {row.name} yet. Fix: --update-weight-transport disk."
        )
    spread = [engine for engine in held if engine.num_nodes > 1]
    if spread and row is not None and not row.reaches_spread:
        fix = "--update-weight-mode full" if row.is_mode else "--update-weight-transport disk"
        problems.append(
            f"engine {spread[0].index} runs on {spread[0].num_nodes} machines: weights sent by {row.name} reach only"
            f" the first of them. Fix: {fix}."
        )
    return problems


def _transport(config: RunConfig, mode: str) -> str | None:
    if mode in ("train_only", "rollout_only"):
        return None
    if config.sync.mode_row is not None:
        return config.sync.mode_row.name
    return config.sync.update_weight_transport or fitting(colocate=mode == "colocate")[0]


def _gpus_per_node(config: RunConfig, sizes: list[RoleSize]) -> int:
    """--num-gpus-per-node; else the largest share that a role takes of each of several machines.

    Else 8, or what one role needs.
    """
    if config.placement.num_gpus_per_node:
        return config.placement.num_gpus_per_node
    largest = max((size.num_gpus_per_node for size in sizes), default=8)
    return largest if any(size.num_nodes > 1 for size in sizes) else max(8, largest)


def _node_problems(sizes: list[RoleSize], per_node: int) -> list[str]:
    """Machines smaller than a role's share of them."""
    return [
        f"--{size.name}-num-gpus-per-node {size.num_gpus_per_node} is more than a machine's --num-gpus-per-node"
        f" {per_node}. Fix: --{size.name}-num-gpus-per-node {per_node} on more nodes, or --num-gpus-per-node"
        f" {size.num_gpus_per_node}."
        for size in sizes
        if size.num_gpus_per_node > per_node and size.host is None
    ]


def _bundles(roles: dict[str, RolePlan], swapped: set[str], num_gpus: int, per_node: int) -> tuple[Bundle, ...]:
    """Each process on a GPU holds an equal share of it; a swapped role lives inside another's process."""
    names: list[list[str]] = [[] for _ in range(num_gpus)]
    for name, role in roles.items():
        for index in role.bundles:
            names[index].append(name)
    bundles = []
    for index, here in enumerate(names):
        holders = max(1, sum(name not in swapped for name in here))
        share = int(1e4 / holders) / 1e4  # Ray counts in ten-thousandths
        shares = {name: 0.0 if name in swapped else share for name in here}
        bundles.append(Bundle(index=index, node=index // per_node, gpu=index % per_node, roles=shares))
    return tuple(bundles)
