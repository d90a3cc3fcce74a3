"""What a weight update costs the answers that run through it, on a real engine: each way weights travel, each way of
pausing.

usage: python -m benchmarks.update_pauses [--sizes 3,200] [--ways broadcast,disk,delta,adapter] [--repeats 5]
[--output benchmarks/results/update-pauses]

One trainer rank (Megatron) and one SGLang engine on this host; eight requests stream while a whole sync runs as a run
orders it (weight_sync.session.run_session, with its receipts). At each sync one weight in twenty has changed. The first
sync of each way, which connects and, with deltas, sends everything, is not counted. Medians over repeats. All but the
decode step are seconds beyond a usual decode step (benchmarks/running_requests.py):

    nothing    the longest time in which no request got a token; the least of all repeats behind it
    next       until a request went on, mean over requests; most: over requests and repeats
    lost       seconds of generating at the pace before, from the sync's beginning until all went on: what the trainer
               takes of the shared processor counts too
    again      tokens that the engine computed a second time: its own count of what it prefilled
    thrown     tokens that had come and were asked for again
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # trainer and engine share the cores
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "lib")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from sync_model import Shape, make_weights, write_model  # noqa: E402

from benchmarks.running_requests import Interruption, RunningRequests, interruption  # noqa: E402
from benchmarks.step_phases import cpu_name  # noqa: E402
from slime_like.config.checkpoint import CheckpointConfig  # noqa: E402
from slime_like.config.data import DataConfig  # noqa: E402
from slime_like.config.hf_model import model_from_hf, read_hf_config  # noqa: E402
from slime_like.config.lora import LoraConfig, adapter_flags  # noqa: E402
from slime_like.config.model import ModelConfig  # noqa: E402
from slime_like.config.optimizer import OptimizerConfig  # noqa: E402
from slime_like.config.placement import PlacementConfig  # noqa: E402
from slime_like.config.run import RunConfig  # noqa: E402
from slime_like.config.sync import SyncConfig  # noqa: E402
from slime_like.records import BASE, POLICY, WeightsRef  # noqa: E402
from slime_like.sglang_backend.client import EngineClient  # noqa: E402
from slime_like.sglang_backend.launcher import EngineSpec, launch_engine  # noqa: E402
from slime_like.utils.net import free_port  # noqa: E402
from slime_like.weight_sync.delta.receiver_client import start_receiver  # noqa: E402
from slime_like.weight_sync.sender import Gathering, WeightSender  # noqa: E402
from slime_like.weight_sync.session import PublishOrder, run_session  # noqa: E402

MEGABYTE, TIMEOUT_S = 10**6, 120.0
WAYS = ("broadcast", "disk", "delta", "adapter")
MODES = ("retract", "in_place", "abort")
REQUESTS, PROMPT_TOKENS, RANK = 8, 64, 8
#: One weight in so many changes between two syncs.
ONE_IN = 20
#: Tokens that each request has when the sync begins at least, and that it gets after it.
BEFORE, AFTER = 40, 20
PREFILL = re.compile(r"Prefill batch.*?#new-token: (\d+)")


@dataclasses.dataclass(frozen=True)
class Update:
    """One sync."""

    sync_s: float
    prefilled: int
    thrown: int
    seen: Interruption


def make_config(folder: Path, way: str, pause_mode: str) -> RunConfig:
    """One rank that holds the model of `folder` and trains nothing."""
    by_mode = way in ("delta", "adapter")
    return RunConfig(
        role="ref",  # no gradients, no optimizer
        placement=PlacementConfig(actor_num_gpus_per_node=1),
        model=model_from_hf(read_hf_config(str(folder / "model")), ModelConfig()),
        checkpoint=CheckpointConfig(hf_checkpoint=str(folder / "model"), ref_load=str(folder / "model")),
        data=DataConfig(num_rollout=1),
        optimizer=OptimizerConfig(bf16=False),
        lora=LoraConfig(lora_rank=RANK if way == "adapter" else 0),
        sync=SyncConfig(
            update_weight_transport=None if by_mode else way,
            update_weight_mode=way if by_mode else "full",
            update_weight_disk_dir=None if way == "broadcast" else str(folder / f"sync-{way}"),
            update_weight_pause_mode=pause_mode,
            update_weight_timeout_s=TIMEOUT_S,
        ),
    )


class Bench:
    """A trainer rank and an engine of one model; `ways` that this engine can take weights in."""

    def __init__(self, folder: Path, shape: Shape, endpoint, ways: Sequence[str]):
        from slime_like.megatron_backend.worker import TrainWorker

        self._folder, self._endpoint, self._version = folder, endpoint, 0
        self._client = EngineClient(endpoint, timeout_s=TIMEOUT_S)
        self._requests = RunningRequests(endpoint.url, endpoint.api_key, REQUESTS)
        self._requests.__enter__()
        self._random, self._shape = np.random.default_rng(0), shape
        config = make_config(folder, ways[0], MODES[0])
        self._worker = TrainWorker(
            dataclasses.replace(config, lora=LoraConfig()), rank=0, world_size=1, local_rank=0,
            master_address="127.0.0.1", master_port=free_port(),
        )  # fmt: skip
        self._worker.start()
        self._adapters = self._first_adapters(config) if "adapter" in ways else {}
        self._senders: dict[str, WeightSender] = {}

    def sync(self, way: str, mode: str) -> None:
        """One whole sync of weights that have changed. Raises WeightSyncError if a receipt does not prove it."""
        config = make_config(self._folder, way, mode)
        self._version += 1
        weights = WeightsRef(POLICY.name if way == "adapter" else BASE.name, self._version)
        order = PublishOrder.of(config, way, [self._endpoint], weights)
        sender = self._senders.get(way)
        if sender is None or sender.route != order.route:
            if sender is not None:
                sender.close()
            sender = self._senders[way] = WeightSender(config, order, self._gathering(config, way))
        receipt = run_session(order, sender)
        if order.compares_digests and (receipt.engines_proven != 1 or receipt.tensors_unproven):
            raise SystemExit(f"update_pauses: the receipt proves {receipt}")

    def change(self) -> None:
        """As a train step does: one weight in twenty is another."""
        for tensor in self._adapters.values() or [p.data for p in self._worker.stage[0].parameters()]:
            flat = tensor.view(-1)
            where = torch.from_numpy(self._random.integers(0, flat.numel(), max(1, flat.numel() // ONE_IN)))
            flat[where] = flat[where] * 1.01

    def measure(self, way: str, mode: str, log: Path) -> Update:
        """One sync under running requests."""
        self.change()
        prompts = [self._random.integers(5, 300, PROMPT_TOKENS).tolist() for _ in range(REQUESTS)]
        adapter = f"{POLICY.name}@{self._version}" if way == "adapter" else None
        requests = self._requests
        requests.start(prompts, adapter)
        requests.wait_for(BEFORE)
        at = log.stat().st_size
        begin = time.monotonic()
        requests.hold(True)
        self.sync(way, mode)
        end = time.monotonic()
        requests.hold(False)
        requests.wait_for(AFTER)
        prefilled = sum(map(int, PREFILL.findall(log.read_text(errors="replace")[at:])))
        arrivals = requests.stop()
        self._client.abort_all()
        seen = interruption(arrivals, begin, end, before_s=1.0)
        return Update(end - begin, prefilled, REQUESTS if mode == "abort" and way != "adapter" else 0, seen)

    def close(self) -> None:
        """Leave the engine and the process group."""
        self._requests.__exit__()
        for sender in self._senders.values():
            sender.close()
        self._worker.close()

    def _gathering(self, config: RunConfig, way: str) -> Gathering:
        from slime_like.megatron_backend.lora.peft_files import peft_config
        from slime_like.megatron_backend.publish import gathering, rank_place

        if way != "adapter":
            return gathering(config.model, lambda: self._worker.export(BASE), master_address="127.0.0.1")
        return Gathering(
            place=rank_place(),
            tensors=lambda: iter(self._adapters.items()),
            names=frozenset(self._adapters),
            master_address="127.0.0.1",
            adapter_config=peft_config(config.lora, config.model, config.checkpoint.hf_checkpoint),
        )

    def _first_adapters(self, config: RunConfig) -> dict[str, torch.Tensor]:
        from slime_like.megatron_backend.lora.peft_files import adapter_names

        shapes, adapters = self._shape.tensors(), {}
        for name in sorted(adapter_names(config.lora, config.model)):
            module, kind = name.removeprefix("base_model.model.").removesuffix(".weight").rsplit(".", 1)
            rows, columns = shapes[f"{module}.weight"]
            size = (RANK, columns) if kind == "lora_A" else (rows, RANK)
            adapters[name] = 0.02 * torch.randn(size, generator=torch.Generator().manual_seed(len(adapters)))
        return adapters


@contextlib.contextmanager
def benched(shape: Shape, ways: Sequence[str], log: Path) -> Iterator[Bench]:
    """A bench of a model of that shape, which is ended afterwards."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="update-pauses-")))
        write_model(folder / "model", shape, make_weights(shape, seed=1))
        flags: dict[str, Any] = {"skip_tokenizer_init": True, "max_total_tokens": 16384}
        if "adapter" in ways:
            config = make_config(folder, "adapter", MODES[0])
            flags |= adapter_flags(config.lora, config.model)
        spec = EngineSpec(
            index=0, model_path=str(folder / "model"), dtype="float32", log_path=str(log), context_length=1024,
            extra_flags=flags,
        )  # fmt: skip
        engine = launch_engine(spec, TIMEOUT_S)
        stack.callback(engine.close)
        endpoint = engine.endpoint
        if "delta" in ways:
            receiver = start_receiver(str(folder / "copy"), log_path=str(folder / "receiver.log"), timeout_s=TIMEOUT_S)
            stack.callback(receiver.close)
            endpoint = dataclasses.replace(endpoint, receiver_url=receiver.url, receiver_key=receiver.key)
        bench = Bench(folder, shape, endpoint, ways)
        stack.callback(bench.close)
        yield bench


