"""How evenly long-tailed lengths are dealt out: tokens computed for nothing, micro-batches beyond the fewest possible,
and waiting ranks.

usage: packing_balance.py [--output benchmarks/results/packing-balance]

Pure arithmetic over log-normal lengths as reasoning traces have them (many short, few at the limit), for an 8B model's
FLOPs; the same numbers on any host. Bounds: no micro-batch can be saved below a rank's tokens / cap, no rank can wait
less than not at all.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np

from slime_like.algorithms.flops import forward_flops
from slime_like.algorithms.micro_batches import Plan, imbalance, largest_differencing, plan_micro_batches
from slime_like.config.batch import BatchConfig
from slime_like.config.model import ModelConfig

#: Qwen3-8B.
MODEL = ModelConfig(
    num_layers=36, hidden_size=4096, ffn_hidden_size=12288, num_attention_heads=32, group_query_attention=True,
    num_query_groups=8,
    kv_channels=128, vocab_size=151936, swiglu=True, disable_bias_linear=True, normalization="RMSNorm",
)  # fmt: skip
CAP, LONGEST, TENSOR_PARALLEL = 16384, 32768, 4
DYNAMIC = {"use_dynamic_batch_size": True, "max_tokens_per_gpu": CAP}
DEFAULT = "packed"
METHODS = {
    "one sample a micro-batch": {"micro_batch_size": 1},
    DEFAULT: DYNAMIC,
    "packed, --no-balance-by-flops": DYNAMIC | {"balance_by_flops": False},
    "packed, --no-balance-by-flops --balance-data": DYNAMIC | {"balance_by_flops": False, "balance_data": True},
}
PACKS_FIRST = "packs of all samples, then dealt out"
GOALS = {"padding": 0.02, "imbalance": 0.03}


def lengths_of(seed: int, count: int) -> list[int]:
    """Prompt and response: median 2.4k tokens, a tail that is cut off at 32k."""
    return np.clip(np.random.default_rng(seed).lognormal(7.8, 0.9, count), 64, LONGEST).astype(int).tolist()


def packs_first(lengths: list[int], costs: list[int], ranks: int) -> Plan:
    """What other trainers do, for comparison: first fit over all samples in their order, the fullest pack halved until
    every rank gets as many, then packs dealt out by work, heaviest first, to the rank with the least that has room.
    """
    packs: list[list[int]] = []
    totals: list[int] = []
    for index, length in enumerate(lengths):
        place = next((p for p, total in enumerate(totals) if total + length <= CAP), None)
        if place is None:
            packs, totals = [*packs, [index]], [*totals, length]
        else:
            packs[place].append(index)
            totals[place] += length
    while len(packs) % ranks:
        fullest = max((pack for pack in packs if len(pack) > 1), key=lambda pack: sum(lengths[i] for i in pack))
        packs.remove(fullest)
        halves = largest_differencing([lengths[i] for i in fullest], 2)
        packs += [[fullest[place] for place in half] for half in halves]
    plan: list[list[tuple[int, ...]]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for pack in sorted(packs, key=lambda pack: -sum(costs[i] for i in pack)):
        roomy = [rank for rank in range(ranks) if len(plan[rank]) < len(packs) // ranks]
        rank = min(roomy, key=lambda rank: loads[rank])
        plan[rank].append(tuple(pack))
        loads[rank] += sum(costs[i] for i in pack)
    return tuple(tuple(of_rank) for of_rank in plan)


def measure(plan: Plan, lengths: list[int], costs: list[int]) -> dict[str, float]:
    """padding: share of computed tokens that belong to no sample, when a pack is padded to the tensor parallel size.
    beyond_fewest: micro-batches of a rank over the fewest that the tokens of all ranks fill. imbalance: see
    micro_batches.imbalance. uneven: the same between the k-th micro-batches of the ranks, which wait for each other
    where they share experts."""
    packs = [[sum(lengths[i] for i in pack) for pack in rank] for rank in plan]
    computed = sum(max(-(-tokens // TENSOR_PARALLEL), 1) * TENSOR_PARALLEL for rank in packs for tokens in rank)
    fewest = -(-sum(min(length, CAP) for length in lengths) // (CAP * len(plan)))
    work = np.array([[sum(costs[i] for i in pack) for pack in rank] for rank in plan], dtype=float)
    return {
        "padding": 1 - sum(lengths) / computed,
        "micro_batches": float(len(plan[0])),
        "beyond_fewest": len(plan[0]) / fewest - 1,
        "imbalance": imbalance(plan, costs),
        "uneven": float(work.max(0).sum() / work.mean(0).sum() - 1),
    }


def table(*, samples: int, ranks: int, seeds: int) -> dict[str, dict[str, float]]:
    """Method -> the median over seeds of each measure, the worst imbalance, and planning seconds."""
    flops, results = forward_flops(MODEL), {}

    def plan_by(name: str, lengths: list[int], costs: list[int]) -> Plan:
        if name == PACKS_FIRST:
            return packs_first(lengths, costs, ranks)
        batch = BatchConfig(**METHODS[name])
        return plan_micro_batches(lengths, data_parallel_size=ranks, batch=batch, costs=costs)

    for name in (*METHODS, PACKS_FIRST):
        rows, seconds = [], []
        for seed in range(seeds):
            lengths = lengths_of(seed, samples)
            costs = [flops.of(length) for length in lengths]
            started = time.perf_counter()
            plan = plan_by(name, lengths, costs)
            seconds.append(time.perf_counter() - started)
            rows.append(measure(plan, lengths, costs))
        results[name] = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        results[name] |= {
            "worst_imbalance": max(row["imbalance"] for row in rows),
            "plan_seconds": statistics.median(seconds),
        }
    # What padding to the longest of a micro-batch of 8 would cost, for comparison.
    batches = [lengths_of(seed, samples) for seed in range(seeds)]
    padded = [1 - sum(b) / sum(8 * max(b[i : i + 8]) for i in range(0, len(b), 8)) for b in batches]
    results["padded to the longest of 8"] = {"padding": statistics.median(padded)}
    return results


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=512, help="Samples of a train step.")
    parser.add_argument("--ranks", type=int, default=8, help="Data parallel size.")
    parser.add_argument("--seeds", type=int, default=10, help="Batches that the medians are over.")
    parser.add_argument("--output", type=Path, help="Write OUTPUT.json and OUTPUT.md.")
    args = parser.parse_args()
    result = table(samples=args.samples, ranks=args.ranks, seeds=args.seeds)
    columns = ("padding", "beyond_fewest", "imbalance", "worst_imbalance", "uneven")
    lines = [
        f"| {args.samples} samples, {args.ranks} ranks, {args.seeds} batches | "
        + " | ".join(columns)
        + " | planning |",
        "|" + "---|" * (len(columns) + 2),
    ]
    for name, row in result.items():
        cells = [f"{row[c]:.2%}" if c in row else "" for c in columns]
        lines.append(
            f"| {name} | " + " | ".join(cells) + f" | {row['plan_seconds']:.3f} s |"
            if "plan_seconds" in row
            else f"| {name} | " + " | ".join(cells) + " | |"
        )
    best = result[DEFAULT]
    lines += [
        "",
        *(
            f"{name}: {best[name]:.2%}, goal {goal:.0%}: {'met' if best[name] <= goal else 'MISSED'}"
            for name, goal in GOALS.items()
        ),
    ]
    print("\n".join(lines))
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        hardware = "2-core x86 CPU host; all but planning seconds is arithmetic"
        args.output.with_suffix(".json").write_text(
            json.dumps({"hardware": hardware, "rows": result}, indent=1) + "\n", encoding="utf-8"
        )
        args.output.with_suffix(".md").write_text(f"{hardware}\n\n" + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
