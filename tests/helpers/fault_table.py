"""The table of faults: one row for each that was put into a weight sync."""

from __future__ import annotations

import collections
import dataclasses

import pytest


@dataclasses.dataclass(frozen=True)
class Row:
    """A fault, where it was put, and what came of it."""

    fault: str
    where: str
    transport: str
    model: str
    caught: bool  # named, within the deadline, before a sample was generated; and the next sync, or the end, was clean
    seconds: float
    message: str


ROWS = pytest.StashKey[list[Row]]()


def as_text(rows: list[Row]) -> str:
    """One line a fault and place, a column a transport and model; then how many were caught."""
    columns = sorted({(row.model, row.transport) for row in rows})
    cells: dict[tuple[str, str], dict] = collections.defaultdict(dict)
    for row in rows:
        cells[row.fault, row.where][row.model, row.transport] = (
            f"{'caught' if row.caught else 'MISSED'} {row.seconds:.1f} s"
        )
    width = [max(len(" ".join(column)), 13) for column in columns]
    lines = [
        "  ".join(
            [f"{'fault':32}{'put':14}", *(" ".join(column).ljust(w) for column, w in zip(columns, width, strict=True))]
        )
    ]
    for (fault, where), outcomes in cells.items():
        lines.append(
            "  ".join(
                [
                    f"{fault:32}{where:14}",
                    *(outcomes.get(column, "-").ljust(w) for column, w in zip(columns, width, strict=True)),
                ]
            )
        )
    caught = sum(row.caught for row in rows)
    lines.append(
        f"{caught} of {len(rows)} caught ({100 * caught / len(rows):.0f} %), the slowest in"
        f" {max(row.seconds for row in rows):.1f} s"
    )
    return "\n".join(lines) + "\n"
