"""Seconds of a step in each async mode against the ideal: the longer of its two sides, as measured in the same run.

usage: python -m benchmarks.async_modes [--cases NAME…] [--modes NAME…] [--output benchmarks/results/async-modes]
       python -m benchmarks.async_modes --engine real [--runs FOLDER] [--output benchmarks/results/async-modes-real]

The rollout side, the loop and the HTTP between them are real; the scripted engine's tokens, the train step and the sync
take their time as sleep, so both sides overlap on a host of two cores as they would on hardware of their own. A case is
the same work in every mode: the same number of groups and the same law of lengths. Of a run's steps the first and the
last few are left out: the first fill the buffer, and for the last nothing more is made ahead.

The ideal of a run is max(generate, train + sync), of

    generate    tokens of a batch that was trained on x seconds of a token / slots: of an engine that is never idle,
    train, sync the trainer's seconds, by the clock; it does both itself, so they never overlap,

each a mean over the steps of that run: the longer of two means, which no schedule can beat however much it stores, and
not the mean of each step's longer one, which is more. Tokens are those of the run, whose share of long answers differs
from run to run; their seconds are the sleep alone, so that what a busy host adds is our loss. Whatever lets the engine
wait (a batch's longest answer, prompts that staleness does not let begin, our own work between two answers) is a loss.
The engine here goes on during a sync: what --update-weight-pause-mode costs is not in it. A ratio just above 1 is a
stock of groups that was larger when the counting began than when it ended.

With --engine real nothing sleeps: whole train.py runs of the tiny model with SGLang (benchmarks/real_modes.py).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks import real_modes
from benchmarks.real_runs import CASES as REAL_CASES
from benchmarks.sleeping_runs import SleepCase, sleep_run
from benchmarks.step_phases import cpu_name
from slime_like.planning.simulate.spread import Spread
from slime_like.utils.files import RunDirectory, read_json_lines

GOAL = 0.95
#: Steps at the beginning and at the end that are not counted, and those between them.
FIRST, LAST, COUNTED = 4, 4, 12
EVEN = Spread("uniform", (20.0, 100.0))
LONG_TAIL = Spread("lognormal", (40.0, 110.0), limit=160.0)


def _case(name: str, lengths: Spread, token_s: float, train_fixed_s: float) -> SleepCase:
    return SleepCase(
        name=name, batch=16, lengths=lengths, token_s=token_s, train_fixed_s=train_fixed_s,
        steps=FIRST + COUNTED + LAST, slots=16, flags=(("sglang-server-concurrency", "192"),),
    )  # fmt: skip


#: 32 answers a batch on 16 slots: 0.6 s of an engine that never waits. The longest answer of the long tail takes 1.2 s.
CASES = (
    _case("even, sides alike", EVEN, 0.005, 0.25),
    _case("long tail, sides alike", LONG_TAIL, 0.0075, 0.3),
    _case("long tail, engine longer", LONG_TAIL, 0.0075, 0.05),
    _case("long tail, trainer longer", LONG_TAIL, 0.0075, 0.6),
)
#: name -> --async-mode, and the flags that go with it
MODES: dict[str, tuple[str, dict[str, str]]] = {
    "off": ("off", {}),
    "one-step": ("one-step", {}),
    "full, 1": ("full", {"max-staleness": "1"}),
    "full, 1, drop": ("full", {"max-staleness": "1", "stale-policy": "drop"}),
    "full, 2": ("full", {"max-staleness": "2"}),
    "full, 3": ("full", {"max-staleness": "3"}),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One run; seconds are those of a step."""

    case: str
    mode: str
    steps: int
    step_s: float
    generate_s: float
    train_s: float
    sync_s: float
    longest_s: float  # the batches' longest answers, in the mean
    trainer_idle_s: float  # it waited for groups
    held_s: float  # the bound on staleness kept more from being begun
    staleness_mean: float
    dropped_groups: float

    @property
    def ideal_s(self) -> float:
        """max(stage)"""
        return max(self.generate_s, self.train_s + self.sync_s)

    @property
    def of_ideal(self) -> float:
        """1: not one second was lost."""
        return self.ideal_s / self.step_s


