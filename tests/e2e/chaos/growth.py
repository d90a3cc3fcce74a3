"""What processes of a run hold over their time: memory, open files, and the run's shared memory."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

#: What may be added from the second quarter of a process's time to the last, to the least that it holds then (what it
#: holds while it works comes and goes): of resident memory, of shared memory, of open files.
GROWTH, MORE_BYTES, MORE_SHARED, MORE_FILES = 0.05, 24 << 20, 4 << 20, 12
#: Of a process that is begun under way, before its time counts: on a busy host it imports and warms up for so long.
WARM_S = 150.0
#: Looks of a process, below which nothing is said of it.
FEWEST = 20
#: Counted time below which a life is shown and not judged: a trainer's heaps are at their size after some 200 steps,
#: and idle connections of a router come and go for longer than a quarter of a short life.
SETTLED_S = 300.0
#: Ray's monitor of logs holds two files of each worker that has died, and closes them when it has 200 in all.
FILES_OF = {"log_monitor.py": 200}


@dataclasses.dataclass(frozen=True)
class Growth:
    """What there was early, and what was added until late."""

    resident: float
    shared: float
    more_resident: float
    more_shared: float
    more_files: float
    seconds: float
    files_bound: int = MORE_FILES

    @property
    def is_too_much(self) -> bool:
        """Above a bound."""
        return self.seconds >= SETTLED_S and (
            self.more_resident > GROWTH * self.resident + MORE_BYTES
            or self.more_shared > GROWTH * self.shared + MORE_SHARED
            or self.more_files > self.files_bound
        )


@dataclasses.dataclass
class Life:
    """A process over its time. samples: (seconds, resident bytes, of them shared, open files). counts_from: seconds."""

    name: str
    counts_from: float = 0.0
    samples: list[tuple[float, int, int, int]] = dataclasses.field(default_factory=list)

    def growth(self) -> Growth | None:
        """From the second quarter to the last; None of a short life."""
        samples = [row for row in self.samples if row[0] >= self.counts_from]
        quarter = len(samples) // 4
        if len(samples) < FEWEST:
            return None
        early, late = samples[quarter : 2 * quarter], samples[-quarter:]
        least = [[min(row[column] for row in part) for column in (1, 2, 3)] for part in (early, late)]
        more = [late - early for early, late in zip(*least, strict=True)]
        return Growth(*least[0][:2], *more, samples[-1][0] - samples[0][0], FILES_OF.get(self.name, MORE_FILES))

    def grows(self) -> bool:
        """Whether it does not stay flat."""
        growth = self.growth()
        return growth is not None and growth.is_too_much


class Lives:
    """Every process of a run, and its shared memory as a whole."""

    def __init__(self, supervisor: int, shared: Path):
        """shared: where the run's own /dev/shm is mounted."""
        self._supervisor, self._shared, self._of = supervisor, shared, {0: Life("shared memory of all")}

    def look(self) -> None:
        """One sample of each."""
        now = time.monotonic()
        total, num_files = shared_memory(self._shared)
        self._of[0].samples.append((now, total, total, num_files))
        try:
            supervisor = psutil.Process(self._supervisor)
            family = [supervisor, *supervisor.children(recursive=True)]
        except psutil.Error:
            return
        for process in family:
            try:
                memory, files, name = process.memory_info(), process.num_fds(), named(process.cmdline())
            except psutil.Error:
                continue
            life = self._of.setdefault(process.pid, Life(name, now + WARM_S if self._of[0].samples[1:] else now))
            life.name = name or life.name
            life.samples.append((now, memory.rss, memory.shared, files))

    def __iter__(self) -> Iterator[Life]:
        """The longest first."""
        return iter(sorted(self._of.values(), key=lambda life: -len(life.samples)))


def shared_memory(folder: Path) -> tuple[int, int]:
    """(bytes in use, those of deleted files too; files) of a file system."""
    info = os.statvfs(folder)
    return (info.f_blocks - info.f_bfree) * info.f_frsize, len(files_in(folder))


def files_in(folder: Path) -> list[str]:
    """Paths within it."""
    return sorted(os.path.join(at, name) for at, _, names in os.walk(folder) for name in names)


def named(line: list[str]) -> str:
    """A short name by a command line: a title, a module, or a script."""
    words = " ".join(line).split()
    if not words:
        return ""
    if "::" in words[0]:
        return words[0].partition(".")[0]
    if "-m" in words[1:-1]:
        return words[words.index("-m") + 1]
    scripts = [word for word in words[1:] if word.endswith(".py")]
    return os.path.basename((scripts or words)[0])
