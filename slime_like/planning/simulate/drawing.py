"""Simulated runs as a picture: who works when in each mode, shares of the time, and a sweep. Needs matplotlib."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from slime_like.planning.report.picture import pyplot_for
from slime_like.planning.simulate.answer import Comparison, ModeRow
from slime_like.planning.simulate.flow import Flow
from slime_like.planning.simulate.simulation import EXACT_SAMPLES, smaller
from slime_like.planning.simulate.sweep import SweepPoint
from slime_like.planning.simulate.table import mode_of

_BUSY, _SYNC, _IDLE, _ENGINES = "#4c78a8", "#e45756", "#dddddd", "#54a24b"
#: Train steps of a timeline.
_STEPS = 4


@dataclasses.dataclass(frozen=True)
class Timeline:
    """What runs when: (begin, end) of train steps and syncs; requests of all engines from each time on."""

    training: list[tuple[float, float]]
    syncing: list[tuple[float, float]]
    times: list[float]
    requests: list[int]


def timeline(row: ModeRow) -> Timeline:
    """The first steps of a row's mode, from a run that is made smaller if it is large."""
    scenario = dataclasses.replace(row.scenario, steps=_STEPS, warm_up=0).with_rules()
    factor = -(-_STEPS * scenario.samples_a_step // (EXACT_SAMPLES // 4))
    if factor > 1:
        scenario = smaller(scenario, factor)
    spans: dict[str, list[tuple[float, float]]] = {"training": [], "syncing": []}
    began: dict[str, float | None] = {"training": None, "syncing": None}
    times, requests = [0.0], [0]

    def watch(flow: Flow) -> None:
        now = flow.events.now
        times.append(now)
        requests.append(sum(engine.num_requests for engine in flow.generation.engines if not engine.paused))
        for name, is_on in (("training", flow.trainer.is_busy), ("syncing", flow.is_syncing)):
            begin = began[name]
            if is_on and begin is None:
                began[name] = now
            elif not is_on and begin is not None:
                spans[name].append((begin, now))
                began[name] = None

    flow = Flow(scenario, watch)
    flow.run()
    for name, begin in began.items():
        if begin is not None:
            spans[name].append((begin, flow.events.now))
    return Timeline(spans["training"], spans["syncing"], times, requests)


def draw(comparison: Comparison, path: str, *, swept: tuple[str, Sequence[SweepPoint]] | None = None) -> None:
    """Write the picture; its kind is that of the name (.png, .svg). Raises UserError where matplotlib is missing."""
    pyplot = pyplot_for(path)
    count = len(comparison.rows)
    figure, axes = pyplot.subplots(
        count + 1 + (swept is not None), 1, figsize=(11, 1.7 * count + (7 if swept else 3)), squeeze=False,
        height_ratios=[1] * count + [1.6] + ([2.4] if swept else []), layout="constrained",
    )  # fmt: skip
    lines = [timeline(row) for row in comparison.rows]
    end = max(line.times[-1] for line in lines)
    for axis, row, line in zip(axes[:, 0], comparison.rows, lines, strict=False):
        _draw_timeline(axis, row, line, end)
    axes[count - 1, 0].set_xlabel("seconds; green: requests in engines, blue: train step, red: sync")
    _draw_shares(axes[count, 0], comparison)
    if swept is not None:
        _draw_sweep(axes[count + 1, 0], *swept)
    figure.suptitle(comparison.verdict, fontsize=9)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _draw_timeline(axis: Any, row: ModeRow, line: Timeline, end: float) -> None:
    most = max(line.requests) or 1
    axis.fill_between(line.times, [count / most for count in line.requests], step="post", color=_ENGINES, alpha=0.7)
    for spans, color in ((line.training, _BUSY), (line.syncing, _SYNC)):
        axis.broken_barh([(begin, stop - begin) for begin, stop in spans], (-0.6, 0.5), color=color)
    axis.set_xlim(0, end)
    axis.set_yticks([-0.35, 0.5], ["trainer", "engines"])
    axis.set_title(f"{row.name}: {row.outcome.step_s:.4g} s a step", loc="left", fontsize=10)


def _draw_shares(axis: Any, comparison: Comparison) -> None:
    labels: list[str] = []
    for row in comparison.rows:
        out = row.outcome
        for side, busy, sync, idle in (
            ("engines", out.engines_busy, out.engines_sync, out.engines_idle),
            ("trainer", out.trainer_busy, out.trainer_sync, out.trainer_idle),
        ):
            place, left = len(labels), 0.0
            labels.append(f"{row.name}: {side}")
            for share, color in ((busy, _BUSY), (sync, _SYNC), (idle, _IDLE)):
                axis.barh(place, share, left=left, color=color)
                left += share
    axis.set_yticks(range(len(labels)), labels, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("share of the time: busy, sync, idle")


def _draw_sweep(axis: Any, name: str, points: Sequence[SweepPoint]) -> None:
    curves: dict[str, tuple[list[float], list[float]]] = {}
    for point in points:
        for row in point.comparison.rows:
            values, seconds = curves.setdefault(mode_of(row.name), ([], []))
            values.append(point.value)
            seconds.append(row.outcome.step_s)
    for mode, (values, seconds) in curves.items():
        axis.plot(values, seconds, marker="o", label=mode)
    if min(point.value for point in points) > 0 and len(points) > 3:
        axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel(name)
    axis.set_ylabel("seconds a step")
    axis.grid(alpha=0.3)
    axis.legend()
