"""What a rung answers with."""

from __future__ import annotations

import dataclasses

from ladder import Check


@dataclasses.dataclass(frozen=True)
class Answer:
    """summary: one line; where: "cuda", "the CPU" or "a pretended device"; numbers: name -> value, for the page."""

    summary: str
    where: str
    numbers: dict
    checks: list[Check]

    def as_json(self) -> dict:
        """What ladder.judge reads."""
        return dataclasses.asdict(self)


def at_most(what: str, value: float, limit: float) -> Check:
    """A number that must not be larger."""
    return Check(what=what, value=float(value), sign="<=", limit=float(limit))


def at_least(what: str, value: float, limit: float) -> Check:
    """A number that must not be smaller."""
    return Check(what=what, value=float(value), sign=">=", limit=float(limit))
