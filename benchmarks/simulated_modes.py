"""What the simulator predicts against what runs took: a table, a line for each run, in whatever async mode it ran.

usage: simulated_modes.py [--from RUN_DIR…] [--output benchmarks/results/NAME] RUN_DIR…
       simulated_modes.py --sleep FOLDER [--output …]

Without --from a run is predicted from its own first half, and held against the second. With it, engines and trainer are
as fast as in those runs (mode off, the same model and host, other batches or lengths), and the run gives only what it
was asked to do: batch, answers, mode and its rules. --sleep makes runs itself: the rollout side and the loop are real,
on the scripted engine, whose tokens and train steps are sleeps: so what is measured is no neighbour's load.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import heapq
import json
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from slime_like.planning.simulate.measured import MeasuredRun, read_run, scenario_of
from slime_like.planning.simulate.simulation import simulate
from slime_like.planning.simulate.spread import Spread

ROOT = Path(__file__).resolve().parents[1]
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class SleepCase:
    """A run whose engine and trainer sleep."""

    name: str
    batch: int
    lengths: Spread
    token_s: float = 0.01
    train_fixed_s: float = 0.2
    train_token_s: float = 1e-4
    sync_s: float = 0.1
    steps: int = 17
    mode: str = "off"

    @property
    def folder(self) -> str:
        """Its run directory's name."""
        return self.name if self.mode == "off" else f"{self.name}-{self.mode}"


CASES = (
    SleepCase(name="even-8", batch=8, lengths=Spread("uniform", (20.0, 100.0))),
    SleepCase(name="even-24", batch=24, lengths=Spread("uniform", (20.0, 100.0))),
    SleepCase(name="long-tail-16", batch=16, lengths=Spread("lognormal", (40.0, 110.0), limit=160.0)),
)


class SleepingScript:
    """What the scripted engine answers, and when: a length for each request, a token after each token_s.

    Of several requests with one prompt, which an answer cannot tell apart, the first to end is the shortest.
    """

    def __init__(self, case: SleepCase, seed: int):
        self._case, self._random, self._lock = case, np.random.default_rng(seed), threading.Lock()
        self._lengths: dict[tuple[int, ...], list[tuple[float, int]]] = collections.defaultdict(list)

    def delay(self, body: dict):
        """For ScriptedEngine(fault_for=…)."""
        from slime_like.testing.scripted_engine import Fault

        with self._lock:
            length = max(1, round(float(self._case.lengths.draw(self._random, (1,))[0])))
        seconds = length * self._case.token_s
        heapq.heappush(self._lengths[tuple(body["input_ids"])], (time.monotonic() + seconds, length))
        return Fault(delay_s=seconds)

    def answer(self, prompt: list[int]) -> tuple[list[int], list[float]]:
        """For ScriptedEngine(script)."""
        _, length = heapq.heappop(self._lengths[tuple(prompt)])
        return [5] * length, [-1.0] * length


class SleepingTrainer:
    """A Trainer whose step is a sleep by tokens."""

    def __init__(self, case: SleepCase):
        self._case = case

    def put(self, samples):
        """The samples themselves."""
        return samples

    def train(self, step, batch):
        """Sleeps."""
        from slime_like.records import StepReport

        tokens = sum(len(sample.tokens) for sample in batch)
        time.sleep(self._case.train_fixed_s + self._case.train_token_s * tokens)
        return StepReport(step=step, num_train_steps=1, num_samples=len(batch), num_tokens=tokens, metrics={})


class SleepingEngines:
    """Engines whose sync is a sleep."""

    num_members = 1

    def __init__(self, case: SleepCase):
        self._case = case

    def sync(self, weights, trainer):
        """Sleeps."""
        from slime_like.records import SyncReceipt

        time.sleep(self._case.sync_s)
        return SyncReceipt(
            weights=weights, transport="sleep", num_tensors=0, num_bytes=0, seconds=self._case.sync_s, digest=""
        )

    def check_after_failure(self) -> None:
        """Nothing dies."""


def sleep_run(case: SleepCase, folder: Path) -> Path:
    """Run the synchronous loop on sleeps; its run directory."""
    from slime_like.job.running import Job, ResolvedRun
    from slime_like.loops import sync_loop
    from slime_like.observability.console import ProgressConsole
    from slime_like.observability.metrics import MetricsLog
    from slime_like.planning.report.render import as_json, make_report
    from slime_like.rollout.check_data import check_data
    from slime_like.rollout.manager import RolloutManager
    from slime_like.rollout.service import EngineAccess
    from slime_like.testing.scripted_engine import ScriptedEngine
    from slime_like.utils.files import RunDirectory, write_atomic

    config = _sleep_config(case, folder)
    report, script = make_report(config, planning=False), SleepingScript(case, seed=0)
    run, source = RunDirectory.create(config), check_data(config)
    write_atomic(run.plan, as_json(report))
    resolved = ResolvedRun(config=config, plan=report.plan, run=run, data=source, num_rollout=case.steps)
    with ScriptedEngine(script.answer, fault_for=script.delay) as engine, open(os.devnull, "w") as nowhere:
        manager = RolloutManager(config, EngineAccess(router_url=engine.url, router_api_key=None, num_engines=1))
        manager.start(source)
        try:
            job = Job(resolved=resolved, trainer=SleepingTrainer(case), engines=SleepingEngines(case), rollouts=manager)  # type: ignore[arg-type]
            with MetricsLog(run, tensorboard=False) as log:
                sync_loop.run(job, log, ProgressConsole(case.steps, nowhere))
        finally:
            manager.close()
    return Path(run.path)


def _sleep_config(case: SleepCase, folder: Path):
    from arguments import parse_args

    rows = [{"prompt": [{"role": "user", "content": f"sort {n:04d}"}], "label": str(n)} for n in range(400)]
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "train.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    model = str(ROOT / "models" / "tiny-qwen3")
    flags = {
        "hf-checkpoint": model, "prompt-data": str(data), "input-key": "prompt", "label-key": "label",
        "num-rollout": case.steps, "rollout-batch-size": case.batch, "n-samples-per-prompt": 2,
        "rollout-max-response-len": 400, "rm-type": "exact", "log-samples": 1000, "verify-weight-sync-interval": 0,
        "actor-num-gpus-per-node": 1, "rollout-num-gpus": 1, "run-dir": str(folder / case.folder),
    }  # fmt: skip
    if case.mode != "off":
        flags["async-mode"] = case.mode
    argv = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return parse_args([*argv, "--apply-chat-template"]).config


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