def measure(shape: Shape, args: argparse.Namespace, folder: Path) -> list[dict]:
    """A row for each way and mode, saved once it is there."""
    ways, modes = args.ways.split(","), args.modes.split(",")
    rows: list[dict] = []
    for number, group in enumerate(
        [[way for way in ways if way != "adapter"], [way for way in ways if way == "adapter"]]
    ):
        if not group:
            continue
        log = folder / f"engine-{shape.num_bytes}-{number}.log"
        with benched(shape, group, log) as bench:
            for way in group:
                bench.sync(way, MODES[0])  # connects; everything travels
                for mode in modes if way != "adapter" else MODES[:1]:
                    updates = [bench.measure(way, mode, log) for _ in range(args.repeats + 1)][1:]
                    rows.append(row_of(shape.num_bytes, way, mode if way != "adapter" else "", updates))
                    print(table(rows).splitlines()[-1], flush=True)
                    if args.output:
                        save(args.output, rows)
    return rows


def row_of(size: int, way: str, mode: str, updates: Sequence[Update]) -> dict:
    """Medians, and the spread of what matters most."""

    def median(name: str) -> float:
        return statistics.median(getattr(update.seen, name) for update in updates)

    silences = [update.seen.silent_s for update in updates]
    return {
        "bytes": size, "way": way, "mode": mode, "repeats": len(updates), "load_average": os.getloadavg()[0],
        "sync_s": statistics.median(update.sync_s for update in updates),
        "silent_s": median("silent_s"), "silent_s_all": silences,
        "next_token_s": median("next_token_s"),
        "next_token_max_s": max(update.seen.next_token_max_s for update in updates),
        "lost_s": median("lost_s"), "step_s": median("step_s"),
        "prefilled_tokens": statistics.median(update.prefilled for update in updates),
        "thrown_tokens": statistics.median(update.thrown for update in updates),
        "tokens_in_flight": statistics.median(
            update.seen.tokens + update.seen.running * PROMPT_TOKENS for update in updates
        ),
    }  # fmt: skip


