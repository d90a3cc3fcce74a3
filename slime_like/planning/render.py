"""The plan as text for a terminal."""

from __future__ import annotations

from slime_like.planning.placement import PlacementPlan


def render_plan(plan: PlacementPlan) -> str:
    """Several lines: mode, one line per GPU, roles, engines, transport, problems."""
    lines = [f"mode {plan.mode}: {plan.num_gpus} GPUs, engines from GPU {plan.rollout_offset}", ""]
    for bundle in plan.bundles:
        engines = [f"engine {e.index} rank {e.bundles.index(bundle.index)}" for e in plan.engines if bundle.index in e.bundles]
        shares = [f"{role} {share:g}" if share else f"{role} (swapped in)" for role, share in bundle.roles.items()]
        lines.append(f"  node {bundle.node} gpu {bundle.gpu}  bundle {bundle.index:<3} {', '.join(shares)}" + (f"   [{', '.join(engines)}]" if engines else ""))
    lines.append("")
    for name, role in plan.roles.items():
        lines.append(f"  {name:<8} {role.num_gpus} GPUs  tensor {role.tp}  pipeline {role.pp}  data {role.dp}")
    for engine in plan.engines:
        if engine.external_url:
            lines.append(f"  engine {engine.index} at {engine.external_url} (external: no GPU is reserved for it)")
    if plan.transport:
        lines.append(f"  weights travel by {plan.transport}")
    if plan.problems:
        lines += ["", "This plan cannot run:"] + [f"[{i}] {problem}" for i, problem in enumerate(plan.problems, 1)]
    return "\n".join(lines)
