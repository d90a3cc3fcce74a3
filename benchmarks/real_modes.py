"""Seconds of a step in each async mode with a real engine, and what keeps both sides from overlapping on one host.

Called by `python -m benchmarks.async_modes --engine real`; runs are benchmarks/real_runs.py's. On a host whose
processors both sides share no schedule beats any of

    generate    tokens of a step x seconds of a token in an engine with all its requests running, as fitted over the
                run in mode off (planning/simulate/measured.py): never idle, no batch's last answer alone
    train, sync as in mode off, where nothing else runs
    processors  what engine, trainer, driver and the rest used in a step of that run, over the number of processors

and the ideal of a run is the largest of them.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.real_runs import GROUP, RealCase, real_run, used_between
from slime_like.planning.simulate.measured import MeasuredRun, fit, read_run
from slime_like.utils.files import RunDirectory, read_json_lines

#: Steps at the beginning and at the end that are not counted.
FIRST, LAST = 4, 4
SIDES = ("engine", "trainer", "driver", "other")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RealRow:
    """One run; seconds are those of a step."""

    case: str
    mode: str
    steps: int
    step_s: float
    generate_s: float  # of an engine that is never idle
    train_s: float
    sync_s: float
    alone_s: float  # train and sync in mode off
    trainer_idle_s: float
    processor_s: Mapping[str, float]  # by side
    others_s: float | None  # of processors, what processes used that were no part of the run; None: not measured
    num_processors: int
    staleness_mean: float

    @property
    def processors_s(self) -> float:
        """What the processors need for the step, if none of them ever waits."""
        return sum(self.processor_s.values()) / self.num_processors

    @property
    def ideal_s(self) -> float:
        """The largest bound."""
        return max(self.generate_s, self.alone_s, self.processors_s)

    @property
    def bound(self) -> str:
        """Which that is."""
        named = {self.generate_s: "engine", self.alone_s: "trainer", self.processors_s: "processors"}
        return named[self.ideal_s]


def token_s(runs: Sequence[MeasuredRun], running: int) -> float:
    """Seconds of a token in an engine with so many requests, from runs in mode off."""
    steps = [step for run in runs for step in run.steps]
    rows = np.array([(1.0, step.longest_tokens, step.generated_tokens) for step in steps])
    _, base, per_request = fit(rows, np.array([step.generate_s for step in steps]))
    return base / running + per_request


def row_of(
    case: str, mode: str, lines: Sequence[Mapping], samples: Sequence[Mapping[str, float]], token: float
) -> RealRow:
    """Of a run's metric lines and processors.json. token: seconds of one. Its own train and sync stand in `alone_s`
    until mode off's are known.
    """
    by_kind: dict[str, dict[int, Mapping]] = {kind: {} for kind in ("step", "rollout")}
    for line in lines:
        if line["kind"] in by_kind:
            by_kind[line["kind"]][line["step"]] = line
    numbers = sorted(by_kind["step"])[FIRST:-LAST]
    begin, end = by_kind["step"][numbers[0] - 1]["time"], by_kind["step"][numbers[-1]]["time"]

    def mean(kind: str, name: str) -> float:
        return float(np.mean([by_kind[kind][number].get(name, 0.0) for number in numbers]))

    used = used_between(samples, begin, end)
    train_s, sync_s = mean("step", "step/train_seconds"), mean("step", "step/sync_seconds")
    return RealRow(
        case=case, mode=mode, steps=len(numbers), step_s=(end - begin) / len(numbers),
        generate_s=mean("rollout", "rollout/tokens") * token, train_s=train_s, sync_s=sync_s, alone_s=train_s + sync_s,
        trainer_idle_s=mean("step", "async/trainer_idle_seconds"),
        processor_s={side: used.get(side, 0.0) / len(numbers) for side in SIDES},
        others_s=(used["host"] - sum(used.get(side, 0.0) for side in SIDES)) / len(numbers) if "host" in used else None,
        num_processors=os.cpu_count() or 1,
        staleness_mean=mean("rollout", "async/staleness_mean"),
    )  # fmt: skip


def rows_of(case: RealCase, modes: Sequence[str], folder: Path) -> list[RealRow]:
    """A row for each mode; the first is "off", which the engine's pace is taken from too."""
    assert modes[0] == "off", "the others are held against it"
    token = token_s([read_run(str(real_run(case, "off", folder)))], case.batch * GROUP)
    rows = []
    for mode in modes:
        run = RunDirectory(str(real_run(case, mode, folder)))
        samples = json.loads((Path(run.path) / "processors.json").read_text(encoding="utf-8"))
        rows.append(row_of(case.name, mode, list(read_json_lines(run.metrics)), samples, token))
        rows[-1] = dataclasses.replace(rows[-1], alone_s=rows[0].alone_s)
    return rows


def real_table(rows: Sequence[RealRow]) -> str:
    """Markdown."""
    heads = [
        "mode",
        "step s",
        "of off's",
        "generate, never idle",
        "train + sync alone",
        "processors",
        "ideal",
        "of ideal",
    ]
    heads += ["train + sync here", "trainer waits", "trainer's processor s", "the run's others'", "not the run's"]
    heads += ["staleness"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for row in rows:
        cells = [row.mode, f"{row.step_s:.3f}", f"{row.step_s / rows[0].step_s:.2f}", f"{row.generate_s:.3f}"]
        cells += [f"{row.alone_s:.3f}", f"{row.processors_s:.3f}", f"{row.ideal_s:.3f} ({row.bound})"]
        cells += [f"**{row.ideal_s / row.step_s:.2f}**", f"{row.train_s + row.sync_s:.3f}", f"{row.trainer_idle_s:.3f}"]
        trainer_s = row.processor_s["trainer"]
        cells += [f"{trainer_s:.3f}", f"{sum(row.processor_s.values()) - trainer_s:.3f}"]
        cells += ["" if row.others_s is None else f"{row.others_s:.3f}", f"{row.staleness_mean:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
