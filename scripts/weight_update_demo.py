"""Times every way of giving new weights to a running SGLang engine, on one model, each against what the host could do
at best.

usage: weight_update_demo.py [--size-mb 64] [--tp 1] [--methods ipc,broadcast,disk,delta,inline] [--repeats 5] [--output
runs/weight-update-demo.png]

A model of about that size is made from a seed, a real engine serves it on loopback, and each method sends it other
weights, again and again: before each, every value moves by 1e-5, as in a step of Adam with that learning rate; delta
sends what became of the weights since it sent them last. Every sync is proven by digests that the engine computes of
what it then holds. Bounds are measured in between. Prints a table and draws a picture; OUTPUT with .json instead of
.png holds the numbers. Under a minute on a CPU host.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # trainer and engine share the cores
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "lib")]

import psutil  # noqa: E402 - after the paths and the number of threads are set
import torch  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402
from sync_bounds import BOUND_OF, BOUNDS, BoundMeter  # noqa: E402
from sync_model import SMALLEST_BYTES, Shape, make_weights, serving, write_model  # noqa: E402
from sync_timing import InlinePublisher, Recorder, SyncTimes, medians, timed_sync  # noqa: E402

from slime_like.config.hf_model import model_from_hf, read_hf_config  # noqa: E402
from slime_like.config.model import ModelConfig  # noqa: E402
from slime_like.errors import SlimeLikeError  # noqa: E402
from slime_like.records import EngineEndpoint, WeightsRef  # noqa: E402
from slime_like.sglang_backend.client import EngineClient  # noqa: E402
from slime_like.weight_sync.buckets import WeightPublisher  # noqa: E402
from slime_like.weight_sync.delta.receiver_client import start_receiver  # noqa: E402
from slime_like.weight_sync.proof.receipt import Receipt  # noqa: E402
from slime_like.weight_sync.session import EngineSide, PublishOrder  # noqa: E402
from slime_like.weight_sync.transports.registry import PublisherOptions, make_publisher  # noqa: E402

#: Name -> its publisher, and what it does in a line.
METHODS: dict[str, tuple[Callable[[PublisherOptions], WeightPublisher], str]] = {
    "ipc": (make_publisher, "through shared memory"),
    "broadcast": (make_publisher, "over a process group (gloo)"),
    "disk": (make_publisher, "through a folder"),
    "delta": (make_publisher, "differences to a receiver beside the engine, which loads its folder"),
    "inline": (InlinePublisher, "base64 inside HTTP requests"),
}
DEFAULT_OUTPUT = ROOT / "runs" / "weight-update-demo.png"
TIMEOUT_S = 120.0
MEGABYTE = 10**6
#: Copies of the model that live at once at worst: source and its changes, engine while it loads, buckets, a bound's two
#: arrays and its receiver.
COPIES = 8
#: By how much each value changes between two syncs.
CHANGE = 1e-5


@dataclass(frozen=True)
class Row:
    """What one method took: the median of each part, each repeat's whole sync, and the bound."""

    method: str
    times: SyncTimes
    totals_s: tuple[float, ...]
    num_bytes: int
    #: what left the source: the weights as often as they are sent or written, and the bodies of all requests
    moved_bytes: float
    bound_s: float

    @property
    def share(self) -> float:
        """Of the bound that was reached by the transfer; 1 is perfect."""
        return self.bound_s / self.times.transfer_s

    def to_dict(self) -> dict:
        """For the JSON file."""
        more = {
            "share_of_bound": self.share,
            "overhead_s": self.times.transfer_s - self.bound_s,
            "bound": BOUND_OF[self.method],
        }
        return dataclasses.asdict(self) | {"total_s": self.times.total_s, "transfer_s": self.times.transfer_s} | more


