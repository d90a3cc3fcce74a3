"""What a run will take, in every async mode: step time, who waits, where the next GPU goes, and whether async pays.

    python -m slime_like.planning.simulate --run-dir runs/… [--also runs/…]      # from what a run measured
    python train.py … --plan json | python -m slime_like.planning.simulate --plan -      # before any run: an estimate
    python -m slime_like.planning.simulate --engines 8 --batch 64 --response-tokens 600~1800 --train-seconds 12 …

Flags are put over what a run or a plan says. Distributions: 600, 16-64 (uniform), 600~1800 (log-normal: mean ~ 95th
percentile).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from slime_like.config.bounds import bounded
from slime_like.errors import DataError, UserError
from slime_like.planning.simulate.answer import compare
from slime_like.planning.simulate.drawing import draw
from slime_like.planning.simulate.measured import read_run, scenario_of
from slime_like.planning.simulate.scenario import ORDERS, PAUSE_MODES, STALE_POLICIES, Scenario
from slime_like.planning.simulate.spread import Spread
from slime_like.planning.simulate.sweep import QUANTITIES, parse_sweep, sweep
from slime_like.planning.simulate.table import render_comparison, render_scenario, render_sweep

#: flag -> (group of the scenario, field, type, help). A distribution's type is Spread.
_FIELDS: dict[str, tuple[str, str, type, str]] = {
    "batch": ("work", "batch", int, "Groups a train step."),
    "group-size": ("work", "group_size", int, "Samples a group."),
    "response-tokens": ("work", "response_tokens", Spread, "Tokens of an answer, all its turns together."),
    "prompt-tokens": ("work", "prompt_tokens", float, "Tokens of a prompt."),
    "turns": ("work", "turns", Spread, "Turns of a sample."),
    "environment-seconds": ("work", "environment_s", Spread, "Of the environment's call between two turns."),
    "observation-tokens": ("work", "observation_tokens", float, "What the environment adds between two turns."),
    "reward-seconds": ("work", "reward_s", Spread, "From a sample's last token to its reward."),
    "filtered-share": ("work", "filtered_share", float, "Share of the groups that a dynamic filter drops."),
    "engines": ("engines", "num_engines", int, "Engines."),
    "slots": ("engines", "slots", int, "Most running requests of an engine."),
    "decode-base": ("engines", "base_s", float, "Seconds of a decode step, beside what each request adds."),
    "decode-per-request": ("engines", "per_request_s", float, "Seconds that each running request adds to it."),
    "prefill": ("engines", "prefill_s", float, "Seconds of prefill a token."),
    "gpus-per-engine": ("engines", "gpus_per_engine", int, "GPUs of an engine."),
    "train-fixed": ("trainer", "fixed_s", float, "Seconds of a train step that depend on nothing."),
    "train-per-token": ("trainer", "per_token_s", float, "Seconds that each token adds to it."),
    "overhead": ("trainer", "overhead_s", float, "Seconds of a step in which only the driver works."),
    "sync-seconds": ("trainer", "sync_s", Spread, "Of a weight sync."),
    "pause-share": ("trainer", "pause_share", float, "Mode full: share of a sync, its end, in which engines stand."),
    "abort-seconds": ("trainer", "abort_s", float, "What a sync takes more with --pause-mode abort."),
    "trainer-gpus": ("trainer", "num_gpus", int, "GPUs of the trainer."),
    "max-staleness": ("rules", "max_staleness", int, "Mode full: train steps that what is trained on may be old."),
    "workers": ("rules", "num_workers", int, "Mode full: groups made at a time. Default: as capacity allows."),
    "sync-interval": ("rules", "sync_interval", int, "Train steps between two syncs."),
    "over-sampling": ("rules", "over_sampling", int, "Mode off: groups begun for a batch; the first done are trained."),
    "contention": ("rules", "contention", float, "0: both sides have processors of their own; 1: they share one."),
    "stale-policy": ("rules", "stale_policy", str, f"Of what is too old: {', '.join(STALE_POLICIES)}."),
    "order": ("rules", "order", str, f"Groups are trained by {' or by '.join(ORDERS)}."),
    "pause-mode": ("rules", "pause_mode", str, f"What a sync does to running requests: {', '.join(PAUSE_MODES)}."),
    "steps": ("", "steps", int, "Train steps that count."),
    "warm-up": ("", "warm_up", int, "Train steps before them."),
    "seed": ("", "seed", int, "Of all draws."),
}  # fmt: skip


def make_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m slime_like.planning.simulate", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--run-dir", help="Directory of a run whose measurements are used.")
    source.add_argument("--plan", help="Output of train.py --plan json, which holds an estimate; - is standard input.")
    source.add_argument("--scenario", help="A file with the scenario that --json has printed.")
    parser.add_argument(
        "--also", nargs="+", default=[], metavar="DIR",
        help="With --run-dir: runs of the same model on the same host with other batches or lengths, to fit with.",
    )  # fmt: skip
    parser.add_argument(
        "--skip-steps", type=bounded(int, least=0), default=1, help="With --run-dir: first steps to leave out."
    )
    for name, (_, _, kind, text) in _FIELDS.items():
        numeric = kind in (int, float)
        parser.add_argument(f"--{name}", type=bounded(kind) if numeric else str, help=text)
    parser.add_argument("--max-response-tokens", type=bounded(float, above=0), help="Longer answers are cut.")
    parser.add_argument(
        "--train-seconds", type=bounded(float, above=0), help="Of a train step; replaces what a token and a step take."
    )
    parser.add_argument(
        "--partial-rollout", action="store_true", help="With --over-sampling: what is unfinished goes on."
    )
    parser.add_argument(
        "--colocated", action=argparse.BooleanOptionalAction, help="Engines have the trainer's GPUs, in turns."
    )
    parser.add_argument("--sweep", help=f"name=1,2,4 or name=1..10000 (doublings). Names: {', '.join(QUANTITIES)}.")
    parser.add_argument("--json", action="store_true", help="Print one JSON object and nothing else.")
    parser.add_argument("--output", help="Draw a picture: a name that ends in .png or .svg.")
    return parser


def scenario_from(options: argparse.Namespace) -> Scenario:
    """The scenario that the command line asks for. Raises UserError."""
    if options.also and not options.run_dir:
        raise UserError("--also has nothing to add to without --run-dir.")
    if options.run_dir:
        runs = [read_run(path, skip=options.skip_steps) for path in (options.run_dir, *options.also)]
        scenario = scenario_of(runs[0], others=runs[1:])
    elif options.plan or options.scenario:
        scenario = _read_scenario(options.plan or options.scenario, in_plan=bool(options.plan))
    else:
        scenario = Scenario()
    for name, (group, field, kind, _) in _FIELDS.items():
        value: Any = getattr(options, name.replace("-", "_"))
        if value is None:
            continue
        if name == "trainer-gpus" and value >= 1 and options.train_per_token is None and options.train_seconds is None:
            scenario = scenario.with_trainer_gpus(value)  # what was measured is divided over them
            continue
        change: dict[str, Any] = {field: Spread.parse(value, f"--{name}") if kind is Spread else value}
        if group:
            change = {group: dataclasses.replace(getattr(scenario, group), **change)}
        scenario = dataclasses.replace(scenario, **change)
    if options.max_response_tokens is not None:
        limited = dataclasses.replace(scenario.work.response_tokens, limit=options.max_response_tokens)
        scenario = scenario.with_work(response_tokens=limited)
    if options.train_seconds is not None:
        work = scenario.work
        tokens = scenario.samples_a_step * (work.response_tokens.mean + work.prompt_tokens)
        scenario = scenario.with_trainer(fixed_s=0.0, per_token_s=options.train_seconds / max(1.0, tokens))
    if options.partial_rollout:
        scenario = scenario.with_rules(partial=True)
    if options.colocated is not None:
        scenario = dataclasses.replace(scenario, colocated=options.colocated)
    scenario.check()
    return scenario


def main(argv: list[str]) -> int:
    """The command line; returns 0, or 2 for a user's mistake."""
    options = make_parser().parse_args(argv)
    try:
        if options.output and not options.output.endswith((".png", ".svg")):
            raise UserError(f"--output {options.output}: the name must end in .png or .svg.")
        swept = parse_sweep(options.sweep) if options.sweep else None
        scenario = scenario_from(options)
        comparison = compare(scenario)
        points = sweep(scenario, *swept) if swept else []
        if options.json:
            result = {"scenario": scenario.to_dict()} | comparison.to_dict()
            if swept:
                result["sweep"] = {
                    "quantity": swept[0],
                    "points": [{"value": point.value} | point.comparison.to_dict() for point in points],
                }
            print(json.dumps(result, indent=1))
        else:
            print(render_scenario(scenario), render_comparison(comparison), sep="\n\n")
            if swept:
                print("\n" + render_sweep(swept[0], points))
        if options.output:
            draw(comparison, options.output, swept=(swept[0], points) if swept else None)
            if not options.json:
                print(f"written: {options.output}")
    except UserError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


def _read_scenario(path: str, *, in_plan: bool) -> Scenario:
    """The scenario of a file: of a plan's "async", or that of `--json`."""
    try:
        text = sys.stdin.read() if path == "-" else Path(path).read_text(encoding="utf-8")
        fields = json.loads(text)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}.") from None
    except ValueError:
        raise DataError(f"{path}: is no JSON.") from None
    part = fields.get("async") if in_plan and isinstance(fields, dict) else fields
    scenario = part.get("scenario") if isinstance(part, dict) else None
    if scenario is None:
        what = "the output of train.py --plan json, of a run that generates and trains" if in_plan else "that of --json"
        raise DataError(f"{path}: holds no scenario. Fix: give {what}.")
    return Scenario.from_dict(scenario)
