"""The engines: how many GPUs they get, which bundles each one holds, and the node rank of each bundle. Pure.

An engine lies within one machine or on whole machines: SGLang gives every node of an engine the same number of GPUs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

from slime_like.config.run import RunConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """One engine: the bundles under it, or the URL of one that already runs.

    dp and ep split the tp ranks, they add none.
    """

    index: int
    bundles: tuple[int, ...]
    tp: int
    pp: int = 1
    dp: int = 1
    ep: int = 1
    external_url: str | None = None
    node_ranks: tuple[int, ...] = ()  # of each bundle: which of the engine's machines it lies on

    @property
    def num_nodes(self) -> int:
        """Machines under it; 0 for an external one."""
        return max(self.node_ranks, default=-1) + 1


def node_ranks(nodes: Sequence[Hashable]) -> tuple[int, ...]:
    """Rank of each GPU's machine among its own engine's machines, in the order in which the engine meets them.

    nodes: the machine of each of one engine's GPUs. Counted from 0 in every engine, whatever stands before it.
    Example: [1, 1, 2, 2] -> (0, 0, 1, 1).
    """
    seen = list(dict.fromkeys(nodes))
    return tuple(seen.index(node) for node in nodes)


def cut_engines(sizes: Sequence[int], offset: int) -> list[tuple[int, ...]]:
    """Bundles of engines of these sizes, one behind the other from `offset`."""
    cut, start = [], offset
    for size in sizes:
        cut.append(tuple(range(start, start + size)))
        start += size
    return cut


def torn_engine(engines: Sequence[tuple[int, ...]], per_node: int) -> int | None:
    """The first engine that neither lies within one machine nor covers whole machines; None if there is none."""
    for index, bundles in enumerate(engines):
        first, size = bundles[0], len(bundles)
        within = first // per_node == bundles[-1] // per_node
        whole = first % per_node == 0 and size % per_node == 0
        if not (within or whole):
            return index
    return None


def rollout_gpus(config: RunConfig, mode: str, trainer_gpus: int) -> tuple[int, list[str], list[str]]:
    """(GPUs of all engines, problems, notes). trainer_gpus: bundles of all training roles."""
    placement, per_engine = config.placement, config.placement.rollout_num_gpus_per_engine
    num_gpus = placement.rollout_num_gpus
    if mode == "train_only":
        return 0, [], [] if num_gpus is None else [f"--rollout-num-gpus {num_gpus}: this run starts no engines"]
    if mode == "external":
        return _external_gpus(config)
    if num_gpus is None:
        if mode != "colocate":
            beside = f" beside the trainer's {trainer_gpus}" if trainer_gpus else ""
            return (
                0,
                [f"--rollout-num-gpus is missing: how many GPUs the engines get{beside}. Fix: give it, or --colocate."],
                [],
            )
        num_gpus = trainer_gpus
    if num_gpus < per_engine or num_gpus % per_engine:
        whose = "" if placement.rollout_num_gpus else " (by default the trainer's)"
        problem = (
            f"{num_gpus} rollout GPUs do not divide into engines of {per_engine}: --rollout-num-gpus{whose},"
            f" --rollout-num-gpus-per-engine {per_engine}. Fix: --rollout-num-gpus"
            f" {max(1, num_gpus // per_engine) * per_engine}, or another engine size."
        )
        return num_gpus, [problem], []
    notes = []
    if mode == "colocate" and num_gpus != trainer_gpus:
        notes.append(
            f"--colocate with {num_gpus} engine GPUs over {trainer_gpus} of the trainer: {abs(num_gpus - trainer_gpus)}"
            " GPUs idle in one of the two phases"
        )
    return num_gpus, [], notes


def _external_gpus(config: RunConfig) -> tuple[int, list[str], list[str]]:
    """GPUs behind the addresses. The servers themselves are asked when the run starts, not for a plan."""
    placement, per_engine = config.placement, config.placement.rollout_num_gpus_per_engine
    flag_gpus, engines = placement.rollout_num_gpus, len(placement.rollout_external_engine_addrs or [])
    derived, problems = engines * per_engine, []
    if flag_gpus is not None and flag_gpus != derived:
        problems.append(
            f"--rollout-num-gpus {flag_gpus}, but {engines} external engines of --rollout-num-gpus-per-engine"
            f" {per_engine} make {derived}. Fix: leave --rollout-num-gpus out; it is derived."
        )
    if engines > placement.actor_num_gpus:
        problems.append(
            f"{engines} external engines (--rollout-external-engine-addrs) need as many handles, but the actor has"
            f" {placement.actor_num_gpus} bundles to hold them: --actor-num-nodes {placement.actor_num_nodes},"
            f" --actor-num-gpus-per-node {placement.actor_num_gpus_per_node}. Fix: at most one engine per actor GPU."
        )
    return derived, problems, []


def eval_share(config: RunConfig, num_engines: int) -> tuple[list[str], list[str]]:
    """(problems, notes) of --eval-num-engines."""
    share = config.asynchrony.eval_num_engines
    if share <= 0 or not num_engines:
        return [], []
    if share < num_engines:
        note = (
            f"during an evaluation {share} of {num_engines} engines keep its weights and answer nothing else; rollouts"
            f" and syncs go on with {num_engines - share} (--eval-num-engines)"
        )
        return [], [note]
    problem = (
        f"--eval-num-engines {share} of {num_engines} engines leaves none for rollouts. Fix: "
        + (f"at most {num_engines - 1}" if num_engines > 1 else "more engines")
        + ", or leave it out: then all evaluate, and the next sync waits."
    )
    return [problem], []


def make_engines(
    config: RunConfig, mode: str, held: int, offset: int, per_node: int
) -> tuple[tuple[EnginePlan, ...], list[str]]:
    """(engines, problems). held: bundles that engines hold on this cluster, from `offset`."""
    shape: dict[str, Any] = {
        "tp": config.engine_tp_size,
        "pp": config.engine_pp_size,
        "dp": config.engine_dp_size,
        "ep": config.engine_ep_size,
    }
    if mode == "external":
        urls = config.placement.external_urls()
        return tuple(EnginePlan(index=i, bundles=(), external_url=url, **shape) for i, url in enumerate(urls)), []
    size = config.placement.rollout_num_gpus_per_engine
    cut = cut_engines([size] * (held // size), offset)
    engines = tuple(
        EnginePlan(index=i, bundles=bundles, node_ranks=node_ranks([b // per_node for b in bundles]), **shape)
        for i, bundles in enumerate(cut)
    )
    return engines, _torn_problems(config, cut, offset, per_node)


def _torn_problems(config: RunConfig, cut: list[tuple[int, ...]], offset: int, per_node: int) -> list[str]:
    size = config.placement.rollout_num_gpus_per_engine
    if size > per_node and size % per_node:
        problem = (
            f"--rollout-num-gpus-per-engine {size} is more than a machine's {per_node} GPUs (--num-gpus-per-node) and"
            " no multiple of them: an engine across machines must cover them whole. Fix: --rollout-num-gpus-per-engine"
            f" {size // per_node * per_node}."
        )
        return [problem]
    torn = torn_engine(cut, per_node)
    if torn is None:
        return []
    unit = per_node if size > per_node else size
    fix = f"a trainer size that is a multiple of {unit}, or " if offset % unit else ""
    problem = (
        f"engine {torn} of {size} GPUs would be torn across machines of {per_node} GPUs (--num-gpus-per-node): the"
        f" engines start at GPU {offset}, it at GPU {cut[torn][0]}. Fix: {fix}another --rollout-num-gpus-per-engine."
    )
    return [problem]
