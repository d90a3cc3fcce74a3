"""The whole plan - placement, memory, weight sync - as text for a terminal and as the object of `--plan json`."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
from collections.abc import Mapping

from slime_like.config.run import RunConfig
from slime_like.planning.cards import environment_notes
from slime_like.planning.engines import EnginePlan
from slime_like.planning.memory.adapters import TenantRoom
from slime_like.planning.memory.by_phase import MemoryPlan, memory_plan
from slime_like.planning.placement import Bundle, PlacementPlan, make_plan
from slime_like.planning.report.timeline import render_memory
from slime_like.planning.shared_prompts import SharedPromptPlan, shared_prompt_plan
from slime_like.planning.simulate.estimate import estimate, plan_comparison, verdict_line
from slime_like.planning.simulate.scenario import Scenario
from slime_like.planning.sync_bound import SyncPlan, render_sync, sync_plan

#: What is computed exactly of training roles, not estimated: if these alone are more than the card holds, no run can
#: succeed.
_EXACT = ("weights", "gradients", "optimizer")

#: GPUs up to which each has a line of its own; above, equal neighbours share one.
_LINES = 32


@dataclasses.dataclass(frozen=True)
class PlanReport:
    """A plan and what follows from it.

    memory is None where the placement is impossible, sync where nothing is synced, pace where nothing is generated and
    trained, or no plan is wanted.
    """

    plan: PlacementPlan
    memory: MemoryPlan | None
    sync: SyncPlan | None
    problems: tuple[str, ...]
    pace: Scenario | None = None  # what a step may take, for the simulator
    shared: SharedPromptPlan | None = None  # None: nothing is generated and trained

    def to_dict(self) -> dict:
        """The object of `--plan json`."""
        weight_sync = None if self.sync is None else self.sync.to_dict()
        memory = None if self.memory is None else self.memory.to_dict()
        placement = {key: value for key, value in self.plan.to_dict().items() if key not in ("weight_sync", "problems")}
        known = placement | {"memory": memory, "weight_sync": weight_sync}
        if self.pace is not None:
            known["async"] = {"scenario": self.pace.to_dict()} | plan_comparison(self.pace).to_dict()
        if self.shared is not None:
            known["share_prompt"] = self.shared.to_dict()
        return known | {"problems": list(self.problems)}

    def text(self) -> str:
        """The same for people."""
        parts = [render_plan(dataclasses.replace(self.plan, problems=()))]
        if self.sync is not None:
            parts.append(render_sync(self.sync))
        if self.memory is not None:
            parts.append(render_memory(self.memory))
        if self.pace is not None:
            parts.append(verdict_line(self.pace))
        if self.shared is not None:
            parts.append(self.shared.text())
        parts.append(_render_problems(self.problems))
        return "\n\n".join(part.strip("\n") for part in parts if part.strip())


def make_report(
    config: RunConfig,
    *,
    planning: bool = True,
    environment: Mapping[str, str] = os.environ,
    tenants: TenantRoom | None = None,
) -> PlanReport:
    """Everything that is known before a start. tenants: of a Tinker server.

    planning: only a plan is wanted; a real run knows its cards only from --gpu-memory-gib. environment: the trainer's.
    """
    plan = make_plan(config)
    plan = dataclasses.replace(plan, notes=(*plan.notes, *environment_notes(plan, environment)))
    if plan.problems:
        return PlanReport(plan, None, None, plan.problems)
    memory = memory_plan(config, plan, tenants)
    knows_cards = planning or config.placement.gpu_memory_gib is not None
    problems = tuple(_memory_problems(config, memory) if knows_cards else ())
    sync = sync_plan(config, plan)
    pace = estimate(config, plan, sync) if planning else None
    shared = None if pace is None else shared_prompt_plan(config, pace.work)
    return PlanReport(plan, memory, sync, problems, pace, shared)


def as_json(report: PlanReport) -> str:
    """One JSON object, a line per top-level key so that it stays readable for thousands of GPUs."""
    lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in report.to_dict().items()]
    return "{\n" + ",\n".join(lines) + "\n}"


def render_plan(plan: PlacementPlan) -> str:
    """The placement: mode, GPUs, roles, engines, transport, notes, problems."""
    engines_from = f", engines from GPU {plan.rollout_offset}" if any(engine.bundles for engine in plan.engines) else ""
    lines = [f"mode {plan.mode}: {plan.num_gpus} GPUs{engines_from}", "", *_gpu_lines(plan), ""]
    for name, role in plan.roles.items():
        apart = "" if name == "rollout" or plan.has_processes(name) else "  (in the actor's processes)"
        split = f"tensor {role.tp}  pipeline {role.pp}  " + "".join(
            f"{word} {size}  " for word, size in (("context", role.cp), ("expert", role.ep)) if size > 1
        )
        lines.append(
            f"  {name:<8} {role.num_gpus} GPUs  {split}{'engines' if name == 'rollout' else 'data'} {role.dp}{apart}"
        )
    for engine in plan.engines:
        if engine.external_url:
            lines.append(f"  engine {engine.index} at {engine.external_url} (external: no GPU is reserved for it)")
        elif engine.num_nodes > 1:
            lines.append(f"  engine {engine.index} spans {_machines(plan, engine)}")
    if plan.transport:
        lines.append(f"  weights travel by {plan.transport}")
    lines += [f"  note: {note}" for note in plan.notes]
    if plan.problems:
        lines += ["", _render_problems(plan.problems)]
    return "\n".join(lines)


def _render_problems(problems: tuple[str, ...]) -> str:
    return (
        "\n".join(["This plan cannot run:"] + [f"[{i}] {problem}" for i, problem in enumerate(problems, 1)])
        if problems
        else ""
    )


def _memory_problems(config: RunConfig, memory: MemoryPlan) -> list[str]:
    """Cards that cannot hold even what is known exactly.

    Activations and caches are estimates: they make a verdict, no refusal.
    """
    worst, name, bundle = 0, "", 0
    for gpu in memory.per_gpu:
        for phase in gpu.phases:
            exact = sum(
                size
                for part, size in phase.bytes.items()
                if part.split(" ")[-1] in _EXACT and not part.startswith("engine")
            )
            if exact > worst:
                worst, name, bundle = exact, phase.name, gpu.bundle
    if worst <= memory.limit_bytes:
        return []
    parallel, gib = config.parallel, 2**30
    problem = (
        f"GPU {bundle} needs {worst / gib:.1f} GiB for weights, gradients and optimizer alone in phase {name}, but has"
        f" {memory.limit_bytes / gib:.1f} (--gpu-memory-gib): --actor-num-nodes {config.placement.actor_num_nodes},"
        f" --actor-num-gpus-per-node {config.placement.actor_num_gpus_per_node}, --tensor-model-parallel-size"
        f" {parallel.tensor_model_parallel_size}, --pipeline-model-parallel-size"
        f" {parallel.pipeline_model_parallel_size}, --rollout-num-gpus-per-engine"
        f" {config.placement.rollout_num_gpus_per_engine}. Fix: split the model over more GPUs."
    )
    return [problem]


def _machines(plan: PlacementPlan, engine: EnginePlan) -> str:
    """`nodes 1 (rank 0), 2 (rank 1)`."""
    ranks = dict(zip((plan.bundles[i].node for i in engine.bundles), engine.node_ranks, strict=True))
    return "nodes " + ", ".join(f"{node} (rank {rank})" for node, rank in ranks.items())


def _gpu_lines(plan: PlacementPlan) -> list[str]:
    """The map: a line per GPU, or one per run of equal neighbours where there are many."""
    holder = {index: (engine, rank) for engine in plan.engines for rank, index in enumerate(engine.bundles)}
    if plan.num_gpus <= _LINES:
        lines = []
        for bundle in plan.bundles:
            engine, rank = holder.get(bundle.index, (None, 0))
            at = f"   [engine {engine.index} rank {rank}]" if engine else ""
            lines.append(f"  node {bundle.node} gpu {bundle.gpu}  bundle {bundle.index:<3} {_shares(bundle)}{at}")
        return lines
    lines = []
    for (node, shares), group in itertools.groupby(plan.bundles, key=lambda bundle: (bundle.node, _shares(bundle))):
        run = list(group)
        engines = sorted({holder[bundle.index][0].index for bundle in run if bundle.index in holder})
        at = f"   [{_span('engine', engines[0], engines[-1])}]" if engines else ""
        place = f"node {node} {_span('gpu', run[0].gpu, run[-1].gpu)}  {_span('bundle', run[0].index, run[-1].index)}"
        lines.append(f"  {place}  {shares}{at}")
    return lines


def _span(word: str, first: int, last: int) -> str:
    return f"{word} {first}" if first == last else f"{word}s {first}-{last}"


def _shares(bundle: Bundle) -> str:
    return (
        ", ".join(f"{role} {share:g}" if share else f"{role} (swapped in)" for role, share in bundle.roles.items())
        or "idle"
    )
