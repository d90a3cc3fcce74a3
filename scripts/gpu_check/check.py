"""The first hour on a GPU as one command: climbs a ladder of checks and writes one page of results.

usage: gpu_check.sh [--gpus N] [--only RUNG,...] [--output DIR] [--device cuda|pretend] [--hf-checkpoint DIR]
"""

from __future__ import annotations

import argparse
import platform
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from ladder import ROOT, Rung, climb
from page import write_report

LADDER = (
    Rung(name="driver", title="Driver and versions", deadline_s=120),
    Rung(name="imports", title="Imports", deadline_s=600),
    Rung(name="train_step", title="Train step against HF", deadline_s=600, needs=("driver",)),
    Rung(name="engine", title="Engine alone", deadline_s=900, needs=("driver",)),
    Rung(name="colocate", title="Colocated loop on one card", deadline_s=900, needs=("train_step", "engine")),
    Rung(name="ipc", title="Weights by handle", deadline_s=900, needs=("engine",)),
    Rung(name="train_speed", title="Train step against a bare loop", deadline_s=900, needs=("train_step",)),
    Rung(name="generate_speed", title="Generation against the bare server", deadline_s=900, needs=("engine",)),
    Rung(name="broadcast", title="Broadcast between two GPUs", deadline_s=900, min_gpus=2, needs=("engine",)),
    Rung(name="killed_engine", title="A killed engine", deadline_s=600, min_gpus=2, needs=("broadcast",)),
    Rung(name="parallel", title="TP2 and PP2", deadline_s=900, min_gpus=2, needs=("train_step",)),
    Rung(name="transformer_engine", title="TransformerEngine", deadline_s=600, needs=("train_step",)),
    Rung(name="experts", title="Mixture of experts", deadline_s=900, needs=("train_step",)),
)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; ends with status 2 for what makes no sense."""
    parser = argparse.ArgumentParser(
        prog="gpu_check.sh", description=(__doc__ or "").splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--gpus", type=int, help="GPUs to use. Default: all that nvidia-smi lists; 2 without one.")
    parser.add_argument("--only", default="", help=f"Rungs to run, of {', '.join(rung.name for rung in LADDER)}.")
    parser.add_argument("--output", type=Path, help="Folder of the report and logs. Default: runs/gpu-check-<time>.")
    parser.add_argument(
        "--device",
        choices=("cuda", "pretend"),
        help="pretend: on the CPU, with CUDA pretended where that can be done. Default: cuda where there is a GPU.",
    )
    parser.add_argument(
        "--hf-checkpoint", type=Path, help="A real model for engine and colocated loop; default: small."
    )
    options = parser.parse_args(argv)
    if options.gpus is not None and options.gpus < 1:
        parser.error(f"--gpus {options.gpus} must be at least 1")
    names = [name for name in options.only.split(",") if name]
    unknown = sorted(set(names) - {rung.name for rung in LADDER})
    if unknown:
        parser.error(f"--only {', '.join(unknown)}: no such rung. Known: {', '.join(rung.name for rung in LADDER)}")
    if options.hf_checkpoint and not (options.hf_checkpoint / "config.json").is_file():
        parser.error(f"--hf-checkpoint {options.hf_checkpoint} has no config.json")
    options.only = names
    return options


def listed_gpus() -> list[str]:
    """What nvidia-smi lists, one line a GPU; none without it."""
    if shutil.which("nvidia-smi") is None:
        return []
    done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    return [line for line in done.stdout.splitlines() if line.startswith("GPU ")]


def main(argv: list[str] | None = None) -> int:
    """Command line; status 1 if a rung failed or ran out of time."""
    options = parse(argv)
    gpus = listed_gpus()
    device = options.device or ("cuda" if gpus else "pretend")
    if device == "cuda" and not gpus:
        print("gpu_check: nvidia-smi lists no GPU. Fix: --device pretend, or install the driver.", file=sys.stderr)
        return 2
    if device == "cuda" and (options.gpus or 0) > len(gpus):
        print(f"gpu_check: --gpus {options.gpus}, but nvidia-smi lists {len(gpus)}", file=sys.stderr)
        return 2
    for number in (signal.SIGTERM, signal.SIGHUP):  # run_rung ends what it has started on the way out
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    num_gpus = options.gpus or len(gpus) or 2
    folder = (options.output or ROOT / "runs" / time.strftime("gpu-check-%Y%m%d-%H%M%S")).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    rungs = [rung for rung in LADDER if not options.only or rung.name in options.only]
    checkpoint = str(options.hf_checkpoint.absolute()) if options.hf_checkpoint else None
    outcomes = climb(rungs, {"device": device, "gpus": num_gpus, "hf_checkpoint": checkpoint}, num_gpus, folder)
    host = {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "host": platform.platform(),
        "Python": platform.python_version(),
    }
    host["GPUs"] = "; ".join(line.split(" (UUID")[0] for line in gpus) if device == "cuda" else "none used"
    host["commit"] = _commit()
    page = write_report(outcomes, host, folder)
    bad = [outcome.name for outcome in outcomes if outcome.is_bad]
    print(f"\n{page}" + (f"\nlook at: {', '.join(bad)}" if bad else ""))
    return 1 if bad else 0


def _commit() -> str:
    done = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"],
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )
    return done.stdout.strip() or "unknown (no git here)"


if __name__ == "__main__":
    sys.exit(main())
