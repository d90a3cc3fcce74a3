"""The reward curve of a run as a picture: `python -m slime_like.observability.curve RUN_DIR`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from slime_like.errors import DataError, UserError
from slime_like.utils.files import RunDirectory, read_json_lines


def reward_series(run_dir: RunDirectory) -> dict[str, tuple[list[int], list[float]]]:
    """Name -> (rollout numbers, values) of the mean reward and each evaluation's, and its pass@1; points without a
    finite value are left out.

    Raises DataError if the run has no metrics or no reward yet.
    """
    if not run_dir.metrics.is_file():
        raise DataError(f"{run_dir.metrics}: no such file. Fix: give the directory of a run.")
    series: dict[str, tuple[list[int], list[float]]] = {}
    for record in read_json_lines(run_dir.metrics):
        for name, value in record.items():
            if value is not None and (
                name == "rollout/reward_mean" or name.startswith("eval/") and name.endswith(("/reward_mean", "/pass@1"))
            ):
                steps, values = series.setdefault(name, ([], []))
                steps.append(record["step"])
                values.append(value)
    if not series:
        raise DataError(f"{run_dir.metrics}: has no reward to draw yet.")
    return series


def draw_reward_curve(run_dir: RunDirectory, *, caption: str = "") -> Path:
    """Draw reward.png into the run directory and return its path. caption: a line under the picture."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, (steps, values) in sorted(reward_series(run_dir).items(), reverse=True):
        axes.plot(steps, values, marker="o" if name.startswith("eval/") else None, label=name)
    axes.set_xlabel("rollout step" + (f"\n{caption}" if caption else ""))
    axes.set_ylabel("mean reward, pass rate")
    axes.set_title(Path(run_dir.path).name)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(run_dir.reward_curve, dpi=120)
    return run_dir.reward_curve


def main(argv: list[str] | None = None) -> int:
    """Draw the curve of the run directory named on the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m slime_like.observability.curve", description="Draw the reward curve of a run."
    )
    parser.add_argument("run_dir", help="Directory of a run, with metrics.jsonl.")
    parser.add_argument("--caption", default="", help="A line under the picture.")
    options = parser.parse_args(argv)
    try:
        print(draw_reward_curve(RunDirectory(options.run_dir), caption=options.caption))
    except UserError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
