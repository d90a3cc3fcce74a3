"""Outcomes, kept from one call of scripts/chaos.sh to the next, and the table of all cells."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Sequence
from pathlib import Path

from slime_like.utils.files import write_atomic
from tests.e2e.chaos.cells import FAULTS, MODES, PHASES, WHOM, Cell, alike, all_cells, why_not
from tests.e2e.chaos.runs import OPEN, OUTLIVED, Outcome

_HEAD = """# The chaos matrix

`bash scripts/chaos.sh` puts each fault into a whole run (tiny model, real SGLang, Megatron, Ray on a CPU host): who,
when, in both modes.

- "recovers": the run ended with status 0, every step once, no prompt twice, weights proven, and the log-probs of what
  it trained on within 1e-4 of the trainer's (sync), or within the bound on staleness (async).
  Two exceptions: a step whose trainer was lost behind its save is not done again, and has no line of times; of a full
  disk of the driver's files, records that the run says are lost are not asked for.
- "ends": by a named error, with the seconds from the fault until every process was gone.
- "(scripted)": the loop, the rollout side, the fleet and its router are the real ones; two scripted engines, started
  again 2 s after they have died, and a scripted trainer stand for SGLang, Megatron and Ray.
- "outlives": the run went on, and a later fault ended it: what it did in all was not checked.
- "= cell": not run itself; the same code waits for the same thing there.

A slow part has a quarter of its time for 6 s; a stopped driver goes on after 12 s and a reward server after 4 s,
everybody else never; a killed reward server is started again after 2 s. Faults that a run outlives share one, a fault a
step: there `--max-engine-restarts`, `--max-router-restarts` and, for trainer ranks, `--max-trainer-restarts` are 100,
and a stopped engine, router or trainer rank is ended after a silence of 8 s (`--engine-hang-timeout-s`,
`--trainer-hang-timeout-s`). Deadlines of these runs are 20 s, 12 s where somebody is stopped for good, a start's 90 s
(`tests/e2e/chaos/runs.py`).
"""


@dataclasses.dataclass
class Kept:
    """Outcomes by cell, in a JSON file."""

    path: Path
    outcomes: dict[Cell, Outcome] = dataclasses.field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Kept:
        """What is kept; nothing if there is no file."""
        rows = json.loads(path.read_text()) if path.exists() else []
        outcomes = [Outcome(Cell(**row.pop("cell")), **{k: v for k, v in row.items() if k != "date"}) for row in rows]
        return cls(path, {outcome.cell: outcome for outcome in outcomes})

    def add(self, outcomes: Sequence[Outcome]) -> None:
        """Keep newer ones; one that was not struck takes nobody's place, nor a scripted one a real one's."""
        for outcome in outcomes:
            before = self.outcomes.get(outcome.cell)
            says_more = outcome.what not in OPEN
            if before is None or (says_more and (before.what in OPEN or before.light or not outcome.light)):
                self.outcomes[outcome.cell] = outcome
        rows = [dataclasses.asdict(outcome) for _, outcome in sorted(self.outcomes.items())]
        write_atomic(self.path, json.dumps(rows, indent=1) + "\n")

    def stands_for(self, cell: Cell) -> Outcome | None:
        """The outcome of a cell, or of one that is like it."""
        for one in (cell, *alike(cell)):
            if one in self.outcomes and self.outcomes[one].what not in OPEN:
                return self.outcomes[one]
        return None


def summary(kept: Kept) -> str:
    """One line of numbers."""
    cells = all_cells()
    sensible = [cell for cell in cells if not why_not(cell)]
    outcomes = [kept.stands_for(cell) for cell in sensible]
    good = sum(one is not None and one.is_good for one in outcomes)
    red = sum(one is not None and not one.is_good for one in outcomes)
    own = sum(cell in kept.outcomes and kept.outcomes[cell].what not in OPEN for cell in sensible)
    return (
        f"{len(cells)} cells, {len(cells) - len(sensible)} make no sense; of the other {len(sensible)}: {good} good,"
        f" {red} red, {len(sensible) - good - red} not run ({own} were run themselves)"
    )


def markdown(kept: Kept) -> str:
    """The whole table."""
    hosts = "; ".join(sorted({outcome.host for outcome in kept.outcomes.values()} - {""}))
    lines = [_HEAD, summary(kept) + f", {time.strftime('%Y-%m-%d')}, on {hosts}.", ""]
    reasons: list[str] = []
    for mode in MODES:
        for fault in FAULTS:
            lines += [
                f"## {fault}, {mode}",
                "",
                "| who | " + " | ".join(PHASES) + " |",
                "|---" * (len(PHASES) + 1) + "|",
            ]
            for whom in WHOM:
                row = [_text(kept, Cell(fault, whom, phase, mode), reasons) for phase in PHASES]
                lines.append(f"| {whom} | " + " | ".join(row) + " |")
            lines.append("")
    lines += ["A cell that makes no sense, and why:", ""]
    lines += [f"- —{number}: {reason}" for number, reason in enumerate(reasons, 1)]
    lines += ["", "What ended runs said, and what is red:", ""]
    for cell, outcome in sorted(kept.outcomes.items()):
        if outcome.what not in ("recovered", *OPEN):
            error = outcome.error.replace("|", "\\|")[:220]
            lines.append(f"- {cell.name}: {outcome.what} after {outcome.seconds:.0f} s: {error}")
    return "\n".join(lines) + "\n"


def _text(kept: Kept, cell: Cell, reasons: list[str]) -> str:
    if reason := why_not(cell):
        if reason not in reasons:
            reasons.append(reason)
        return f"—{reasons.index(reason) + 1}"
    outcome = kept.stands_for(cell)
    if outcome is None:
        return "outlives" if cell in kept.outcomes and kept.outcomes[cell].what == OUTLIVED else "not run"
    if outcome.cell != cell:
        other = outcome.cell
        place = other.phase if other.mode == cell.mode else f"{other.phase}, {other.mode}"
        return f"= {place}" if outcome.is_good else f"**= {place}**"
    text = {"recovered": "recovers", "ended": f"ends {outcome.seconds:.0f} s"}.get(outcome.what, f"**{outcome.what}**")
    return text + (" (scripted)" if outcome.light else "") + (" (late)" if outcome.remark else "")
