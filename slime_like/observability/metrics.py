"""Metrics: one JSON line each time, TensorBoard beside it, and the seconds of each phase."""

from __future__ import annotations

import contextlib
import json
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from slime_like.observability.progress import Progress
from slime_like.observability.tracing import PhaseTrace
from slime_like.utils.files import RunDirectory, append_json_line, read_json_lines, write_atomic

KINDS = ("start", "rollout", "train", "sync", "eval", "step")


def json_metrics(metrics: Mapping[str, float | str]) -> dict:
    """The metrics as JSON can hold them: NaN and infinity become null, named under "non_finite".

    Example: {"train/loss": nan} -> {"train/loss": None, "non_finite": {"train/loss": "nan"}}
    """
    line: dict[str, Any] = {}
    non_finite = {}
    for name, value in metrics.items():
        line[name] = value if isinstance(value, str) else _number(name, value)
        if isinstance(line[name], float) and not math.isfinite(line[name]):
            non_finite[name] = str(line[name])
            line[name] = None
    return line | ({"non_finite": non_finite} if non_finite else {})


def forget_from(path: Path, num_done: int) -> None:
    """Leave in a metrics file what a run that goes on after `num_done` rollouts will not do again: their own lines, and
    "start".

    The weights and the evaluation after the last of them come again.
    """
    if path.exists():
        lines = [line for line in read_json_lines(path) if line["kind"] == "start" or line["step"] < num_done]
        write_atomic(path, "".join(json.dumps(line) + "\n" for line in lines))


def ends_with_step(path: Path, step: int) -> bool:
    """Whether the last that a metrics file tells is that this step is over."""
    lines = [line for line in read_json_lines(path) if line["kind"] != "start"] if path.exists() else []
    return bool(lines) and (lines[-1]["kind"], lines[-1]["step"]) == ("step", step)


class MetricsLog:
    """Where the run's metrics go: metrics.jsonl, and TensorBoard if asked for. Use in one process only."""

    def __init__(self, run_dir: RunDirectory, tensorboard: bool):
        self.run_dir = run_dir
        self._tensorboard = tensorboard
        self._writer: Any = None  # opened at the first metric: starting must not wait for the import

    def log(self, kind: str, step: int, metrics: Mapping[str, float | str]) -> None:
        """Write one line. kind: one of KINDS. Text values (a digest) go to the JSON line only."""
        if kind not in KINDS:
            raise ValueError(f"kind {kind!r} is unknown. Known: {', '.join(KINDS)}")
        now = time.time()
        append_json_line(self.run_dir.metrics, {"kind": kind, "step": step, "time": now} | json_metrics(metrics))
        if self._tensorboard:
            self._write_events(
                step, now, {name: value for name, value in metrics.items() if not isinstance(value, str)}
            )

    def close(self) -> None:
        """Flush and close; may be called twice."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def _write_events(self, step: int, now: float, metrics: Mapping[str, float]) -> None:
        # The event writer of the tensorboard package itself: torch's wrapper would pull in torch.
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if self._writer is None:
            self._writer = EventFileWriter(str(self.run_dir.tensorboard))
        values = [Summary.Value(tag=name, simple_value=float(value)) for name, value in metrics.items()]
        self._writer.add_event(Event(wall_time=now, step=step, summary=Summary(value=values)))
        self._writer.flush()


@contextlib.contextmanager
def timed(seconds: dict[str, float], part: str) -> Iterator[None]:
    """Write the time inside the block into `seconds`, also when it raises."""
    start = time.monotonic()
    try:
        yield
    finally:
        seconds[part] = round(time.monotonic() - start, 3)


class PhaseTimers:
    """Seconds of each phase of one step.

    Phases may overlap, also from several threads: generating the next rollout while training this one.
    Example: with timers.phase("generate"): …;  timers.finish_step() -> {"step/seconds": 3.1, "step/generate_seconds":
    1.2, …}
    """

    #: What a step is for; the time in which none of it runs is overhead.
    WORK = ("generate", "train", "sync")

    def __init__(
        self,
        trace: PhaseTrace | None = None,
        step: int = 0,
        *,
        clock: Callable[[], float] = time.monotonic,
        progress: Progress | None = None,
    ):
        """progress: hears which phase of the step runs."""
        self._trace, self._step, self._clock = trace, step, clock
        self._progress = progress or Progress()
        self._progress.begin_step(step)
        self._spans: dict[str, list[tuple[float, float]]] = {}
        self._lock = threading.Lock()
        self._start = clock()

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time inside the block to the phase, also when it raises."""
        start = self._clock()
        try:
            with self._progress.phase_of(name):
                yield
        finally:
            end = self._clock()
            with self._lock:
                self._spans.setdefault(name, []).append((start, end))
            if self._trace is not None:
                self._trace.add(name, start, end, self._step)

    def seconds(self, name: str) -> float:
        """Seconds spent in the phase during this step; 0 if it did not run."""
        return sum(end - start for start, end in self._spans.get(name, ()))

    def finish_step(self) -> dict[str, float]:
        """Metrics of the step that ends now, and start the next.

        Phases outside WORK (save, eval) count as overhead too.
        """
        with self._lock:
            now = self._clock()
            total = now - self._start
            metrics = {f"step/{name}_seconds": self.seconds(name) for name in self._spans}
            work = [span for name in self.WORK for span in self._spans.get(name, ())]
            metrics["step/seconds"] = total
            metrics["step/overhead_seconds"] = total - covered_seconds(work)
            self._spans, self._start = {}, now
        return metrics


def covered_seconds(spans: Iterable[tuple[float, float]]) -> float:
    """Seconds in which at least one of the spans (start, end) runs. Example: [(0, 2), (1, 3), (5, 6)] -> 4."""
    total, reached = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _number(name: str, value) -> float | int:
    """A plain number from Python, NumPy or a 0-d tensor."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"metric {name!r} is a {type(value).__name__}, not a number: {value!r}")
    return value