def table(rows: Sequence[dict]) -> str:
    """Markdown."""
    heads = ["MB", "way", "mode", "step ms", "sync s", "nothing s", "next s", "most s", "lost s", "again", "thrown"]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for row in rows:
        cells = [f"{row['bytes'] / MEGABYTE:.0f}", row["way"], row["mode"] or "none pauses"]
        cells += [
            f"{1e3 * row['step_s']:.1f}",
            f"{row['sync_s']:.3f}",
            f"**{row['silent_s']:.3f}** ({min(row['silent_s_all']):.3f})",
        ]
        cells += [f"{row[name]:.3f}" for name in ("next_token_s", "next_token_max_s", "lost_s")]
        cells += [f"{row['prefilled_tokens']:.0f} of {row['tokens_in_flight']:.0f}", f"{row['thrown_tokens']:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def save(output: Path, rows: list[dict]) -> None:
    """Into OUTPUT.json and OUTPUT.md, beside others that are there."""
    path = output.with_suffix(".json")
    kept: list[dict] = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []

    def key(row: dict) -> tuple:
        return row["bytes"], WAYS.index(row["way"]), MODES.index(row["mode"] or MODES[0])

    rows = sorted(({key(row): row for row in kept} | {key(row): row for row in rows}).values(), key=key)
    hardware = f"{cpu_name()}, {os.cpu_count()} CPUs"
    what = f"{REQUESTS} requests of {PROMPT_TOKENS} tokens and more run; medians. See benchmarks/update_pauses.py"
    output.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"hardware": hardware, "rows": rows}, indent=1) + "\n", encoding="utf-8")
    output.with_suffix(".md").write_text(f"{hardware}; {what}\n\n{table(rows)}\n", encoding="utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sizes", default="3,200", help="Megabytes of each model, separated by commas.")
    parser.add_argument("--ways", default=",".join(WAYS), help="Which, separated by commas.")
    parser.add_argument("--modes", default=",".join(MODES), help="Ways of pausing, separated by commas.")
    parser.add_argument("--repeats", type=int, default=5, help="Syncs of each kind that count.")
    parser.add_argument("--output", type=Path, help="Write OUTPUT.json and OUTPUT.md.")
    args = parser.parse_args()
    for flag_name, words, known in (("--ways", args.ways, WAYS), ("--modes", args.modes, MODES)):
        unknown = [word for word in words.split(",") if word not in known]
        if unknown:
            parser.error(f"{flag_name} {','.join(unknown)}: known are {', '.join(known)}")
    rows: list[dict] = []
    with tempfile.TemporaryDirectory(prefix="update-pauses-") as folder:
        for size in args.sizes.split(","):
            rows += measure(Shape.of_bytes(float(size) * MEGABYTE), args, Path(folder))
    print(table(rows))


if __name__ == "__main__":
    main()
