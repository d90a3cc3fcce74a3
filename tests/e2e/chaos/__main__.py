"""The command behind scripts/chaos.sh."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tests.e2e.chaos.cells import Cell, campaigns, is_light, singles
from tests.e2e.chaos.runs import OPEN, ChaosRun, Outcome, World
from tests.e2e.chaos.table import Kept, markdown, summary
from tests.e2e.runs import ROOT

#: A slice of every kind of fault, in one run.
FAST = [
    Cell("slow", "trainer", "train", "sync"),
    Cell("corrupt reply", "engine", "generate", "sync"),
    Cell("kill", "engine", "generate", "sync"),
]


def main(argv: Sequence[str] | None = None) -> int:
    """Run what was asked for; status 1 if a cell is red."""
    parser = argparse.ArgumentParser(prog="scripts/chaos.sh", description="Faults in whole runs, and their table.")
    parser.add_argument("--fast", action="store_true", help="A few faults in one run.")
    parser.add_argument(
        "--only", nargs="+", action="append", default=[], metavar="WORD", help="Cells with these words."
    )
    parser.add_argument("--missing", action="store_true", help="Only cells without an outcome, nor one like them.")
    parser.add_argument("--minutes", type=float, default=1e6, help="Begin no run after so long.")
    parser.add_argument("--light", action="store_true", help="On scripted engines, without Ray: seconds a run.")
    parser.add_argument("--table", action="store_true", help="Only write the table anew.")
    parser.add_argument("--soak", type=float, metavar="SECONDS", help="A random fault every 20 s, beside a calm run.")
    parser.add_argument("--folder", type=Path, help="Keep the runs here. Default: a temporary one.")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks/results/chaos.json")
    options = parser.parse_args(argv)
    kept = Kept.read(options.results)
    red: list[Outcome] = []
    if not options.table:
        with tempfile.TemporaryDirectory(prefix="chaos-", dir="/tmp") as temporary:
            folder = options.folder or Path(temporary)
            world = (
                World(folder, folder / "model", folder / "data") if (folder / "model").is_dir() else make_world(folder)
            )
            if options.soak:
                from tests.e2e.chaos.soak import soak

                return soak(world, options.soak)
            began = time.monotonic()
            for cells in runs_of(options, kept):
                if time.monotonic() - began > 60 * options.minutes:
                    break
                outcomes = ChaosRun(world, cells, light=options.light).outcomes()
                for one in outcomes:
                    print(f"{one.cell.name}: {one.what} {one.seconds:.0f} s {one.error} {one.remark}", flush=True)
                red += [one for one in outcomes if not one.is_good and one.what not in OPEN]
                kept.add(outcomes)
    options.results.with_suffix(".md").write_text(markdown(kept))
    print(summary(kept))
    return 1 if red else 0


def runs_of(options: argparse.Namespace, kept: Kept) -> Iterator[list[Cell]]:
    """Cells of each run."""
    if options.fast:
        yield FAST
        return
    only = options.only
    runs = [*([*one.cells] for one in campaigns()), *([cell] for cell in singles())]
    runs.sort(key=lambda cells: cells[0].mode != "sync")  # stable; synchronous ones first
    for cells in runs:
        chosen = [
            cell
            for cell in cells
            if (not only or any(all(word in cell.name for word in words) for words in only))
            and (not options.light or is_light(cell))
            and (not options.missing or kept.stands_for(cell) is None)  # late: an earlier run may have filled it
        ]
        if chosen:
            yield chosen


def make_world(folder: Path) -> World:
    """The tiny model and its data, made once."""
    world = World(folder, folder / "model", folder / "data")
    if world.model.is_dir() and world.data.is_dir():
        return world
    for script, *arguments in (
        ("make_tiny_model.py", str(folder / "model"), "--seed", "0"),
        ("make_tiny_data.py", "sort4", str(folder / "data")),
    ):
        subprocess.run([sys.executable, ROOT / "scripts" / script, *arguments], check=True, timeout=120)
    return world


if __name__ == "__main__":
    sys.exit(main())
