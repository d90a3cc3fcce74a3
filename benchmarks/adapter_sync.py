"""A sync of adapters alone against full syncs of the merged model: bytes and seconds, on real Megatron and real SGLang;
and how fast an engine decodes with several adapters in a batch.

usage: python -m benchmarks.adapter_sync [--size 200] [--rank 8] [--repeats 5] [--output OUTPUT]

One trainer rank holds a Qwen3 from a seed (megabytes of fp32 weights) with adapters of that rank on every linear layer.
One engine gets the merged model, by disk and by broadcast, with the digests that prove it; another one serves the base
and gets the adapters. Each repeat is of other adapters, and a probe compares log-probs after each; medians over the
repeats after one that warms up. "proof" is inside "sync": digests of whole weights; the probe of adapters in a folder;
engines compare digests while they load adapters by http. "moved": sync without its proof.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # trainer and engine share the cores
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "lib")]

from sync_model import Shape, make_weights, serving, write_model  # noqa: E402
from sync_timing import Recorder, timed_sync  # noqa: E402

from slime_like.config.checkpoint import CheckpointConfig  # noqa: E402
from slime_like.config.data import DataConfig  # noqa: E402
from slime_like.config.hf_model import model_from_hf, read_hf_config  # noqa: E402
from slime_like.config.lora import LoraConfig, adapter_flags  # noqa: E402
from slime_like.config.model import ModelConfig  # noqa: E402
from slime_like.config.optimizer import OptimizerConfig  # noqa: E402
from slime_like.config.placement import PlacementConfig  # noqa: E402
from slime_like.config.run import RunConfig  # noqa: E402
from slime_like.config.sync import SyncConfig  # noqa: E402
from slime_like.config.transports import transport_of  # noqa: E402
from slime_like.records import BASE, POLICY, EngineEndpoint, WeightsRef  # noqa: E402
from slime_like.sglang_backend.adapter_client import AdapterClient  # noqa: E402
from slime_like.utils.net import free_port  # noqa: E402
from slime_like.weight_sync.proof.probe import compare_probe, probe_samples  # noqa: E402
from slime_like.weight_sync.session import EngineSide, PublishOrder  # noqa: E402

MEGABYTE = 10**6
TIMEOUT_S = 300.0
#: Shares of a full sync that one of adapters may take.
BYTES_GOAL, SECONDS_GOAL = 0.05, 0.20
FULL = ("broadcast", "disk")
#: How adapters travel: through a folder, which only a probe proves, or in a request, with digests.
ALONE = {"adapter": "adapters, by folder", "http": "adapters, by http"}
#: Adapters in one batch of this many requests, of which each says so many tokens.
ADAPTERS, BATCH, TOKENS = (0, 1, 4, 16), 16, 32


@dataclasses.dataclass(frozen=True)
class Seconds:
    """One sync. proof_s is inside of sync_s."""

    sync_s: float
    proof_s: float
    requests: float

    @property
    def moved_s(self) -> float:
        """Without its proof."""
        return self.sync_s - self.proof_s


def median(times: list[Seconds]) -> dict[str, float]:
    """Of each part."""
    parts = {name: [getattr(one, name) for one in times] for name in ("sync_s", "proof_s", "moved_s", "requests")}
    return {name: statistics.median(values) for name, values in parts.items()}


def make_config(folder: Path, rank: int, sync: SyncConfig) -> RunConfig:
    """One rank that trains adapters over the model of `folder`."""
    sync = dataclasses.replace(sync, update_weight_disk_dir=None, update_weight_timeout_s=TIMEOUT_S)
    if sync.update_weight_transport != "broadcast":
        sync = dataclasses.replace(sync, update_weight_disk_dir=str(folder / "sync"))
    return RunConfig(
        placement=PlacementConfig(actor_num_gpus_per_node=1),
        model=model_from_hf(read_hf_config(str(folder / "model")), ModelConfig()),
        checkpoint=CheckpointConfig(hf_checkpoint=str(folder / "model"), ref_load=str(folder / "model")),
        data=DataConfig(num_rollout=1),
        optimizer=OptimizerConfig(bf16=False),
        lora=LoraConfig(lora_rank=rank, lora_alpha=2.0 * rank, lora_init="false"),
        sync=sync,
    )


class Trainer:
    """The rank, and its syncs to one engine after the other."""

    def __init__(self, folder: Path, rank: int):
        from slime_like.megatron_backend.worker import TrainWorker

        self._folder, self._rank, self._version = folder, rank, 0
        self.config = make_config(folder, rank, SyncConfig())
        place = {"rank": 0, "world_size": 1, "local_rank": 0, "master_address": "127.0.0.1", "master_port": free_port()}
        self.worker = TrainWorker(self.config, **place)
        self.worker.start()

    def route(self, transport: str, endpoint: EngineEndpoint):
        """(order, sender, config) of syncs by this transport."""
        from slime_like.megatron_backend.publish import gathering, gathering_of_adapters
        from slime_like.weight_sync.sender import WeightSender

        adapters = transport in ALONE
        sync = SyncConfig(
            update_weight_mode="adapter" if adapters else "full",
            update_weight_transport=None if transport == "adapter" else transport,
        )
        config = make_config(self._folder, self._rank, sync)
        order = PublishOrder.of(config, transport, [endpoint], WeightsRef())
        if adapters:
            gathered = gathering_of_adapters(self.worker.stage, config, master_address="127.0.0.1")
        else:
            gathered = gathering(config.model, lambda: self.worker.export(BASE), master_address="127.0.0.1")
        sender = WeightSender(config, order, gathered)
        sender.connect()
        return order, sender, config

    def sync(self, route, client: AdapterClient) -> tuple[Seconds, int]:
        """One whole sync of adapters that the engine did not have before, with its proof; and its bytes."""
        order, sender, config = route
        self._version += 1
        for name, parameter in self.worker.stage.named_parameters():
            if name.endswith("lora_a"):
                parameter.data.neg_()
        name = POLICY.name if config.sync.sends_adapters else BASE.name
        weights = WeightsRef(name, self._version)
        sent = []

        def send(_: Recorder) -> None:
            sent.append(sender.send(weights).num_bytes)

        def check() -> None:
            if sender.prove(order.endpoints)[0] != 1:
                raise SystemExit("adapter_sync: the engine's digests are not those of what was sent")

        engines = EngineSide(dataclasses.replace(order, weights=weights))
        times = timed_sync(engines, send, check if order.compares_digests else None)
        probe_s = self._probe(config, client, weights)
        if transport_of(order.transport).name == "adapter":  # the probe is what proves each sync
            return Seconds(times.total_s + probe_s, probe_s, times.requests), sent[0]
        return Seconds(times.total_s, times.verify_s, times.requests), sent[0]

    def _probe(self, config: RunConfig, client: AdapterClient, weights: WeightsRef) -> float:
        from slime_like.megatron_backend.rl_recipe import recipe_of

        started, samples = time.perf_counter(), probe_samples(config)
        expected = recipe_of(self.worker).probe(samples)
        adapter = str(weights) if config.sync.sends_adapters else None
        compare_probe(config, [client], samples, expected, version=weights.version, bf16=False, adapter=adapter)
        return time.perf_counter() - started


def syncs(trainer: Trainer, folder: Path, transports: tuple[str, ...], args: argparse.Namespace, flags: dict) -> dict:
    """transport -> medians and bytes, to one engine with these flags; and its decode rates."""
    results: dict = {}
    with serving(folder / "model", tp=1, log_path=folder / "engine.log", timeout_s=TIMEOUT_S, flags=flags) as engine:
        client = AdapterClient(engine.endpoint, timeout_s=TIMEOUT_S)
        routes = {transport: trainer.route(transport, engine.endpoint) for transport in transports}
        times: dict[str, list[Seconds]] = {transport: [] for transport in transports}
        for repeat in range(args.repeats + 1):
            for transport in transports:
                seconds, size = trainer.sync(routes[transport], client)
                results[transport] = {"bytes": size}
                times[transport] += [seconds] if repeat else []
        for transport in transports:
            results[transport] |= median(times[transport])
            routes[transport][1].close()
        counts = ADAPTERS if flags else (0,)
        results["decode"] = {count: rate(client, folder, count, args) for count in counts}
    return results


def rate(client: AdapterClient, folder: Path, num_adapters: int, args: argparse.Namespace) -> float:
    """Tokens a second of one batch of requests over so many adapters, the best of the repeats."""
    names = [f"decode@{number}" for number in range(num_adapters)]
    source = max((folder / "sync").glob("version-*"), default=None)
    for name in names:
        if name not in client.adapters():
            client.load_adapter(name, str(source))

    def ask(number: int) -> None:
        sampling = {"max_new_tokens": TOKENS, "ignore_eos": True, "temperature": 1.0}
        named = {"lora_path": names[number % len(names)]} if names else {}
        answer = client.generate([7 + number, 11, 13, 17, 19, 23, 29, 31], sampling, **named)
        if len(answer["output_ids"]) != TOKENS:
            raise SystemExit(f"adapter_sync: {len(answer['output_ids'])} tokens instead of {TOKENS}")

    best = float("inf")
    with ThreadPoolExecutor(BATCH) as pool:
        for _ in range(args.repeats):
            started = time.perf_counter()
            list(pool.map(ask, range(BATCH)))
            best = min(best, time.perf_counter() - started)
    return BATCH * TOKENS / best


def table(numbers: dict) -> list[str]:
    """Markdown lines."""
    lines = [
        "| sync | bytes | of full | sync s | its proof s | moved s | requests | sync, of full | moved, of full |",
        "|" + "---|" * 9,
    ]
    for name in FULL:
        row = numbers[name]
        cells = [f"full, {name}", f"{row['bytes']:,}", "", f"{row['sync_s']:.3f}", f"{row['proof_s']:.3f}"]
        lines.append("| " + " | ".join([*cells, f"{row['moved_s']:.3f}", f"{row['requests']:.0f}", "", ""]) + " |")
    for way, title in ALONE.items():
        row = numbers[way]
        share = row["bytes"] / numbers["disk"]["bytes"]
        shares = [
            ", ".join(f"{row[key] / numbers[name][key]:.0%} of {name}" for name in FULL)
            for key in ("sync_s", "moved_s")
        ]
        cells = [title, f"{row['bytes']:,}", f"{share:.1%}", f"{row['sync_s']:.3f}", f"{row['proof_s']:.3f}"]
        lines.append("| " + " | ".join([*cells, f"{row['moved_s']:.3f}", f"{row['requests']:.0f}", *shares]) + " |")
    lines.append("")
    lines += ["| decoding | tokens/s | of an engine without adapters |", "|---|---|---|"]
    plain = numbers["decode"]["plain"]
    lines += [
        f"| {what} | {value:.0f} | {value / plain:.0%} |"
        for what, value in (
            ("engine without --enable-lora", plain),
            *((f"{count or 'no'} adapters in the batch", numbers["decode"][str(count)]) for count in ADAPTERS),
        )
    ]
    return lines


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=float, default=200.0, help="Megabytes of the model.")
    parser.add_argument("--rank", type=int, default=8, help="Rank of the adapters.")
    parser.add_argument("--repeats", type=int, default=5, help="Syncs that count; one more before them warms up.")
    parser.add_argument("--output", type=Path, help="Write OUTPUT.json and OUTPUT.md.")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="adapter-sync-") as name:
        folder, shape = Path(name), Shape.of_bytes(args.size * MEGABYTE)
        write_model(folder / "model", shape, make_weights(shape, seed=1))
        trainer = Trainer(folder, args.rank)
        try:
            numbers = syncs(trainer, folder, FULL, args, {})
            plain = numbers["decode"][0]
            lora = adapter_flags(trainer.config.lora, trainer.config.model, num_versions=max(ADAPTERS))
            numbers |= syncs(trainer, folder, tuple(ALONE), args, lora)
        finally:
            trainer.worker.close()
    numbers["decode"] = {"plain": plain} | {str(count): value for count, value in numbers["decode"].items()}
    # Nothing else should run: shares of a full sync are of the same minutes, but one core's work is not another's.
    hardware = f"{os.cpu_count()}-core x86 CPU host, load average {os.getloadavg()[0]:.1f} at the end"
    head = (
        f"{hardware}, fp32, a Qwen3 of {shape.num_bytes / MEGABYTE:.0f} MB, adapters of rank {args.rank} on all linear"
        f" layers; medians of {args.repeats} repeats. Decoding: {BATCH} requests of {TOKENS} tokens at once, best of"
        " the repeats."
    )
    lines = [head, "", *table(numbers)]
    print("\n".join(lines))
    if args.output:
        numbers |= {"hardware": hardware, "rank": args.rank, "repeats": args.repeats, "model_bytes": shape.num_bytes}
        numbers["goals"] = {"bytes": BYTES_GOAL, "seconds": SECONDS_GOAL}
        args.output.with_suffix(".json").write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
        args.output.with_suffix(".md").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