class Trainer:
    """The sending side: the weights of a model, and a publisher for each method."""

    def __init__(self, folder: Path, shape: Shape, args: argparse.Namespace):
        self.weights = make_weights(shape, seed=1)
        self._change = {
            name: torch.full_like(tensor, CHANGE).copysign_(torch.randn_like(tensor))
            for name, tensor in self.weights.items()
        }
        self._folder, self._args, self._version = folder, args, 0
        self._publishers: dict[str, WeightPublisher] = {}

    def connect(self, endpoint: EngineEndpoint) -> None:
        """Meet the engine, by every method."""
        self._model = model_from_hf(read_hf_config(str(self._folder / "model")), ModelConfig())
        self._client = EngineClient(endpoint, timeout_s=TIMEOUT_S)
        for method in self._args.methods:
            directory = str(self._folder / f"sync-{method}")
            options = PublisherOptions(
                method, (endpoint,), 0, 1, self._args.bucket_mb * MEGABYTE, TIMEOUT_S, directory, "127.0.0.1"
            )
            self._publishers[method] = METHODS[method][0](options)
            self._publishers[method].connect()

    def sync(self, method: str) -> tuple[SyncTimes, float]:
        """One whole sync of weights that changed, with its receipt; and the bytes that left for it.

        Raises WeightSyncError if the engine does not hold what was sent.
        """
        self._version += 1
        for name, tensor in self.weights.items():
            tensor.add_(self._change[name])
        version, publisher = self._version, self._publishers[method]
        receipt, reports = Receipt(self._model, [self._client], "weight_update_demo"), []

        def send(recorder: Recorder) -> None:
            publisher.begin(version)
            reports.append(
                publisher.send(receipt.watching(recorder.timed(self.weights.items(), "source")), version, receipt)
            )
            publisher.finish(version)

        def verify() -> None:
            if receipt.verify(TIMEOUT_S) != 1 or receipt.unknown:
                raise SystemExit(
                    f"weight_update_demo: not everything was proven: {receipt.not_compared or receipt.unknown}"
                )

        # With inline as with ipc nothing is left for the engine to load at the end.
        order = PublishOrder(
            weights=WeightsRef(version=version),
            endpoints=(self._client.endpoint,),
            transport="ipc" if method == "inline" else method,
            timeout_s=TIMEOUT_S,
            directory=str(self._folder / f"sync-{method}"),
        )
        times = timed_sync(EngineSide(order), send, verify)
        (report,) = reports
        copies = {"broadcast": self._args.tp, "inline": 0}.get(method, 1)
        return times, times.http_bytes + (report.delta.num_bytes if report.delta else copies * report.num_bytes)

    def close(self) -> None:
        """Leave the engine."""
        for publisher in self._publishers.values():
            publisher.close()


def measure(args: argparse.Namespace) -> tuple[Shape, list[Row], dict[str, float]]:
    """All methods in turn, once to warm up and then `repeats` times; with the medians of the bounds."""
    shape = Shape.of_bytes(args.size_mb * MEGABYTE)
    timings: dict[str, list[tuple[SyncTimes, float]]] = {method: [] for method in args.methods}
    bounds: dict[str, list[float]] = {name: [] for name in BOUNDS}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weight-update-demo-")))
        trainer = Trainer(folder, shape, args)
        write_model(folder / "model", shape, trainer.weights)
        meter = BoundMeter(shape.num_bytes, folder)
        print(
            f"starting an engine of {args.tp} rank{'s' if args.tp > 1 else ''} with {shape.num_bytes / MEGABYTE:.1f} MB"
            " of weights …",
            flush=True,
        )
        engine = stack.enter_context(
            serving(folder / "model", tp=args.tp, log_path=folder / "engine.log", timeout_s=TIMEOUT_S)
        )
        endpoint = engine.endpoint
        if "delta" in args.methods:
            receiver = start_receiver(
                str(folder / "receiver"), log_path=str(folder / "receiver.log"), timeout_s=TIMEOUT_S
            )
            stack.callback(receiver.close)
            endpoint = dataclasses.replace(endpoint, receiver_url=receiver.url, receiver_key=receiver.key)
        stack.callback(trainer.close)
        trainer.connect(endpoint)
        for repeat in range(args.repeats + 1):
            bound = meter.measure()
            once = {method: trainer.sync(method) for method in args.methods}
            if repeat:
                for method, result in once.items():
                    timings[method].append(result)
                for name, seconds in bound.items():
                    bounds[name].append(seconds)
    at_best = {name: statistics.median(seconds) for name, seconds in bounds.items()}
    rows = []
    for method, results in timings.items():
        times, moved = zip(*results, strict=True)
        totals = tuple(one.total_s for one in times)
        rows.append(
            Row(method, medians(times), totals, shape.num_bytes, statistics.median(moved), at_best[BOUND_OF[method]])
        )
    return shape, rows, at_best


def print_table(shape: Shape, rows: list[Row], bounds: dict[str, float], tp: int) -> None:
    """The numbers, for a terminal."""
    size = shape.num_bytes
    print(f"{size / MEGABYTE:.1f} MB of weights into an engine of {tp} rank{'s' if tp > 1 else ''}; medians, seconds")
    table = Table()
    for title in (
        "method",
        "sync",
        "least-most",
        "pause+end",
        "send",
        "load",
        "check",
        "MB/s",
        "moved",
        "bound",
        "overhead",
        "of bound",
    ):
        table.add_column(title, justify="left" if title == "method" else "right", no_wrap=True)
    for row in sorted(rows, key=lambda row: row.times.total_s):
        times = row.times
        table.add_row(
            row.method, f"{times.total_s:.3f}", f"{min(row.totals_s):.3f}-{max(row.totals_s):.3f}",
            f"{times.begin_s + times.finish_s:.3f}",
            f"{times.send_s:.3f}", f"{times.load_s:.3f}", f"{times.receipt_s + times.verify_s:.3f}",
            f"{size / times.transfer_s / MEGABYTE:.0f}",
            f"{row.moved_bytes / size:.2f} x", f"{row.bound_s:.3f}", f"{times.transfer_s - row.bound_s:.3f}",
            f"{row.share:.0%}",
        )  # fmt: skip
    Console(width=max(120, Console().width)).print(table)
    print(
        "bounds, measured between the syncs: "
        + ", ".join(f"{name} {size / s / 1e9:.2f} GB/s" for name, s in bounds.items())
    )
    print(
        "check: the receipt's digests, those of the source included in send. moved: what crossed a file, a socket or"
        " HTTP, in sizes of the model."
    )
    for method in (row.method for row in rows):
        print(f"  {method:<10} {METHODS[method][1]}; bound: {BOUND_OF[method]}")