def row_of(case: str, mode: str, lines: Sequence[Mapping], token_s: float, slots: int) -> Row:
    """Of a run's metric lines, without its FIRST and LAST steps. token_s: seconds of a token in its slot."""
    by_kind: dict[str, dict[int, Mapping]] = {kind: {} for kind in ("step", "rollout", "sync")}
    for line in lines:
        if line["kind"] in by_kind:
            by_kind[line["kind"]][line["step"]] = line
    numbers = sorted(by_kind["step"])[FIRST:-LAST]

    def mean(kind: str, name: str) -> float:
        return float(np.mean([by_kind[kind][number].get(name, 0.0) for number in numbers]))

    # From the end of the step before the first to the end of the last: what lies between two steps counts.
    wall_s = by_kind["step"][numbers[-1]]["time"] - by_kind["step"][numbers[0] - 1]["time"]
    return Row(
        case=case,
        mode=mode,
        steps=len(numbers),
        step_s=wall_s / len(numbers),
        generate_s=mean("rollout", "rollout/tokens") * token_s / slots,
        train_s=mean("step", "step/train_seconds"),
        sync_s=mean("step", "step/sync_seconds"),
        longest_s=mean("rollout", "rollout/response_tokens_max") * token_s,
        trainer_idle_s=mean("step", "async/trainer_idle_seconds"),
        held_s=mean("rollout", "async/rollout_held_seconds"),
        staleness_mean=mean("rollout", "async/staleness_mean"),
        dropped_groups=mean("rollout", "async/dropped_groups"),
    )


def measure(case: SleepCase, mode: str, folder: Path) -> Row:
    """Run it."""
    async_mode, flags = MODES[mode]
    case = dataclasses.replace(case, mode=async_mode, flags=(*case.flags, *flags.items()))
    assert case.slots is not None, "an engine without slots is never full"
    run = RunDirectory(str(sleep_run(case, folder)))
    return row_of(case.name, mode, list(read_json_lines(run.metrics)), case.token_s, case.slots)


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    heads = ["case", "mode", "step s", "generate", "train + sync", "ideal", "of ideal", "of off's step"]
    heads += ["trainer waits", "held", "staleness", "dropped"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    off = {row.case: row.step_s for row in rows if row.mode == "off"}
    for row in rows:
        share = f"{row.step_s / off[row.case]:.2f}" if row.case in off else ""
        cells = [row.case, row.mode, f"{row.step_s:.3f}", f"{row.generate_s:.3f}", f"{row.train_s + row.sync_s:.3f}"]
        cells += [f"{row.ideal_s:.3f}", f"**{row.of_ideal:.2f}**" if row.of_ideal >= GOAL else f"{row.of_ideal:.2f}"]
        cells += [share, f"{row.trainer_idle_s:.3f}", f"{row.held_s:.3f}"]
        cells += [f"{row.staleness_mean:.2f}", f"{row.dropped_groups:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


#: What real runs are compared over.
REAL_CASE, REAL_MODES = "engine longer", ("off", "one-step", "full, 1", "full, 2")


def measure_real(runs: Path | None, output: Path | None) -> None:
    """Make the runs, unless they are there, and print their table."""
    with contextlib.ExitStack() as stack:
        folder = runs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        rows = real_modes.rows_of(REAL_CASES[REAL_CASE], REAL_MODES, folder)
    text = real_modes.real_table(rows)
    print(text)
    if output:
        note = "SGLang and Megatron on the same processors"
        result = [dataclasses.asdict(row) | {"ideal_s": row.ideal_s, "bound": row.bound} for row in rows]
        save(output, f"{cpu_name()}, {os.cpu_count()} CPUs; {note}", result, text)


def save(output: Path, hardware: str, rows: Sequence[Mapping], text: str) -> None:
    """OUTPUT.json and OUTPUT.md."""
    output.parent.mkdir(parents=True, exist_ok=True)
    numbers = json.dumps({"hardware": hardware, "rows": rows}, indent=1)
    output.with_suffix(".json").write_text(numbers + "\n", encoding="utf-8")
    output.with_suffix(".md").write_text(f"{hardware}\n\n{text}\n", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [case.name for case in CASES]
    parser.add_argument("--cases", nargs="+", default=names, choices=names, help="Which; all by default.")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES), help="Which; all by default.")
    parser.add_argument("--output", type=Path, help="Write NAME.json and NAME.md.")
    parser.add_argument("--engine", choices=("sleeping", "real"), default="sleeping", help="What generates.")
    parser.add_argument("--runs", type=Path, metavar="FOLDER", help="With --engine real: keep run directories here.")
    args = parser.parse_args(argv)
    if args.engine == "real":
        measure_real(args.runs, args.output)
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for case in CASES:
            for mode in args.modes if case.name in args.cases else ():
                rows.append(measure(case, mode, Path(folder)))
                print(table(rows).splitlines()[-1], flush=True)
    print(table(rows))
    if args.output:
        hardware = f"{cpu_name()}, {os.cpu_count()} CPUs; tokens, train steps and syncs are sleeps"
        result = [dataclasses.asdict(row) | {"ideal_s": row.ideal_s, "of_ideal": row.of_ideal} for row in rows]
        save(args.output, hardware, result, table(rows))


if __name__ == "__main__":
    main()
