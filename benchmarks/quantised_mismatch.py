"""How far an engine's log-probs are from the trainer's when its weights are in eight bits: real SGLang engines, each
sent the same weights in its own form.

usage: python -m benchmarks.quantised_mismatch MODEL --prompts train.jsonl [--tokens 1280] [--only TEXT] [--output
benchmarks/results/quantised-mismatch]

MODEL: an HF folder, trained (a random one is nearly uniform, and forgives everything), whose projections divide by 128
(models/tiny-qwen3-blocks). The trainer's log-probs are those of HF transformers in fp32, which it equals to 1e-6
(results/parity.md). Answers are sampled from them; every engine scores the same tokens. Bound: an engine in fp32, and
one in bf16, as rollouts are without --rollout-quantization. `ratio beyond 2`: share of tokens that --use-tis would cut
at 2.0, or IcePop leave out at 0.5 and 2.0. A second table times the products that stand for the kernels that are not
there without CUDA: as shares of torch's fp32 product.
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
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benchmarks.step_phases import cpu_name
from slime_like.config.quantisation import SCHEMES, engine_flags
from slime_like.sglang_backend.client import EngineClient
from slime_like.sglang_backend.cpu_quant import W8A8, W8A16, fp8_matmul, int8_matmul
from slime_like.weight_sync.quantise import quantise
from slime_like.weight_sync.transports.registry import make_publisher
from tests.contract.engines import hf_logprobs, options, sync
from tests.contract.quantised import Sent, config_only, served

ANSWER_TOKENS = 6
REPEATS = 21


@dataclasses.dataclass(frozen=True)
class Form:
    """How an engine keeps its weights, and multiplies with them."""

    name: str
    dtype: str
    scheme: str | None = None
    activations: str = W8A8


FORMS = (
    Form("fp32", "float32"),
    Form("bf16", "bfloat16"),
    Form("int8, fp32 beside it", "float32", "int8"),
    Form("int8, bf16 beside it", "bfloat16", "int8"),
    Form("fp8 weights only (w8a16), fp32 beside it", "float32", "fp8", W8A16),
    Form("fp8 (w8a8), fp32 beside it", "float32", "fp8"),
    Form("fp8 (w8a8), bf16 beside it", "bfloat16", "fp8"),
    Form("fp8, a scale a matrix (w8a8), bf16 beside it", "bfloat16", "fp8-per-tensor"),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One form against the trainer, over all answers' tokens."""

    form: str
    sent_bytes: int
    mean: float
    largest: float
    beyond_2: float
    tokens: int


@torch.no_grad()
def sampled(model, tokenizer, prompts: Iterable[list[dict]], num_tokens: int) -> list[tuple[list[int], int]]:
    """(tokens, where the answer begins) of so many prompts that the answers have `num_tokens` tokens."""
    torch.manual_seed(0)
    rows: list[tuple[list[int], int]] = []
    for messages in prompts:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        start = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids
        whole = model.generate(start, do_sample=True, max_new_tokens=ANSWER_TOKENS, top_k=0, top_p=1.0)[0].tolist()
        rows.append((whole, start.shape[1]))
        if sum(len(tokens) - begin for tokens, begin in rows) >= num_tokens:
            return rows
    raise SystemExit(f"quantised_mismatch: {len(rows)} prompts are too few for {num_tokens} tokens")


def engine_logprobs(client: EngineClient, rows: list[tuple[list[int], int]]) -> torch.Tensor:
    """Of every answer's tokens, one after another."""
    params = {"temperature": 0, "max_new_tokens": 1}
    answers = client.generate([tokens for tokens, _ in rows], params, return_logprob=True, logprob_start_len=0)
    scored = [
        torch.tensor([item[0] for item in answer["meta_info"]["input_token_logprobs"][begin:]])
        for answer, (_, begin) in zip(answers, rows, strict=True)
    ]
    return torch.cat(scored)


