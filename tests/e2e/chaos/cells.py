"""The matrix as data: its cells, which of them make no sense and why, and which go the same way through the code."""

from __future__ import annotations

import collections
import dataclasses

FAULTS = ("kill", "stall", "slow", "corrupt reply", "full disk")
WHOM = ("engine", "router", "trainer", "driver", "reward", "node")
PHASES = ("start", "generate", "score", "train", "sync", "save", "eval")
MODES = ("sync", "async")
#: Which phase of a fault that ends runs comes first, where there is not time for all.
_MOST_TELLING = ("train", "save", "sync", "generate", "start", "score", "eval")


@dataclasses.dataclass(frozen=True, order=True)
class Cell:
    """One fault, of one part, in one phase, in one mode."""

    fault: str
    whom: str
    phase: str
    mode: str

    @property
    def name(self) -> str:
        """Example: "kill engine at sync, async"."""
        return f"{self.fault} {self.whom} at {self.phase}, {self.mode}"


def all_cells() -> list[Cell]:
    """Every one, in the table's order."""
    return [Cell(f, w, p, m) for m in MODES for f in FAULTS for w in WHOM for p in PHASES]


def why_not(cell: Cell) -> str:
    """Why a cell makes no sense; "" if it does."""
    if cell.whom == "reward" and cell.phase not in ("score", "eval"):
        return "nobody asks it then"
    return {"corrupt reply": _why_no_reply, "full disk": _why_no_disk}.get(cell.fault, lambda _: "")(cell)


def _why_no_reply(cell: Cell) -> str:
    if cell.whom == "driver":
        return "it asks, and answers nobody"
    if cell.whom == "node":
        return "Ray's own protocol"
    if cell.whom == "trainer":
        return "" if cell.phase == "sync" else "its reply is no data that others use"
    if cell.whom == "router" and cell.phase == "sync":
        return "engines are asked directly"
    if cell.whom in ("engine", "router") and cell.phase not in ("generate", "eval", "sync"):
        return "nobody asks it for data then"
    return ""


def _why_no_disk(cell: Cell) -> str:
    if cell.whom == "reward":
        return "it writes nothing of the run"
    if cell.whom in ("engine", "router"):
        return "its log lies with the driver's files: see there"
    if cell.whom == "trainer" and cell.phase not in ("sync", "save"):
        return "it writes nothing then"
    return ""


def alike(cell: Cell) -> list[Cell]:
    """Cells that stand for this one where it was not run itself: the same code waits for the same thing."""
    others = []
    if cell.whom in ("router", "trainer", "node", "driver") and cell.phase in ("score", "eval"):
        # RolloutManager._wait with one watch, whatever the rollout side just does
        others.append(dataclasses.replace(cell, phase="generate"))
    if cell.whom in ("engine", "router") and cell.phase == "score":
        others.append(dataclasses.replace(cell, phase="generate"))  # other requests are under way
    if cell.mode == "async" and cell.phase in ("start", "save"):
        others.append(dataclasses.replace(cell, mode="sync"))  # nothing is begun ahead then, or the call is the same
    if cell.whom == "driver" and cell.fault in ("kill", "stall"):
        # the supervisor's wait, which knows no phases
        others += [dataclasses.replace(cell, phase=phase) for phase in PHASES if phase != cell.phase]
    return others


def is_light(cell: Cell) -> bool:
    """Whether scripted engines show it as well (light.py): nothing of it is inside Ray, the trainer or SGLang."""
    if cell.whom in ("trainer", "node") or cell.fault == "full disk":
        return False
    return (cell.fault, cell.phase) != ("corrupt reply", "sync")


@dataclasses.dataclass(frozen=True)
class Campaign:
    """Faults that a run is to outlive, put into it one after the other, one a step."""

    name: str
    cells: tuple[Cell, ...]


def campaigns(most: int = 60) -> list[Campaign]:
    """One run each, of so many faults at most: starts are what takes time."""
    outlived = [cell for cell in all_cells() if not why_not(cell) and _is_outlived(cell)]
    runs = []
    for mode in MODES:
        for kind in ("brief", "kill", "stall", "kill trainer", "stall trainer"):
            cells = [cell for cell in outlived if cell.mode == mode and _kind(cell) == kind]
            cells.sort(key=lambda cell: PHASES.index(cell.phase))
            for number, start in enumerate(range(0, len(cells), most), 1):
                runs.append(Campaign(f"{kind} {number}, {mode}", tuple(cells[start : start + most])))
    return runs


def _kind(cell: Cell) -> str:
    """Which cells share a run: those that need the same flags."""
    if cell.fault in ("slow", "corrupt reply"):
        return "brief"
    return f"{cell.fault} trainer" if cell.whom == "trainer" else cell.fault


def singles() -> list[Cell]:
    """Cells that a run need not outlive: one run each. Each fault of each part once before any a second time; those
    that others stand for last.
    """
    cells = [cell for cell in all_cells() if not why_not(cell) and not _is_outlived(cell)]
    cells.sort(key=lambda cell: _MOST_TELLING.index(cell.phase))
    before: collections.Counter = collections.Counter()
    turn = {}
    for cell in cells:
        kind = (cell.fault, cell.whom, cell.mode)
        turn[cell] = (bool(alike(cell)), before[kind])
        before[kind] += 1
    return sorted(cells, key=lambda cell: turn[cell])


def _is_outlived(cell: Cell) -> bool:
    if cell.fault == "slow":
        return True
    if cell.phase == "start":
        return False
    if cell.fault == "kill":
        return cell.whom in ("engine", "router", "trainer")  # a reward server may be away for longer than the retries
    if cell.fault == "stall":
        return cell.whom != "node"
    return cell.fault == "corrupt reply" and cell.phase != "sync" and cell.whom != "reward"