def draw(path: Path, shape: Shape, rows: list[Row]) -> None:
    """Bars of the phases of each method, its bound as a line across, and the share of the bound."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 1.6 + 0.7 * len(rows)), layout="constrained")
    seconds, shares = figure.subplots(1, 2, width_ratios=(3, 1), sharey=True)
    ordered = sorted(rows, key=lambda row: -row.times.total_s)
    names = [row.method for row in ordered]
    left = [0.0] * len(rows)
    for part, label in (
        ("begin_s", "pause"),
        ("send_s", "send"),
        ("load_s", "load"),
        ("verify_s", "check"),
        ("finish_s", "continue"),
    ):
        widths = [getattr(row.times, part) for row in ordered]
        seconds.barh(names, widths, left=left, label=label)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for place, row in enumerate(ordered):
        start = row.times.begin_s
        seconds.plot(
            [start, start + row.bound_s],
            [place, place],
            color="black",
            linewidth=3,
            label="bound of send and load" if place == 0 else None,
        )
    seconds.set_xlabel("seconds")
    seconds.set_title(f"one weight sync of {shape.num_bytes / MEGABYTE:.0f} MB")
    seconds.legend()
    bars = shares.barh(names, [100 * row.share for row in ordered], color="grey")
    shares.bar_label(bars, fmt="%.0f %%")
    shares.set_xlim(0, 115)
    shares.set_xlabel("% of the bound")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line; ends with status 2 and every problem."""
    parser = argparse.ArgumentParser(
        prog="weight_update_demo.py", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    parser.add_argument("--size-mb", type=float, default=64.0, help="Megabytes of fp32 weights, about.")
    parser.add_argument("--tp", type=int, default=1, help="Tensor parallel ranks of the engine.")
    parser.add_argument(
        "--methods", default=",".join(METHODS), help=f"Which, separated by commas: {', '.join(METHODS)}."
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="Syncs of each method that count; one more before them warms up."
    )
    parser.add_argument(
        "--bucket-mb", type=int, default=512, help="Megabytes of one bucket, as --update-weight-buffer-size of a run."
    )
    parser.add_argument(
        "--output", type=Path, default=DEFAULT_OUTPUT, help="The picture, *.png; the numbers go beside it as *.json."
    )
    args = parser.parse_args(argv)
    args.methods = list(dict.fromkeys(filter(None, args.methods.split(","))))
    mistakes = problems(args)
    if mistakes:
        parser.error("; ".join(mistakes))
    return args


def problems(args: argparse.Namespace) -> list[str]:
    """What is impossible about the command line."""
    mistakes = [f"--methods {name}: known are {', '.join(METHODS)}" for name in args.methods if name not in METHODS]
    if not args.methods:
        mistakes.append(f"--methods: name at least one of {', '.join(METHODS)}")
    for flag in ("repeats", "tp", "bucket_mb"):
        if getattr(args, flag) < 1:
            mistakes.append(f"--{flag.replace('_', '-')} {getattr(args, flag)}: must be at least 1")
    if args.output.suffix != ".png":
        mistakes.append(f"--output {args.output}: must end in .png")
    size, available = args.size_mb * MEGABYTE, psutil.virtual_memory().available
    if not size >= SMALLEST_BYTES:
        return [*mistakes, f"--size-mb {args.size_mb:g}: must be at least {SMALLEST_BYTES / MEGABYTE:g}"]
    if size * COPIES > available:
        return [
            *mistakes,
            (
                f"--size-mb {args.size_mb:g}: needs about {COPIES * size / 1e9:.1f} GB of memory, {available / 1e9:.1f}"
                " GB are free"
            ),
        ]
    heads = Shape.of_bytes(size).kv_heads
    if args.tp > 1 and heads % args.tp:
        mistakes.append(f"--tp {args.tp}: a model of this size has {heads} key/value heads, which that does not divide")
    return mistakes


def main(argv: list[str]) -> int:
    """Command line; returns the exit status."""
    # So that the engine and the temporary folder go too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    args = parse(argv)
    try:
        shape, rows, bounds = measure(args)
    except SlimeLikeError as error:
        print(f"weight_update_demo: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    print_table(shape, rows, bounds, args.tp)
    draw(args.output, shape, rows)
    numbers = {
        "bytes": shape.num_bytes,
        "tp": args.tp,
        "repeats": args.repeats,
        "bounds_s": bounds,
        "methods": [row.to_dict() for row in rows],
    }
    args.output.with_suffix(".json").write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    print(f"drew {args.output}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
