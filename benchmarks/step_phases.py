"""Where a run's time goes: start-up by part, and the median rollout step by phase with the overhead as a share of the
step.

usage: step_phases.py RUN_DIR [--skip 1] [--output benchmarks/results/NAME.json]

The bound is the step's own work, measured in the same run: overhead is what a step takes beyond generate + train +
sync.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from pathlib import Path

PREFIX, SUFFIX = "step/", "_seconds"


def read_records(run_dir: Path) -> list[dict]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def phase_medians(records: list[dict], *, skip: int) -> dict[str, float]:
    """Median seconds of each phase over all steps but the first `skip`, which pay for warming up.

    A step without a phase counts 0 for it.
    """
    steps = [record for record in records if record["kind"] == "step"][skip:]
    if not steps:
        raise SystemExit(f"step_phases: no step is left after leaving out the first {skip}")
    names = sorted({name for step in steps for name in step if name.startswith(PREFIX)})
    return {name.removeprefix(PREFIX): statistics.median(step.get(name, 0.0) for step in steps) for name in names}


def summary(records: list[dict], *, skip: int) -> dict:
    """Everything worth keeping of a run, with the hardware named."""
    phases = phase_medians(records, skip=skip)
    start = next((record for record in records if record["kind"] == "start"), {})
    return {
        "hardware": {"cpu": cpu_name(), "cores": len(os.sched_getaffinity(0)), "system": platform.platform()},
        "steps": len([r for r in records if r["kind"] == "step"]) - skip,
        "median_seconds": phases,
        "overhead_ratio": phases["overhead_seconds"] / phases["seconds"],
        "start_seconds": {
            k.removeprefix("start/").removesuffix(SUFFIX): v for k, v in start.items() if k.startswith("start/")
        },
    }


def cpu_name() -> str:
    """The processor's name as Linux tells it."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def hardware_name() -> str:
    """The GPU that torch computes on, else the processor."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else cpu_name()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run_dir", type=Path, help="Directory of a run, with metrics.jsonl.")
    parser.add_argument("--skip", type=int, default=1, help="First steps to leave out.")
    parser.add_argument("--output", type=Path, help="Write the summary here as JSON.")
    args = parser.parse_args()
    result = summary(read_records(args.run_dir), skip=args.skip)
    for title, table in (
        ("start-up", result["start_seconds"]),
        (f"median of {result['steps']} steps", result["median_seconds"]),
    ):
        print(title)
        for name, seconds in table.items():
            print(f"  {name.removesuffix(SUFFIX):32} {seconds:8.3f} s")
    print(f"overhead / step  {result['overhead_ratio']:.1%}")
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
