"""What the files of a run directory say about it; whatever is missing, cut short or of another shape is left out."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slime_like.errors import DataError
from slime_like.utils.files import RunDirectory

#: Of a log only its end is read.
_TAIL_BYTES = 64 * 1024
#: What a process says when something goes wrong.
_TELLING = re.compile(
    r"Traceback|Error\b|\berror\b|Exception|\bfatal\b|\bkilled\b|SIG[A-Z]{3,}|No space left|[Oo]ut of memory"
    r"|Segmentation|\bCRITICAL\b|\bpanicked\b|timed? ?out",
)
#: Keys never stand in our logs; should one of a library's line hold one, it goes no further.
_SECRETS = re.compile(
    r"(?i)((?:api[-_ ]?key|token|authorization|bearer|secret|password)s?[\"']?\s*[:= ]\s*(?:bearer\s+)?[\"']?)"
    r"[^\s\"',;]{6,}"
)
_LONG_HEX = re.compile(r"\b[0-9a-fA-F]{32,}\b")
#: The router asks every 5 s: so many lines are of the last minute at most.
_RECENT = 10
#: Longest line that is shown.
_LINE = 200


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogEnd:
    """The end of one log. lines: the telling ones, else the last. telling: whether any is. at_work: whether it lately
    told of more than of questions for its health.
    """

    name: str
    modified: float
    lines: tuple[str, ...]
    telling: bool
    at_work: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Disk:
    """Room where the run writes."""

    path: str
    free_bytes: int
    total_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evidence:
    """Of one run directory. Times are unix seconds."""

    path: str
    began: float  # the last start of the run: config.json is written then
    num_rollout: int | None  # of the whole run
    num_done: int  # rollout steps that are over
    last_progress: tuple[str, float] | None  # what was done last, and when
    longest_gap_s: float  # between two signs of progress of this run, so far
    end: dict[str, Any] | None  # end.json: what the run said itself when it ended
    driver_pid: int | None
    checkpoints: tuple[int, ...]  # rollouts done, of each
    saves: bool
    logs: tuple[LogEnd, ...]  # the newest first
    disks: tuple[Disk, ...]
    config: dict[str, Any] = dataclasses.field(repr=False, default_factory=dict)


def gather(path: str) -> Evidence:
    """Read a run directory. Raises DataError if it is none."""
    run = RunDirectory(str(Path(path).resolve()))
    if not run.config.is_file():
        raise DataError(f"{path}: has no config.json, so no run began here. Fix: give the directory of a run.")
    config = _json(run.config)
    began = run.config.stat().st_mtime
    signs = sorted([*_metric_signs(run.metrics), *_trace_signs(run.trace)], key=lambda sign: sign[1])
    times = [time for _, time in signs if time >= began]
    gaps = [later - earlier for earlier, later in zip([began, *times], times, strict=False)]
    saves = _value(config, "checkpoint", "save")
    folder = Path(saves) if isinstance(saves, str) else run.checkpoints
    end = _json(Path(run.path) / "end.json")
    is_old = not end or not isinstance(end.get("time"), int | float) or end["time"] < began
    num_rollout = _value(config, "data", "num_rollout")
    return Evidence(
        path=run.path,
        began=began,
        num_rollout=num_rollout if isinstance(num_rollout, int) else None,
        num_done=max((line["step"] + 1 for line in _lines(run.metrics) if line.get("kind") == "step"), default=0),
        last_progress=signs[-1] if signs and signs[-1][1] >= began else None,
        longest_gap_s=max(gaps, default=0.0),
        end=None if is_old else end,
        driver_pid=_pid(Path(run.path) / ".lock"),
        checkpoints=tuple(sorted(_numbers(folder))),
        saves=bool(saves),
        logs=tuple(sorted(map(_log_end, run.logs.glob("*.log")), key=lambda log: -log.modified)),
        disks=tuple(_disks([run.path, str(folder), "/dev/shm", "/tmp"])),
        config=config,
    )


def without_secrets(line: str) -> str:
    """A line as it may be shown to others: what looks like a key is ***."""
    return _LONG_HEX.sub("***", _SECRETS.sub(r"\1***", line))


def _json(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(path.read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
    return {}


def _value(config: dict, group: str, name: str) -> Any:
    values = config.get(group)
    return values.get(name) if isinstance(values, dict) else None


def _lines(path: Path) -> Iterator[dict]:
    """The whole lines of a JSONL file that say a kind and a step."""
    if not path.is_file():
        return
    with path.open(encoding="utf-8", errors="replace") as file:
        for text in file:
            with contextlib.suppress(ValueError):
                line = json.loads(text)
                if isinstance(line, dict) and isinstance(line.get("step"), int):
                    yield line


def _metric_signs(path: Path) -> Iterator[tuple[str, float]]:
    for line in _lines(path):
        if isinstance(line.get("time"), int | float):
            yield f"the {line.get('kind')} line of step {line['step']} in metrics.jsonl", float(line["time"])


def _trace_signs(path: Path) -> Iterator[tuple[str, float]]:
    """When each phase ended."""
    if not path.is_file():
        return
    for text in path.read_text(encoding="utf-8", errors="replace").splitlines()[1:]:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            event = json.loads(text.rstrip().rstrip(","))
            step, start = event["args"]["step"], event["args"]["time"]
            yield f"{event['name']} of step {step}", start + event["dur"] / 1e6


def _pid(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        return int(path.read_text())
    return None


def _numbers(folder: Path) -> Iterator[int]:
    for path in folder.glob("iter_*"):
        with contextlib.suppress(ValueError):
            yield int(path.name.removeprefix("iter_"))


def _log_end(path: Path) -> LogEnd:
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _TAIL_BYTES))
        text = file.read().decode(errors="replace")
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    telling = [line for line in lines if _TELLING.search(line)]
    different = {
        re.sub(r"[0-9a-f]*[0-9][0-9a-f]*", "0", line): line for line in (telling or lines)
    }  # the last of a kind
    shown = tuple(without_secrets(line)[:_LINE] for line in list(different.values())[-3:])
    at_work = any("/health" not in line for line in lines[-_RECENT:])
    name, modified = f"logs/{path.name}", path.stat().st_mtime
    return LogEnd(name=name, modified=modified, lines=shown, telling=bool(telling), at_work=at_work)


def _disks(paths: list[str]) -> Iterator[Disk]:
    """Each file system once."""
    devices: set[int] = set()
    for path in paths:
        with contextlib.suppress(OSError):
            device, usage = Path(path).stat().st_dev, shutil.disk_usage(path)
            if device not in devices:
                devices.add(device)
                yield Disk(path=path, free_bytes=usage.free, total_bytes=usage.total)
