"""The command: `python -m slime_like.observability.doctor RUN_DIR [--json] [--hung-after SECONDS]`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence

from slime_like.config.bounds import bounded
from slime_like.errors import UserError
from slime_like.observability.doctor.evidence import gather
from slime_like.observability.doctor.processes import drives, output_of, processes_of, with_stacks
from slime_like.observability.doctor.verdict import Verdict, as_text, judge


def diagnose(path: str, *, hung_after_s: float | None = None) -> tuple[Verdict, int | None]:
    """What became of the run, and how many rollouts it is to have. Raises DataError where there is no run."""
    evidence = gather(path)
    driver = evidence.driver_pid if drives(evidence.driver_pid, evidence.path) else None
    processes, note = with_stacks(processes_of(evidence.path, driver))
    verdict = judge(evidence, processes, driver=driver, hung_after_s=hung_after_s)
    output = None if driver is None else output_of(driver)
    notes = (note, "" if output is None else f"train.py prints to {output}")
    return dataclasses.replace(verdict, notes=tuple(filter(None, notes))), evidence.num_rollout


def main(argv: Sequence[str] | None = None) -> int:
    """Print what became of the run named on the command line; returns the exit status, 0 whatever that is."""
    parser = argparse.ArgumentParser(
        prog="python -m slime_like.observability.doctor", description="What became of a run, and what to do."
    )
    parser.add_argument("run_dir", help="Directory of a run, on the host of its driver.")
    parser.add_argument("--json", action="store_true", help="All of it, stacks too, as JSON.")
    parser.add_argument(
        "--hung-after",
        type=bounded(float, least=0, most=1e9),
        metavar="SECONDS",
        help="Without progress for so long it is hung. Default: three times its longest pause so far, at least 60.",
    )
    options = parser.parse_args(argv)
    try:
        verdict, num_rollout = diagnose(options.run_dir, hung_after_s=options.hung_after)
    except UserError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    print(json.dumps(verdict.as_dict(), indent=1) if options.json else as_text(verdict, options.run_dir, num_rollout))
    return 0


if __name__ == "__main__":
    sys.exit(main())
