"""What the simulator predicts against what runs took: a table, a line for each run, in whatever async mode it ran.

usage: python -m benchmarks.simulated_modes [--from RUN_DIR…] [--output benchmarks/results/NAME] RUN_DIR…
       python -m benchmarks.simulated_modes --sleep FOLDER [--output …]

Without --from a run is predicted from its own first half, and held against the second. With it, engines and trainer are
as fast as in those runs (mode off, the same model and host, other batches or lengths), and the run gives only what it
was asked to do: batch, answers, mode and its rules. --sleep makes runs itself: the rollout side and the loop are real,
on the scripted engine, whose tokens and train steps are sleeps: so what is measured is no neighbour's load.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.sleeping_runs import SleepCase, sleep_run
from slime_like.planning.simulate.measured import MeasuredRun, read_run, scenario_of
from slime_like.planning.simulate.simulation import simulate
from slime_like.planning.simulate.spread import Spread

#: Predictions are means over so many simulated steps: the chance in a run's few steps is not the simulator's.
STEPS = 60


@dataclasses.dataclass(frozen=True)
class Line:
    """One run: seconds a step, predicted and measured."""

    run: str
    mode: str
    calibrated_on: str
    steps: int
    measured_s: float
    predicted_s: float
    staleness_measured: float | None
    staleness_predicted: float

    @property
    def error(self) -> float:
        """Predicted over measured, less 1."""
        return self.predicted_s / self.measured_s - 1


def predict(run: MeasuredRun, calibration: Sequence[MeasuredRun], *, pause_share: float = 1.0) -> Line:
    """The line of a run; calibration: other runs, or none for its own first half. pause_share: of a sync, how much of
    it engines stand in mode full.
    """
    if calibration:
        scenario = scenario_of(run, others=calibration, own_pace=False)
        checked, name = run, ", ".join(Path(other.path).name for other in calibration)
    else:
        half = len(run.steps) // 2
        scenario, checked, name = scenario_of(run.part(0, half)), run.part(half), "its first half"
    outcome = simulate(dataclasses.replace(scenario, steps=STEPS).with_trainer(pause_share=pause_share))
    return Line(
        run="/".join(Path(run.path).parts[-2:]), mode=run.mode, calibrated_on=name, steps=len(checked.steps),
        measured_s=checked.step_s, predicted_s=outcome.step_s,
        staleness_measured=run.staleness_mean, staleness_predicted=outcome.staleness_mean,
    )  # fmt: skip


def table(lines: Sequence[Line]) -> str:
    """Markdown."""
    rows = ["| run | mode | engines and trainer from | steps | measured s | predicted s | error | staleness |"]
    rows.append("|---|---|---|---|---|---|---|---|")
    for line in lines:
        stale = "" if line.staleness_measured is None else f"{line.staleness_measured:.2f}, "
        rows.append(
            f"| {line.run} | {line.mode} | {line.calibrated_on} | {line.steps} | {line.measured_s:.3f} |"
            f" {line.predicted_s:.3f} | {line.error:+.1%} | {stale}predicted {line.staleness_predicted:.2f} |"
        )
    return "\n".join(rows)


CASES = (
    SleepCase(name="even-8", batch=8, lengths=Spread("uniform", (20.0, 100.0))),
    SleepCase(name="even-24", batch=24, lengths=Spread("uniform", (20.0, 100.0))),
    SleepCase(name="long-tail-16", batch=16, lengths=Spread("lognormal", (40.0, 110.0), limit=160.0)),
)


def sleep_lines(folder: Path, modes: Sequence[str]) -> list[Line]:
    """Every case: in mode off predicted by its own first half, and from the pace of the others; in the async modes from
    the pace of all cases in mode off. Runs that are there are kept.
    """
    runs = [_sleep_run_once(case, folder) for case in CASES]
    lines = [predict(run, []) for run in runs]
    lines += [predict(run, [other for other in runs if other is not run]) for run in runs]
    for mode in modes:
        ahead = [_sleep_run_once(dataclasses.replace(case, mode=mode), folder) for case in CASES]
        lines += [predict(run, runs, pause_share=0.0) for run in ahead]  # a sync stops no answer that sleeps
    return lines


def _sleep_run_once(case: SleepCase, folder: Path) -> MeasuredRun:
    path = folder / case.folder
    return read_run(str(path if path.exists() else sleep_run(case, folder)))


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="*", metavar="RUN_DIR", help="Runs to predict.")
    parser.add_argument("--from", nargs="+", default=[], dest="calibration", metavar="RUN_DIR", help="See above.")
    parser.add_argument("--skip", type=int, default=1, help="First steps of each run to leave out.")
    parser.add_argument("--sleep", type=Path, metavar="FOLDER", help="Make runs on sleeps here.")
    parser.add_argument("--modes", nargs="+", default=[], help="With --sleep: async modes to run beside off.")
    parser.add_argument("--pause-share", type=float, default=1.0, help="Of a sync in mode full: engines stand.")
    parser.add_argument("--output", type=Path, help="Write NAME.json and NAME.md.")
    args = parser.parse_args(argv)
    if not args.runs and args.sleep is None:
        parser.error("give run directories, or --sleep FOLDER")
    calibration = [read_run(path, skip=args.skip) for path in args.calibration]
    lines = [predict(read_run(path, skip=args.skip), calibration, pause_share=args.pause_share) for path in args.runs]
    if args.sleep is not None:
        lines += sleep_lines(args.sleep, args.modes)
    print(table(lines))
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        result = [dataclasses.asdict(line) | {"error": line.error} for line in lines]
        args.output.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        args.output.with_suffix(".md").write_text(table(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
