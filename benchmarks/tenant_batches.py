"""Passes of several tenants in shared micro-batches against one after another, and how long one takes to the host and
back.

usage: python -m benchmarks.tenant_batches [--rounds 5] [--tenants 1 2 4 8] [--tokens 16 64 256] [--models tiny 100m]
[--most-tokens 512] [--output benchmarks/results/tenant-batches]

Each tenant has adapters of another rank (4 to 32, all linear layers) and a row of so many tokens; a pass is forward and
backward. The bound is one tenant's pass over all the rows. All three take turns, in one process on one thread; seconds
are the process' own, so that others on the host count less.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch

from slime_like.config.batch import BatchConfig
from slime_like.config.checkpoint import CheckpointConfig
from slime_like.config.data import DataConfig
from slime_like.config.hf_model import model_from_hf, read_hf_config
from slime_like.config.lora import LoraConfig
from slime_like.config.model import ModelConfig
from slime_like.config.optimizer import OptimizerConfig
from slime_like.config.placement import PlacementConfig
from slime_like.config.run import RunConfig
from slime_like.config.tree import TENANTS
from slime_like.records import LossRow, TenantPass

#: name -> sizes of a Qwen3
MODELS = {
    "tiny": {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 2, "vocab_size": 512},
    "100m": {"hidden_size": 640, "intermediate_size": 1920, "num_hidden_layers": 12, "vocab_size": 32_000},
}
RANKS = (4, 8, 16, 32)


def write_model(name: str, folder: str) -> None:
    """Random weights as an HF folder."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    sizes = MODELS[name]
    heads = {"num_attention_heads": sizes["hidden_size"] // 32, "num_key_value_heads": sizes["hidden_size"] // 64}
    config = Qwen3Config(**sizes, **heads, head_dim=32, tie_word_embeddings=False, max_position_embeddings=8192)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def trainer(folder: str, most_tokens: int):
    """A trainer of tenants on one rank, whose micro-batches hold everything."""
    from slime_like.megatron_backend.worker import TrainWorker
    from slime_like.utils.net import free_port

    config = RunConfig(
        placement=PlacementConfig(actor_num_gpus_per_node=1),
        model=model_from_hf(read_hf_config(folder), ModelConfig()),
        checkpoint=CheckpointConfig(hf_checkpoint=folder),
        data=DataConfig(num_rollout=1),
        batch=BatchConfig(use_dynamic_batch_size=True, max_tokens_per_gpu=most_tokens),
        optimizer=OptimizerConfig(bf16=False),
        role=TENANTS,
    )
    place = {"rank": 0, "world_size": 1, "local_rank": 0, "master_address": "127.0.0.1", "master_port": free_port()}
    worker = TrainWorker(config, **place)
    worker.start()
    return worker


def row_of(tokens: int, vocabulary: int, generator: np.random.Generator) -> LossRow:
    """Random tokens, each scored on the next."""
    ids = generator.integers(0, vocabulary, tokens + 1)
    weights = np.ones(tokens, dtype=np.float32)
    return LossRow(tokens=ids[:-1].astype(np.int32), targets=ids[1:], inputs={"weights": weights})


def in_turns(ways: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each; the first round is left out."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name in list(ways) if number % 2 else reversed(ways):
            started = time.process_time()
            ways[name]()
            times[name].append(time.process_time() - started)
    return {name: statistics.median(values[1:]) for name, values in times.items()}


def largest_difference(worker, ways: Sequence[Callable[[], object]], names: Sequence[str]) -> float:
    """Of the gradients that two ways give, over the largest gradient."""
    gradients = []
    for way in ways:
        memories = [worker._tenants._tenants[name].memory for name in names]
        for memory in memories:
            memory.clear_gradient()
        way()
        gradients.append(torch.cat([memory.gradient for memory in memories]))
    return float((gradients[0] - gradients[1]).abs().max() / gradients[0].abs().max())


def measure(model: str, args: argparse.Namespace) -> dict:
    """All cases of one model."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(model, folder)
        worker = trainer(folder, args.most_tokens)
    names = [f"tenant {number}" for number in range(max(args.tenants))]
    for number, name in enumerate(names):
        worker.add_tenant(name, LoraConfig(lora_rank=RANKS[number % len(RANKS)], lora_init="false"), number)
    worker.add_tenant("everybody", LoraConfig(lora_rank=16, lora_init="false"), 0)
    generator, cases = np.random.default_rng(0), []
    for tokens in args.tokens:
        rows = [row_of(tokens, MODELS[model]["vocab_size"], generator) for _ in names]
        for count in [count for count in args.tenants if count * tokens <= args.most_tokens]:
            passes = [
                TenantPass(weights=name, rows=(row,), loss="cross_entropy")
                for name, row in zip(names[:count], rows, strict=False)
            ]
            whole = [TenantPass(weights="everybody", rows=tuple(rows[:count]), loss="cross_entropy")]
            ways = {
                "one_by_one": lambda p=passes: worker.run_passes(p),
                "together": lambda p=passes: worker.run_passes(p, together=True),
                "bound": lambda p=whole: worker.run_passes(p),
            }
            seconds = in_turns(ways, args.rounds)
            difference = largest_difference(worker, [ways["one_by_one"], ways["together"]], names[:count])
            cases.append({"model": model, "tokens": tokens, "tenants": count, **seconds, "difference": difference})
    swaps = measure_swaps(worker, names[2])
    worker.close()
    return {"cases": cases, "swaps": {"model": model, **swaps}}


def measure_swaps(worker, name: str) -> dict:
    """Milliseconds until a tenant of rank 16 with moments has left for the host, and until it is back."""
    from slime_like.megatron_backend.step.optimizer import AdamParams

    worker.tenant_step(name, AdamParams(lr=1e-3), 0.0)
    memory = worker._tenants._tenants[name].memory
    times: dict[str, list[float]] = {"leave": [], "come": []}
    for _ in range(7):
        for way, seconds in times.items():
            started = time.perf_counter()
            getattr(memory, way)()
            seconds.append(time.perf_counter() - started)
    moved = 4 * memory.size * 3
    return {"bytes": moved, **{f"{way}_ms": 1e3 * statistics.median(times[way][1:]) for way in times}}


def hardware() -> str:
    """This host in words."""
    names = [line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
             if line.startswith("model name")]  # fmt: skip
    processor = names[0] if names else platform.processor()
    return f"{os.cpu_count()} cores of {processor}, one thread used, other work beside it; torch {torch.__version__}"


def table(results: Sequence[dict]) -> list[str]:
    """As Markdown."""
    columns = ("model", "tokens a tenant", "tenants", "one by one", "together", "faster by")
    columns += ("one tenant with all rows (bound)", "together / bound", "largest difference of gradients")
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for case in (case for result in results for case in result["cases"]):
        each, both, bound = (case[name] for name in ("one_by_one", "together", "bound"))
        lines.append(
            f"| {case['model']} | {case['tokens']} | {case['tenants']} | {each:.3f} s | {both:.3f} s |"
            f" {each / both:.2f} | {bound:.3f} s | {both / bound:.2f} | {case['difference']:.1e} |"
        )
    lines += ["", "| model | adapters of rank 16 with moments | to the host | back |", "|---|---|---|---|"]
    for swap in (result["swaps"] for result in results):
        lines.append(
            f"| {swap['model']} | {swap['bytes'] / 2**20:.1f} MiB | {swap['leave_ms']:.2f} ms |"
            f" {swap['come_ms']:.2f} ms |"
        )
    return lines


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5, help="Turns that are measured.")
    parser.add_argument("--tenants", type=int, nargs="+", default=[1, 2, 4, 8], help="How many share a pass.")
    parser.add_argument("--tokens", type=int, nargs="+", default=[16, 64, 256], help="Tokens of each one's row.")
    parser.add_argument("--most-tokens", type=int, default=512, help="Cases with more of them in all are left out.")
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS, help="Which models.")
    parser.add_argument("--output", type=Path, help="Write OUTPUT.json and OUTPUT.md.")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results = [measure(model, args) for model in args.models]
    lines = table(results)
    print("\n".join(lines))
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        record = {"hardware": hardware(), "rounds": args.rounds, "results": results}
        args.output.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        args.output.with_suffix(".md").write_text(f"{hardware()}\n\n" + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
