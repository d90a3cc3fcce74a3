"""The training roles: who exists, on how many GPUs, and with whom GPUs are shared. Pure.

role     exists with                    stands
actor    always                         on GPUs of its own
critic   --advantage-estimator ppo      on GPUs of its own, on the actor's with --colocate-training
ref      --use-kl-loss or --kl-coef     in the actor's processes; on its own with --no-colocate-policy-ref
reward   --reward-load                  on GPUs of its own, the critic's with --colocate-critic-reward,
                                        the actor's with --colocate-training; a whole copy on each
"""

from __future__ import annotations

import dataclasses

from slime_like.config.run import RunConfig

#: In the order in which roles that stand apart get their bundles.
TRAINING_ROLES = ("actor", "critic", "ref", "reward")

_NAMES = {"actor": "the actor", "critic": "the critic", "ref": "the reference", "reward": "the reward model"}
_NEEDS = {"critic": "--advantage-estimator ppo", "ref": "--use-kl-loss or --kl-coef", "reward": "--reward-load"}


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
class RoleSize:
    """How many GPUs a training role gets. host: the role whose GPUs it shares, None on its own.

    swapped: it has no process of its own.
    """

    name: str
    num_nodes: int
    num_gpus_per_node: int
    host: str | None = None
    swapped: bool = False

    @property
    def num_gpus(self) -> int:
        """All of them."""
        return self.num_nodes * self.num_gpus_per_node


def training_roles(config: RunConfig) -> tuple[list[RoleSize], list[str], list[str]]:
    """(roles that exist, the actor first; problems; notes)."""
    placement = config.placement
    sizes = {
        "actor": RoleSize(
            name="actor", num_nodes=placement.actor_num_nodes, num_gpus_per_node=placement.actor_num_gpus_per_node
        )
    }
    exists = {"critic": config.needs_critic, "ref": config.needs_reference, "reward": config.needs_reward_model}
    problems, notes = _switch_problems(config, exists)
    for name in TRAINING_ROLES[1:]:
        if not exists[name]:
            flags = [flag for flag in _size_flags(config, name) if flag is not None]
            if flags:
                notes.append(
                    f"{' and '.join(flags)}: there is no {name} without {_NEEDS[name]}, so no GPU is planned for it"
                )
            continue
        host, why = _host(config, name, exists)
        default = sizes[host or "actor"]
        size = RoleSize(
            name=name,
            num_nodes=getattr(placement, f"{name}_num_nodes") or default.num_nodes,
            num_gpus_per_node=getattr(placement, f"{name}_num_gpus_per_node") or default.num_gpus_per_node,
            host=host,
            swapped=name == "ref" and host is not None,
        )
        problems += _equal_problems(size, default, why) if host else _split_problems(config, size)
        sizes[name] = size
    return list(sizes.values()), problems, notes


