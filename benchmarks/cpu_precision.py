"""Whether --bf16 pays on this processor: a train step's products and attention in bf16 against fp32, in turns.

usage: cpu_precision.py MODEL_FOLDER [--tokens 1024] [--sequence 256] [--rounds 5] [--output OUTPUT.json]

For each kind of matrix in the model (of HF's config.json) one product forward and the two of its gradients, as often as
the model has it, and attention forward and backward in sequences of --sequence tokens; medians over the rounds. What a
step has beside (norms, Adam, which stays in fp32) is left out, so that a step gains less. Processors without
AVX512-BF16 or AMX compute bf16 by converting it, which may be slower than fp32. Set OMP_NUM_THREADS as for training.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from step_phases import cpu_name

from slime_like.config.hf_model import model_from_hf, read_hf_config
from slime_like.config.model import ModelConfig

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
#: What /proc/cpuinfo calls the instructions that multiply bf16.
INSTRUCTIONS = ("avx512_bf16", "amx_bf16")


def matrices(model: ModelConfig) -> dict[str, tuple[int, int, int]]:
    """Name -> (inputs, outputs, how many of them) of a dense model's matrices."""
    heads, kv = (count * model.head_size for count in (model.num_attention_heads, model.num_kv_heads))
    layers, hidden, wide = model.num_layers, model.hidden_size, model.mlp_size
    return {
        "queries, keys, values": (hidden, heads + 2 * kv, layers),
        "attention's output": (heads, hidden, layers),
        "MLP in": (hidden, (2 if model.swiglu else 1) * wide, layers),
        "MLP out": (wide, hidden, layers),
        "vocabulary": (hidden, model.vocab_size, 1),
    }


def product(inputs: int, outputs: int, tokens: int, dtype: torch.dtype) -> Callable[[], None]:
    """One product forward and backward."""
    weight = torch.randn(outputs, inputs, dtype=dtype, requires_grad=True)
    rows = torch.randn(tokens, inputs, dtype=dtype, requires_grad=True)
    gradient = torch.randn(tokens, outputs, dtype=dtype)

    def run() -> None:
        weight.grad = rows.grad = None
        torch.nn.functional.linear(rows, weight).backward(gradient)

    return run


def attention(model: ModelConfig, tokens: int, sequence: int, dtype: torch.dtype) -> Callable[[], None]:
    """One layer's attention forward and backward."""
    shape = (max(1, tokens // sequence), model.num_attention_heads, sequence, model.head_size)
    parts = [torch.randn(shape, dtype=dtype, requires_grad=True) for _ in range(3)]
    gradient = torch.randn(shape, dtype=dtype)

    def run() -> None:
        for part in parts:
            part.grad = None
        torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True).backward(gradient)

    return run


def measure(model: ModelConfig, args: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Part -> seconds in each type, of the whole model."""
    parts: dict[str, tuple[int, dict[str, Callable[[], None]]]] = {
        name: (count, {key: product(inputs, outputs, args.tokens, dtype) for key, dtype in TYPES.items()})
        for name, (inputs, outputs, count) in matrices(model).items()
    }
    parts["attention"] = (
        model.num_layers,
        {key: attention(model, args.tokens, args.sequence, dtype) for key, dtype in TYPES.items()},
    )
    times: dict[str, dict[str, float]] = {}
    for name, (count, ways) in parts.items():
        seconds: dict[str, list[float]] = {key: [] for key in ways}
        for number in range(args.rounds + 1):
            for key, run in ways.items() if number % 2 else reversed(ways.items()):
                started = time.perf_counter()
                run()
                seconds[key].append(time.perf_counter() - started)
        times[name] = {key: count * statistics.median(row[1:]) for key, row in seconds.items()}
    return times


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="HF folder; its config.json is read.")
    parser.add_argument("--tokens", type=int, default=1024, help="Of a micro-batch.")
    parser.add_argument("--sequence", type=int, default=256, help="Tokens that attend to each other.")
    parser.add_argument("--rounds", type=int, default=5, help="Of each part, after one that warms up.")
    parser.add_argument("--output", type=Path, help="Write the numbers here.")
    args = parser.parse_args()
    model = model_from_hf(read_hf_config(args.model), ModelConfig())
    if model.num_experts or model.multi_latent_attention:
        parser.error("a dense model with ordinary attention is measured; its ratio is about that of others")
    times = measure(model, args)
    whole = {key: sum(row[key] for row in times.values()) for key in TYPES}
    ratio = whole["bf16"] / whole["fp32"]
    print("| part | fp32 s | bf16 s | bf16 / fp32 |", "|---|---|---|---|", sep="\n")
    for name, row in {**times, "all": whole}.items():
        print(f"| {name} | {row['fp32']:.3f} | {row['bf16']:.3f} | {row['bf16'] / row['fp32']:.2f} |")
    flags = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    present = [name for name in INSTRUCTIONS if name in flags] or ["neither " + " nor ".join(INSTRUCTIONS)]
    verdict = "pays" if ratio < 1 else "does not pay"
    print(f"\n{cpu_name()} ({', '.join(present)}), {torch.get_num_threads()} threads: --bf16 {verdict} here.")
    if args.output:
        result = {"hardware": cpu_name(), "instructions": present, "threads": torch.get_num_threads()}
        result |= {"tokens": args.tokens, "seconds": times, "ratio": ratio}
        args.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
