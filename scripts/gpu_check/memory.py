"""Memory in use while a run goes on, and its peak in each phase of the run."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import threading
import time
from pathlib import Path

import psutil

PERIOD_S = 0.1
#: What a process of ours calls itself.
_KINDS = {"trainer": "ray::TrainActor", "engine": "sglang::scheduler"}


class Meter:
    """Samples the fullest GPU's memory by nvidia-smi; without a GPU, the resident memory of this process's children."""

    def __init__(self, on_cuda: bool):
        self.what = "device memory" if on_cuda else "the run's host memory"
        self._on_cuda = on_cuda
        self._samples: list[tuple[float, int]] = []  # (unix seconds, bytes)
        self._processes: list[tuple[float, dict[str, int]]] = []  # unix seconds, kind of process -> bytes on a GPU
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> Meter:
        self._thread.start()
        return self

    def __exit__(self, *_) -> None:
        self._stop.set()
        self._thread.join(timeout=30)

    def peaks(self, trace: Path) -> dict[str, int]:
        """Phase -> most bytes in use during it, over all steps. Raises SystemExit without samples."""
        if not self._samples:
            raise SystemExit("nothing was measured: nvidia-smi gave no memory")
        return phase_peaks(self._samples, read_trace(trace))

    def peaks_of_processes(self, trace: Path, phase: str) -> dict[str, int]:
        """Kind of process -> most bytes on a GPU during a phase; nothing without a GPU."""
        events = [event for event in read_trace(trace) if event[0] == phase]
        kinds = {kind for _, held in self._processes for kind in held}
        rows = {kind: [(at, held.get(kind, 0)) for at, held in self._processes] for kind in sorted(kinds)}
        return {kind: peaks[phase] for kind, row in rows.items() if (peaks := phase_peaks(row, events))}

    def _sample(self) -> None:
        read = _gpu_bytes if self._on_cuda else _host_bytes
        while not self._stop.is_set():
            self._samples.append((time.time(), read()))
            if self._on_cuda:
                self._processes.append((time.time(), process_bytes(_listed_processes())))
            self._stop.wait(PERIOD_S)


def read_trace(path: Path) -> list[tuple[str, float, float]]:
    """(phase, start, end) in unix seconds of each event of a run's trace.json, which has no closing bracket."""
    events = json.loads(path.read_text(encoding="utf-8").rstrip().rstrip(",") + "]")
    return [(e["name"], e["args"]["time"], e["args"]["time"] + e["dur"] / 1e6) for e in events]


def phase_peaks(samples: list[tuple[float, int]], events: list[tuple[str, float, float]]) -> dict[str, int]:
    """Phase -> largest sample in it; a phase shorter than the period between samples takes the next one.

    Example: [(0, 5), (1, 9), (2, 7)] and [("train", .5, 1.5), ("sync", 1.6, 1.7)] -> {"train": 9, "sync": 7}
    """
    peaks: dict[str, int] = {}
    for name, start, end in events:
        inside = [value for at, value in samples if start <= at <= end]
        later = [value for at, value in samples if at > end][:1]
        for value in inside or later:
            peaks[name] = max(peaks.get(name, 0), value)
    return peaks


def process_bytes(lines: list[str]) -> dict[str, int]:
    """Bytes of the largest process of each kind, of nvidia-smi's "process name, MiB".

    Example: ["ray::TrainActor.train, 5072", "sglang::scheduler, 2440"] -> {"trainer": …, "engine": …}
    """
    held: dict[str, int] = {}
    for line in lines:
        name, _, mib = line.rpartition(",")
        kind = next((kind for kind, part in _KINDS.items() if part in name), None)
        if kind is not None and mib.strip().isdigit():
            held[kind] = max(held.get(kind, 0), int(mib) * 2**20)
    return held


def _listed_processes() -> list[str]:
    command = ["nvidia-smi", "--query-compute-apps=process_name,used_memory", "--format=csv,noheader,nounits"]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.splitlines()


def _gpu_bytes() -> int:
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    return max(int(line) for line in done.stdout.split()) * 2**20


def _host_bytes() -> int:
    total = 0
    for process in psutil.Process(os.getpid()).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            total += process.memory_info().rss
    return total