def role_plans(config: RunConfig, sizes: list[RoleSize]) -> dict[str, RolePlan]:
    """Roles -> bundles: those that stand apart one behind the other in TRAINING_ROLES' order, the others on their
    host's.
    """
    parallel, start = config.parallel, 0
    plans: dict[str, RolePlan] = {}
    for size in sizes:
        if size.host:
            bundles = plans[size.host].bundles
        else:
            bundles = tuple(range(start, start + size.num_gpus))
            start += size.num_gpus
        if size.name == "reward":  # a whole copy on each GPU
            plans[size.name] = RolePlan(num_gpus=len(bundles), bundles=bundles, dp=len(bundles))
            continue
        plans[size.name] = RolePlan(
            num_gpus=len(bundles),
            bundles=bundles,
            tp=parallel.tensor_model_parallel_size,
            pp=parallel.pipeline_model_parallel_size,
            cp=parallel.context_parallel_size,
            ep=parallel.expert_model_parallel_size,
            dp=max(1, len(bundles) // parallel.model_parallel_size),
        )
    return plans


def crossing_notes(plans: dict[str, RolePlan], sizes: list[RoleSize], per_node: int) -> list[str]:
    """What works but costs: tensor parallel groups across machines, roles on other machines than their flags say."""
    notes = []
    for size in sizes:
        role, who = plans[size.name], _NAMES[size.name]
        if size.host:
            continue
        groups = [role.bundles[i : i + role.tp] for i in range(0, role.num_gpus - role.tp + 1, role.tp)]
        across = sum(group[0] // per_node != group[-1] // per_node for group in groups)
        if across:
            notes.append(
                f"{across} of {who}'s {len(groups)} tensor parallel groups of {role.tp} GPUs"
                f" (--tensor-model-parallel-size) span machines of {per_node}: every layer waits for the network"
            )
        nodes = sorted({bundle // per_node for bundle in role.bundles})
        if len(nodes) != size.num_nodes:
            notes.append(
                f"{who}'s {size.num_nodes} x {size.num_gpus_per_node} GPUs (--{size.name}-num-nodes,"
                f" --{size.name}-num-gpus-per-node) lie on {len(nodes)} machine{'s' if len(nodes) > 1 else ''} of"
                f" {per_node}: machines are filled one after the other"
            )
    return notes


def _host(config: RunConfig, name: str, exists: dict[str, bool]) -> tuple[str | None, str]:
    """(the role whose GPUs it shares, the flag that says so)."""
    placement = config.placement
    if placement.colocate_training:
        return "actor", "--colocate-training"
    if name == "ref" and config.swaps_reference:
        return "actor", "--colocate-policy-ref"
    if name == "reward" and placement.colocate_critic_reward and exists["critic"]:
        return "critic", "--colocate-critic-reward"
    return None, ""


def _size_flags(config: RunConfig, name: str) -> tuple[str | None, str | None]:
    """The role's size flags as they were given, as text."""
    flags = []
    for part in ("num_nodes", "num_gpus_per_node"):
        value = getattr(config.placement, f"{name}_{part}")
        flags.append(None if value is None else f"--{name}-{part.replace('_', '-')} {value}")
    return flags[0], flags[1]


def _switch_problems(config: RunConfig, exists: dict[str, bool]) -> tuple[list[str], list[str]]:
    placement, problems, notes = config.placement, [], []
    if placement.colocate_critic_reward and not placement.colocate_training:
        if exists["reward"] and not exists["critic"]:
            problems.append(
                "--colocate-critic-reward puts the reward model on the critic's GPUs, but there is no critic:"
                f" --advantage-estimator is {config.loss.advantage_estimator}. Fix: --advantage-estimator ppo, or drop"
                " --colocate-critic-reward."
            )
        elif not exists["reward"]:
            notes.append("--colocate-critic-reward: there is no reward model without --reward-load")
    if placement.colocate_training and exists["ref"] and not placement.colocate_policy_ref:
        notes.append(
            "--no-colocate-policy-ref: --colocate-training puts the reference on the actor's GPUs all the same"
        )
    return problems, notes


def _equal_problems(size: RoleSize, host: RoleSize, why: str) -> list[str]:
    """Roles on the same GPUs must ask for the same number of them."""
    apart = (
        {"ref": "--no-colocate-policy-ref"}.get(size.name, f"drop {why}")
        if why != "--colocate-training"
        else f"drop {why}"
    )
    problems = []
    for part in ("num_nodes", "num_gpus_per_node"):
        ours, theirs = getattr(size, part), getattr(host, part)
        if ours != theirs:
            flag, host_flag = (f"--{name}-{part.replace('_', '-')}" for name in (size.name, host.name))
            problems.append(
                f"{flag} {ours} and {host_flag} {theirs} must be the same: {_NAMES[size.name]} shares"
                f" {_NAMES[host.name]}'s GPUs ({why}). Fix: {flag} {theirs}, or {apart}."
            )
    return problems


def _split_problems(config: RunConfig, size: RoleSize) -> list[str]:
    """A role on GPUs of its own is split like the actor, over another number of GPUs; the reward model is not split."""
    if size.name == "reward":
        return []
    model = config.parallel.model_parallel_size
    flags = f"--{size.name}-num-nodes {size.num_nodes}, --{size.name}-num-gpus-per-node {size.num_gpus_per_node}"
    if size.num_gpus % model:
        problem = (
            f"{_NAMES[size.name]}'s {size.num_gpus} GPUs do not divide by tensor x pipeline x context parallel size"
            f" {model}, the actor's: {flags}, --tensor-model-parallel-size, --pipeline-model-parallel-size. Fix: a"
            f" multiple of {model} GPUs."
        )
        return [problem]
    batch, copies = config.global_batch_size, size.num_gpus // model
    if size.name == "critic" and batch % copies:
        problem = (
            f"--global-batch-size {batch} does not divide by the critic's data parallel size {copies} ({size.num_gpus}"
            f" GPUs / {model}): {flags}. Fix: another number of GPUs, or another batch size."
        )
        return [problem]
    return []
