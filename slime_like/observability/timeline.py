"""Who did what when, of a run, as lines of text: `python -m slime_like.observability.timeline RUN_DIR [--steps 3-8]`.

    engines generate |0000000000    111111111      222|  5.1 s  64 %
    trainer trains   |          00           11       |  0.9 s  11 %

Each column is the same stretch of time, and shows the last digit of the step that it belongs to, where that took at
least half of it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from slime_like.config.bounds import bounded
from slime_like.errors import DataError, UserError
from slime_like.observability.metrics import covered_seconds
from slime_like.utils.files import RunDirectory

#: Steps that are drawn where none are asked for: the last.
_STEPS = 6
#: Phase in trace.json -> line. Engines that work beside the trainer have a phase of their own (PhaseTrace.add).
_BESIDE = "engines generate"
_LINES = {"train": "trainer trains", "sync": "sync", "save": "save", "eval": "evaluate"}


@dataclasses.dataclass(frozen=True)
class Span:
    """One event of trace.json, in seconds."""

    phase: str
    start: float
    end: float
    step: int


def read_spans(path: Path) -> list[Span]:
    """All events; of a run that goes on or was killed, too. Raises DataError where the file is no trace."""
    if not path.is_file():
        raise DataError(f"{path}: no such file. Fix: give the directory of a run.")
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    spans = []
    for number, line in enumerate(lines[1:], 2):
        if not line.endswith("\n"):
            continue  # a write cut short
        try:
            event = json.loads(line.rstrip().rstrip(","))
            start = event["ts"] / 1e6
            spans.append(Span(event["name"], start, start + event["dur"] / 1e6, event["args"]["step"]))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}:{number}: not an event of a run's trace ({error!r}).") from error
    return spans


def timeline(spans: Sequence[Span], steps: tuple[int, int] | None = None, width: int = 110) -> list[str]:
    """Lines of text: one for each phase, over these steps (first and last) or the last few.

    The time goes from the first thing that the trainer did in the first step to the last in the last one; what began
    before or ended after is cut. Raises DataError where a step has no event.
    """
    trainer = [span for span in spans if span.phase != _BESIDE]
    known = sorted({span.step for span in trainer})
    if not known:
        raise DataError("the trace has no event yet.")
    first, last = steps or (max(known[0], known[-1] - _STEPS + 1), known[-1])
    if first not in known or last not in known or first > last:
        raise DataError(f"--steps {first}-{last}: the trace has steps {known[0]} to {known[-1]}.")
    inside = [span for span in trainer if first <= span.step <= last]
    begin, end = min(span.start for span in inside), max(span.end for span in inside)
    by_line: dict[str, list[Span]] = {}
    for span in spans:
        if span.end > begin and span.start < end:
            cut = dataclasses.replace(span, start=max(span.start, begin), end=min(span.end, end))
            by_line.setdefault(span.phase, []).append(cut)
    is_beside = _BESIDE in by_line
    names = {_BESIDE: _BESIDE, "generate": "trainer waits" if is_beside else _BESIDE} | _LINES
    order = [phase for phase in names if phase in by_line] + sorted(set(by_line) - set(names))
    indent = max(len(names.get(phase, phase)) for phase in order)
    rows = []
    for phase in order:
        seconds = covered_seconds([(span.start, span.end) for span in by_line[phase]])
        cells = _cells(by_line[phase], begin, (end - begin) / width, width)
        share = seconds / (end - begin)
        rows.append(f"{names.get(phase, phase):<{indent}} |{cells}| {seconds:5.2f} s {share:5.0%}")
    which = f"step {first}" if first == last else f"steps {first} to {last}"
    return [f"{which}: {end - begin:.2f} s, {(end - begin) / width:.3f} s a column", *rows]


def _cells(spans: Sequence[Span], begin: float, column_s: float, width: int) -> str:
    """A column is its span's, where the span takes half of it; a span that is shorter than that has the one it begins
    in, unless that is another's.
    """
    cells = [" "] * width
    for span in spans:
        low, high = (span.start - begin) / column_s, (span.end - begin) / column_s
        columns = range(round(low), round(high)) or range(int(low), int(low) + 1)
        for column in columns:
            if column < width and (len(columns) > 1 or cells[column] == " "):
                cells[column] = str(span.step % 10)
    return "".join(cells)


def _steps(text: str) -> tuple[int, int]:
    first, _, last = text.partition("-")
    return int(first), int(last or first)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the timeline of the run directory named on the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m slime_like.observability.timeline", description="Who did what when, of a run, as text."
    )
    parser.add_argument("run_dir", help="Directory of a run, with trace.json.")
    parser.add_argument("--steps", type=_steps, metavar="FIRST-LAST", help=f"Which; the last {_STEPS} by default.")
    parser.add_argument("--width", type=bounded(int, least=10, most=10_000), default=110, help="Columns; at least 10.")
    options = parser.parse_args(argv)
    try:
        print("\n".join(timeline(read_spans(RunDirectory(options.run_dir).trace), options.steps, options.width)))
    except UserError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
