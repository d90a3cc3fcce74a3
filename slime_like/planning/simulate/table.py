"""A comparison as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from slime_like.planning.simulate.answer import COLOCATED, Comparison
from slime_like.planning.simulate.scenario import Scenario
from slime_like.planning.simulate.sweep import SweepPoint


def render_scenario(scenario: Scenario) -> str:
    """What is simulated."""
    work, engines, trainer, rules = scenario.work, scenario.engines, scenario.trainer, scenario.rules
    where = "all on the same GPUs" if scenario.colocated else f"trainer on {trainer.num_gpus}"
    per_token = 1e6 * trainer.per_token_s
    decode, request = 1e3 * engines.base_s, 1e3 * engines.per_request_s
    lines = [
        f"{work.batch} groups of {work.group_size} a step; answers of {work.response_tokens} tokens",
        f"prompts of {work.prompt_tokens:.4g} tokens; {engines.num_engines} x {engines.gpus_per_engine} GPUs, {where}",
        f"a decode step: {decode:.4g} ms + {request:.4g} ms a request, {engines.slots} at most",
        f"a train step: {trainer.fixed_s:.4g} s + {per_token:.4g} us a token + {trainer.overhead_s:.3g} s",
        f"a sync: {trainer.sync_s.mean:.3g} s; in mode full {rules.pause_mode}, {rules.num_workers or 'any'} workers,",
        f"  by {rules.order}, at most {rules.max_staleness} steps stale, then {rules.stale_policy}",
    ]
    if not work.turns.is_constant or work.turns.lowest > 1 or work.reward_s.mean or work.filtered_share:
        lines.append(
            f"turns {work.turns}, environment {work.environment_s} s a call, reward {work.reward_s} s,"
            f" {work.filtered_share:.0%} of groups filtered"
        )
    return "\n".join(lines)


def render_comparison(comparison: Comparison) -> str:
    """The table, where the next GPU goes, why async gains no more, and the verdict."""
    width = max(len(row.name) for row in comparison.rows)
    sides = "engines: busy  sync  idle  trainer: busy  sync  idle"
    lines = [f"{'mode':<{width}}  step s   gain  {sides}  staleness  lost tokens"]
    for row in comparison.rows:
        out = row.outcome
        lost = out.lost_tokens / out.decoded_tokens if out.decoded_tokens else 0.0
        lines.append(
            f"{row.name:<{width}}  {out.step_s:6.4g}  {row.gain:4.2f}x  {out.engines_busy:13.0%}"
            f"  {out.engines_sync:4.0%}  {out.engines_idle:4.0%}  {out.trainer_busy:13.0%}  {out.trainer_sync:4.0%}"
            f"  {out.trainer_idle:4.0%}  {out.staleness_mean:4.2f} / {out.staleness_max:<2d}  {lost:11.1%}"
        )
    for more in comparison.next_gpus:
        what = f"{more.num_gpus} more GPU{'s' * (more.num_gpus > 1)} in {more.mode}"
        if more.shared:
            lines.append(f"{what}, for both sides: step {more.with_engine - 1:+.1%}")
        else:
            lines.append(
                f"{what}: for engines step {more.with_engine - 1:+.1%}, for the trainer {more.with_trainer - 1:+.1%}"
                f" -> {more.where}"
            )
    lines += [f"- {reason}" for reason in comparison.reasons]
    return "\n".join([*lines, comparison.verdict])


def render_sweep(name: str, points: Sequence[SweepPoint]) -> str:
    """A line for each value: seconds a step in each mode, and the best."""
    modes = _modes(points)
    lines = [f"{name:>19}  " + "  ".join(f"{mode:>14}" for mode in modes) + "  best"]
    for point in points:
        steps = {mode_of(row.name): row.outcome.step_s for row in point.comparison.rows}
        cells = "  ".join(f"{steps[mode]:12.4g} s" if mode in steps else f"{'-':>14}" for mode in modes)
        lines.append(f"{point.value:19g}  {cells}  {point.comparison.best.name}")
    return "\n".join(lines)


def _modes(points: Sequence[SweepPoint]) -> list[str]:
    names = (row.name for point in points for row in point.comparison.rows)
    return list(dict.fromkeys(map(mode_of, names)))


def mode_of(row_name: str) -> str:
    """A row's name without the split of its GPUs."""
    return row_name if row_name == COLOCATED else row_name.split(", ")[0]
