"""Every transport's weight sync from a real Megatron model into a real SGLang engine, as a share of what the host could
do at best.

usage: weight_sync.py [--sizes 10,200,1000] [--transports ipc,broadcast,disk] [--repeats 5] [--tp 1] [--output
benchmarks/results/weight-sync]

For each size (megabytes of fp32 weights, a Qwen3 from a seed) one trainer rank holds the model in Megatron's layout,
and one engine serves it. Each repeat measures the bounds (scripts/lib/sync_bounds.py defines them), then syncs by each
transport without and with receipts, every weight another one each time; then the probe compares log-probs. Medians over
the repeats after one that warms up. Share of the bound: the bound over the time from the first tensor gathered to the
last one loaded, without receipts. Cost of the
receipt: what a sync takes longer with it, as a share of that sync. Under five minutes for all three sizes on two cores.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # trainer and engine share the cores
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "lib")]

from sync_bounds import BOUND_OF, BOUNDS, BoundMeter  # noqa: E402
from sync_model import Shape, make_weights, serving, write_model  # noqa: E402
from sync_timing import Recorder, SyncTimes, empty_request_s, medians, timed_sync  # noqa: E402

from slime_like.config.checkpoint import CheckpointConfig  # noqa: E402
from slime_like.config.data import DataConfig  # noqa: E402
from slime_like.config.hf_model import model_from_hf, read_hf_config  # noqa: E402
from slime_like.config.model import ModelConfig  # noqa: E402
from slime_like.config.optimizer import OptimizerConfig  # noqa: E402
from slime_like.config.placement import PlacementConfig  # noqa: E402
from slime_like.config.run import RunConfig  # noqa: E402
from slime_like.config.sync import SyncConfig  # noqa: E402
from slime_like.records import BASE, WeightsRef  # noqa: E402
from slime_like.sglang_backend.client import EngineClient  # noqa: E402
from slime_like.utils.net import free_port  # noqa: E402
from slime_like.weight_sync.proof.probe import compare_probe, probe_samples  # noqa: E402
from slime_like.weight_sync.session import EngineSide, PublishOrder  # noqa: E402

#: Share of the bound that each transport is to reach, and the most that a receipt may cost.
GOALS = {"ipc": 0.5, "broadcast": 0.5, "disk": 0.7}
RECEIPT_GOAL = 0.05
MEGABYTE = 10**6
TIMEOUT_S = 300.0


def make_config(folder: Path, transport: str, verify: str) -> RunConfig:
    """One rank that trains the model of `folder`, and here never does."""
    disk = str(folder / "sync") if transport == "disk" else None
    return RunConfig(
        placement=PlacementConfig(actor_num_gpus_per_node=1, colocate=transport == "ipc"),
        model=model_from_hf(read_hf_config(str(folder / "model")), ModelConfig()),
        checkpoint=CheckpointConfig(hf_checkpoint=str(folder / "model"), ref_load=str(folder / "model")),
        data=DataConfig(num_rollout=1),
        optimizer=OptimizerConfig(bf16=False),
        sync=SyncConfig(
            update_weight_transport=transport,
            update_weight_disk_dir=disk,
            update_weight_timeout_s=TIMEOUT_S,
            verify_weight_sync=verify,
        ),
    )


class Bench:
    """A trainer rank and an engine of one model, and everything measured between them."""

    def __init__(self, folder: Path, client: EngineClient, transports: list[str]):
        from slime_like.megatron_backend.publish import gathering
        from slime_like.megatron_backend.worker import TrainWorker
        from slime_like.weight_sync.sender import WeightSender

        self._folder, self.client, self._version = folder, client, 0
        configs = {(t, verify): make_config(folder, t, verify) for t in transports for verify in ("off", "digest")}
        # With ipc its parameters lie where engines map them; the other transports send them from there as well.
        self.config = next((config for (t, _), config in configs.items() if t == "ipc"), next(iter(configs.values())))
        self.worker = TrainWorker(
            self.config, rank=0, world_size=1, local_rank=0, master_address="127.0.0.1", master_port=free_port()
        )
        self.worker.start()
        self._recorder = Recorder()  # of the sync that is under way
        gathered = gathering(
            self.config.model,
            lambda: self._recorder.timed(self.worker.export(BASE), "source"),
            master_address="127.0.0.1",
            shared=self.worker.shared_weights,
        )
        self._orders = {
            key: PublishOrder.of(config, key[0], [client.endpoint], WeightsRef()) for key, config in configs.items()
        }
        self._senders = {key: WeightSender(config, self._orders[key], gathered) for key, config in configs.items()}
        for sender in self._senders.values():
            sender.connect()

    def sync(self, transport: str, verify: str) -> SyncTimes:
        """One whole sync of weights that the engine did not have before.

        Raises WeightSyncError if a receipt does not prove it.
        """
        self._version += 1
        for parameter in self.worker.stage[0].parameters():
            parameter.data.neg_()
        sender, weights = self._senders[transport, verify], WeightsRef(version=self._version)

        def send(recorder: Recorder) -> None:
            self._recorder = recorder
            sender.send(weights)

        def check() -> None:
            engines, left_out = sender.prove([self.client.endpoint])
            if engines != 1 or left_out:
                raise SystemExit(f"weight_sync: the receipt compared {engines} engines and left {left_out} tensors out")

        engines = EngineSide(dataclasses.replace(self._orders[transport, verify], weights=weights))
        return timed_sync(engines, send, check if verify == "digest" else None)

    def probe(self) -> float:
        """Seconds of one probe. Raises WeightSyncError if trainer and engine compute different log-probs."""
        from slime_like.megatron_backend.rl_recipe import recipe_of

        started = time.perf_counter()
        samples = probe_samples(self.config)
        compare_probe(
            self.config,
            [self.client],
            samples,
            recipe_of(self.worker).probe(samples),
            version=self._version,
            bf16=False,
        )
        return time.perf_counter() - started

    def close(self) -> None:
        """Leave the engine and the process group."""
        for sender in self._senders.values():
            sender.close()
        self.worker.close()


def measure(shape: Shape, args: argparse.Namespace) -> dict:
    """All transports with a model of that shape."""
    bounds: dict[str, list[float]] = {name: [] for name in BOUNDS}
    plain: dict[str, list[SyncTimes]] = {transport: [] for transport in args.transports}
    proven: dict[str, list[SyncTimes]] = {transport: [] for transport in args.transports}
    probes: list[float] = []
    latencies: list[float] = []
    with tempfile.TemporaryDirectory(prefix="weight-sync-", dir=args.folder) as name:
        folder = Path(name)
        write_model(folder / "model", shape, make_weights(shape, seed=1))
        meter = BoundMeter(shape.num_bytes, folder)
        with serving(folder / "model", tp=args.tp, log_path=folder / "engine.log", timeout_s=TIMEOUT_S) as engine:
            bench = Bench(folder, EngineClient(engine.endpoint, timeout_s=TIMEOUT_S), args.transports)
            try:
                for repeat in range(args.repeats + 1):
                    bound_times = meter.measure()
                    # Turns change, so that neither way always comes after the other's traces in the caches.
                    ways = [("off", plain), ("digest", proven)] if repeat % 2 else [("digest", proven), ("off", plain)]
                    once = {
                        (transport, verify): bench.sync(transport, verify)
                        for transport in args.transports
                        for verify, _ in ways
                    }
                    probe_s, latency_s = bench.probe(), empty_request_s(bench.client)
                    if repeat == 0:
                        continue
                    probes.append(probe_s)
                    latencies.append(latency_s)
                    for bound, seconds in bound_times.items():
                        bounds[bound].append(seconds)
                    for verify, times in ways:
                        for transport in args.transports:
                            times[transport].append(once[transport, verify])
            finally:
                bench.close()
    at_best = {bound: statistics.median(seconds) for bound, seconds in bounds.items()}
    rows = [summary(t, shape.num_bytes, plain[t], proven[t], bounds[BOUND_OF[t]]) for t in args.transports]
    others = {
        "bounds_s": at_best,
        "probe_s": statistics.median(probes),
        "empty_request_s": statistics.median(latencies),
    }
    return {"bytes": shape.num_bytes, "tensors": len(shape.tensors()), **others, "transports": rows}


def summary(transport: str, size: int, plain: list[SyncTimes], proven: list[SyncTimes], bound_s: list[float]) -> dict:
    """One transport's numbers: medians over the repeats.

    Shares are of one repeat each, so that a host's slow moments fall on both sides.
    """
    without, with_receipt = medians(plain), medians(proven)
    extra = [(a.total_s - b.total_s, (a.total_s - b.total_s) / a.total_s) for a, b in zip(proven, plain, strict=True)]
    return {
        "transport": transport,
        "bound": BOUND_OF[transport],
        "share_of_bound": statistics.median(
            bound / once.transfer_s for bound, once in zip(bound_s, plain, strict=True)
        ),
        "goal": GOALS[transport],
        "receipt_s": statistics.median(seconds for seconds, _ in extra),
        "receipt_share": statistics.median(share for _, share in extra),
        "bytes_per_second": size / without.transfer_s,
        "without_receipt_s": (
            dataclasses.asdict(without) | {"transfer_s": without.transfer_s, "total_s": without.total_s}
        ),
        "with_receipt_s": (
            dataclasses.asdict(with_receipt) | {"transfer_s": with_receipt.transfer_s, "total_s": with_receipt.total_s}
        ),
    }


def table(results: list[dict]) -> list[str]:
    """Markdown lines."""
    titles = (
        "MB",
        "transport",
        "sync s",
        "pause, flush, continue",
        "transfer",
        "source",
        "hash",
        "copy",
        "engine",
        "requests",
        "MB/s",
        "bound s",
    )
    titles += "**of bound**", "goal", "receipt s", "of sync"
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    for result in results:
        for row in result["transports"]:
            plain, proven = row["without_receipt_s"], row["with_receipt_s"]
            cells = [
                f"{result['bytes'] / MEGABYTE:.0f}", row["transport"], f"{proven['total_s']:.3f}",
                f"{plain['begin_s'] + plain['finish_s']:.3f}",
                f"{plain['transfer_s']:.3f}", f"{plain['source_s']:.3f}", f"{plain['hash_s']:.3f}",
                f"{plain['copy_s']:.3f}", f"{plain['engine_s']:.3f}", f"{plain['requests']:.0f}",
                f"{row['bytes_per_second'] / MEGABYTE:.0f}", f"{result['bounds_s'][row['bound']]:.3f} ({row['bound']})",
                f"**{row['share_of_bound']:.0%}**",
                f"{row['goal']:.0%} {'met' if row['share_of_bound'] >= row['goal'] else 'MISSED'}",
                f"{row['receipt_s']:.3f}",
                f"{row['receipt_share']:.1%} {'met' if row['receipt_share'] <= RECEIPT_GOAL else 'MISSED'}",
            ]  # fmt: skip
            lines.append("| " + " | ".join(cells) + " |")
    for result in results:
        bounds = ", ".join(
            f"{name} {result['bytes'] / seconds / 1e9:.2f} GB/s" for name, seconds in result["bounds_s"].items()
        )
        rest = f"An empty request takes {1e3 * result['empty_request_s']:.1f} ms, a probe {result['probe_s']:.3f} s."
        lines += ["", f"{result['bytes'] / MEGABYTE:.0f} MB in {result['tensors']} tensors: bounds {bounds}. {rest}"]
    return lines


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="10,200,1000", help="Megabytes of each model, separated by commas.")
    parser.add_argument("--transports", default=",".join(GOALS), help="Which, separated by commas.")
    parser.add_argument(
        "--repeats", type=int, default=5, help="Syncs of each kind that count; one more before them warms up."
    )
    parser.add_argument("--tp", type=int, default=1, help="Tensor parallel ranks of the engine.")
    parser.add_argument(
        "--folder", type=Path, help="Where models and the disk transport's files lie. Default: the temporary folder."
    )
    parser.add_argument("--output", type=Path, help="Write OUTPUT.json and OUTPUT.md.")
    args = parser.parse_args()
    args.transports = args.transports.split(",")
    unknown = [name for name in args.transports if name not in GOALS]
    if unknown or args.repeats < 1:
        parser.error(
            f"--transports {','.join(unknown)}: known are {', '.join(GOALS)}"
            if unknown
            else "--repeats must be at least 1"
        )
    started, results = time.monotonic(), []
    for size in args.sizes.split(","):
        results.append(measure(Shape.of_bytes(float(size) * MEGABYTE), args))
        print(f"{size} MB done after {time.monotonic() - started:.0f} s", flush=True)
    lines = table(results)
    print("\n".join(lines))
    if args.output:
        hardware = "2-core x86 CPU host"
        head = [
            (
                f"{hardware}; engine of {args.tp} rank{'s' if args.tp > 1 else ''}, medians of {args.repeats} repeats."
                " Bounds: `scripts/lib/sync_bounds.py`."
            ),
            (
                "sync: with its receipt, the other seconds without. transfer: from the first tensor gathered to the"
                " last one loaded; source, hash, copy and engine lie"
            ),
            (
                "inside it, may overlap, and are: gathering and converting, the publisher's own digest, putting tensors"
                " into buckets, and the engine busy with requests that bring weights."
            ),
            "",
        ]
        args.output.parent.mkdir(parents=True, exist_ok=True)
        numbers = {
            "hardware": hardware,
            "tp": args.tp,
            "repeats": args.repeats,
            "goals": GOALS | {"receipt_share": RECEIPT_GOAL},
            "sizes": results,
        }
        args.output.with_suffix(".json").write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
        args.output.with_suffix(".md").write_text("\n".join(head + lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