def measure(form: Form, model, rows: list[tuple[list[int], int]], trainer: torch.Tensor) -> Row:
    """Start an engine, send it the weights, and compare."""
    scheme = SCHEMES[form.scheme] if form.scheme else None
    tied = model.config.tie_word_embeddings
    tensors = {name: tensor for name, tensor in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    if scheme is not None:
        tensors = dict(pair for name, tensor in tensors.items() for pair in quantise(name, tensor, scheme))
    stays = {"bfloat16": torch.bfloat16, "float32": torch.float32}[form.dtype]
    plain = {
        n: t.to(stays) if t.is_floating_point() and t.element_size() > 1 and "_scale" not in n else t
        for n, t in tensors.items()
    }
    flags = {"load_format": "dummy"} if scheme is None else engine_flags(scheme, {})
    with tempfile.TemporaryDirectory() as folder:
        place = config_only(model, Path(folder))
        with served(place, flags, activations=form.activations, dtype=form.dtype) as one:
            publisher = make_publisher(options([one], "ipc"))
            sync([one], Sent(plain), [publisher], "ipc")
            publisher.close()
            logprobs = engine_logprobs(one.client, rows)
    difference = (logprobs - trainer).abs()
    return Row(
        form=form.name,
        sent_bytes=sum(tensor.nbytes for tensor in plain.values()),
        mean=difference.mean().item(),
        largest=difference.max().item(),
        beyond_2=(difference > torch.tensor(2.0).log()).float().mean().item(),
        tokens=len(difference),
    )


def products(rows: int, columns: int, tokens: int) -> dict[str, float]:
    """Median seconds of each product of [tokens, columns] with a weight [rows, columns], taken in turns."""
    x, weight = torch.randn(tokens, columns), torch.randn(rows, columns)
    name = "model.layers.0.mlp.up_proj.weight"
    integers, by_row = (tensor for _, tensor in quantise(name, weight, SCHEMES["int8"]))
    floats, blocks = (tensor for _, tensor in quantise(name, weight, SCHEMES["fp8"]))
    scale = blocks.repeat_interleave(128, 0)[:rows]
    ways: dict[str, Callable[[], torch.Tensor]] = {
        "fp32": lambda: torch.nn.functional.linear(x, weight),
        "int8": lambda: int8_matmul(x, integers, by_row),
        "fp8 w8a16": lambda: fp8_matmul(x, floats, scale, columns=128, activations=W8A16),
        "fp8 w8a8": lambda: fp8_matmul(x, floats, scale, columns=128, activations=W8A8),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(REPEATS):
        for way, product in ways.items():
            begin = time.perf_counter()
            product()
            seconds[way].append(time.perf_counter() - begin)
    return {way: statistics.median(values) for way, values in seconds.items()}


def table(rows: Iterable[Row], times: dict[str, float]) -> str:
    """Both tables in Markdown."""
    lines = [
        "| engine | MB sent | mean abs. difference | largest | ratio beyond 2 |",
        "|---|---|---|---|---|",
        *(
            f"| {row.form} | {row.sent_bytes / 1e6:.2f} | {row.mean:.1e} | {row.largest:.1e} | {row.beyond_2:.1%} |"
            for row in rows
        ),
        "",
        "| product of 32 x 1024 with 3072 x 1024 | of torch's fp32 |",
        "|---|---|",
        *(f"| {way} | {seconds / times['fp32']:.2f} |" for way, seconds in times.items()),
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Print the tables; with --output write them, and the numbers beside."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="HF folder of a trained model.")
    parser.add_argument("--prompts", type=Path, required=True, help='JSONL rows of {"prompt": messages}.')
    parser.add_argument("--tokens", type=int, default=1280, help="Tokens of answers that are compared.")
    parser.add_argument("--only", help="Forms with this in their name; with --output the other rows there stay.")
    parser.add_argument("--output", type=Path, help="Where .json and .md are written.")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    prompts = (json.loads(line)["prompt"] for line in args.prompts.read_text().splitlines())
    rows = sampled(model, tokenizer, prompts, args.tokens)
    trainer = torch.cat([hf_logprobs(model, tokens)[begin - 1 :] for tokens, begin in rows])
    hardware = f"{cpu_name()}, one core an engine, no AMX; a trained Qwen3 of {model.num_parameters():,} parameters"
    kept = earlier(args.output, hardware) if args.output and args.only else {}
    times = products(3072, 1024, 32)
    for form in FORMS:
        if args.only and args.only not in form.name:
            continue
        kept[form.name] = measure(form, model, rows, trainer)
        print(dataclasses.asdict(kept[form.name]), file=sys.stderr, flush=True)
        if args.output:  # row by row: an engine's start is slow where others use the host
            save(args.output, hardware, in_order(kept), times)
    print(table(in_order(kept), times))
    return 0


def in_order(rows: Mapping[str, Row]) -> list[Row]:
    """As FORMS has them."""
    return [rows[form.name] for form in FORMS if form.name in rows]


def earlier(output: Path, hardware: str) -> dict[str, Row]:
    """Rows that were measured here before, of the same model."""
    path = output.with_suffix(".json")
    stored = json.loads(path.read_text()) if path.is_file() else {}
    if stored.get("hardware") != hardware:
        return {}
    return {row["form"]: Row(**row) for row in stored["rows"]}


def save(output: Path, hardware: str, rows: list[Row], times: dict[str, float]) -> None:
    """Write what there is."""
    numbers = {"hardware": hardware, "rows": [dataclasses.asdict(row) for row in rows], "product_s": times}
    output.with_suffix(".json").write_text(json.dumps(numbers, indent=1) + "\n", encoding="utf-8")
    text = f"{hardware}; {rows[0].tokens} tokens\n\n{table(rows, times)}\n"
    output.with_suffix(".md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
