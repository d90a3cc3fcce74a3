"""A trainer's step with shared prompts against the same step without, in one process, taking turns.

usage: share_prompt.py [--hidden 576] [--layers 30] [--rounds 3] [--shape 4x8x140x12] [--output
benchmarks/results/share-prompt]

A shape is prompts x samples x prompt tokens x answer tokens. The step is GRPO's with one optimizer step: cutting and
packing, forward, backward, Adam. Both trainers start from the same random Llama and see the same samples; the optimizer
is stepped in both. The bound is the ratio of the tokens that are computed; a step's fixed part (Adam, norms of
gradients) and attention, which looks at as many pairs of answer and prompt as before, keep from it: so forward and
backward are timed by themselves, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from step_phases import hardware_name

from slime_like.config.batch import BatchConfig
from slime_like.config.checkpoint import CheckpointConfig
from slime_like.config.data import DataConfig
from slime_like.config.hf_model import model_from_hf, read_hf_config
from slime_like.config.model import ModelConfig
from slime_like.config.optimizer import OptimizerConfig
from slime_like.config.placement import PlacementConfig
from slime_like.config.rollout import RolloutConfig
from slime_like.config.run import RunConfig
from slime_like.records import BASE, TrainSample, per_token

HEAD_SIZE = 64


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a step trains on."""

    prompts: int
    samples: int
    prompt_tokens: int
    answer_tokens: int

    @classmethod
    def of(cls, text: str) -> Shape:
        """From 4x8x140x12."""
        return cls(*(int(part) for part in text.split("x")))

    @property
    def tokens(self) -> int:
        """Of all samples."""
        return self.prompts * self.samples * (self.prompt_tokens + self.answer_tokens)

    @property
    def longest_group(self) -> int:
        """Tokens of one prompt's samples, the prompt once."""
        return self.prompt_tokens + self.samples * self.answer_tokens

    def draw(self, vocabulary: int) -> list[TrainSample]:
        """Random tokens and advantages."""
        generator, samples = np.random.default_rng(0), []
        for prompt_index in range(self.prompts):
            prompt = generator.integers(0, vocabulary, self.prompt_tokens)
            for index in range(self.samples):
                tokens = np.concatenate([prompt, generator.integers(0, vocabulary, self.answer_tokens)])
                mask = np.repeat([0, 1], [self.prompt_tokens, self.answer_tokens]).astype(np.int8)
                samples.append(
                    TrainSample(
                        prompt_index=prompt_index, sample_index=index, tokens=tokens.astype(np.int32), loss_mask=mask,
                        engine_logprobs=np.full(len(tokens), -5, dtype=np.float32) * mask,
                        weight_versions=np.zeros(len(tokens), dtype=np.int32), reward=0.0,
                        advantages=per_token(float(generator.normal()), mask), weights=per_token(1.0, mask),
                    )
                )  # fmt: skip
        return samples


def write_model(args: argparse.Namespace, folder: str) -> None:
    """A random Llama of SmolLM2's proportions as an HF folder."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    heads = args.hidden // HEAD_SIZE
    sizes = {
        "hidden_size": args.hidden,
        "intermediate_size": args.hidden * 8 // 3,
        "num_hidden_layers": args.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 3 if heads % 3 == 0 else heads,
        "head_dim": HEAD_SIZE,
    }
    AutoModelForCausalLM.from_config(
        LlamaConfig(vocab_size=args.vocabulary, tie_word_embeddings=True, **sizes)
    ).save_pretrained(folder)


def make_config(folder: str, shape: Shape, cap: int, share_prompt: str, *, bf16: bool) -> RunConfig:
    """One rank, dynamic batches of at most `cap` tokens."""
    return RunConfig(
        placement=PlacementConfig(actor_num_gpus_per_node=1),
        model=model_from_hf(read_hf_config(folder), ModelConfig()),
        checkpoint=CheckpointConfig(hf_checkpoint=folder, load=folder),
        data=DataConfig(num_rollout=1000),
        rollout=RolloutConfig(rollout_batch_size=shape.prompts, n_samples_per_prompt=shape.samples),
        batch=BatchConfig(use_dynamic_batch_size=True, max_tokens_per_gpu=cap, share_prompt=share_prompt),
        optimizer=OptimizerConfig(lr=1e-6, bf16=bf16),
    )


def step(worker, samples: list[TrainSample]) -> dict[str, float]:
    """One train step in its parts: seconds, tokens that were computed, the loss and the gradient's norm."""
    from slime_like.megatron_backend.rl_recipe import PolicyRecipe
    from slime_like.megatron_backend.step.loss_spec import LossSpec

    started, cpu = time.perf_counter(), time.process_time()
    (batch,) = PolicyRecipe(worker).ready([samples])
    metrics = worker.forward_backward(batch, LossSpec(), weights=BASE, accumulates=False).metrics
    passed = time.process_time()
    metrics |= worker.optim_step(None, weights=BASE)
    return {
        "seconds": time.perf_counter() - started, "cpu_s": time.process_time() - cpu, "pass_cpu_s": passed - cpu,
        "tokens": batch.num_computed_tokens,
        "packs": len(batch.packs), "loss": metrics["train/pg_loss"], "grad_norm": metrics["train/grad_norm"],
    }  # fmt: skip


def measure(args: argparse.Namespace, shape: Shape) -> dict:
    """Both ways in turns, each from the same weights in a trainer of its own; the first round is left out."""
    from slime_like.megatron_backend.worker import TrainWorker
    from slime_like.utils.net import free_port

    results: dict[str, list[dict]] = {"off": [], "auto": []}
    samples = shape.draw(args.vocabulary)
    with tempfile.TemporaryDirectory() as folder:
        write_model(args, folder)
        for way in ("off", "auto") * args.turns:
            worker = TrainWorker(
                make_config(folder, shape, args.cap, way, bf16=args.bf16),
                rank=0, world_size=1, local_rank=0, master_address="127.0.0.1", master_port=free_port(),
            )  # fmt: skip
            parameters = worker.start()["num_parameters"]
            steps = [step(worker, samples) for _ in range(args.rounds + 1)]
            results[way] += steps[1:]
            worker.close()
    plain, shared = (
        {name: statistics.median(one[name] for one in steps) for name in steps[0]} for steps in results.values()
    )
    bound = plain["tokens"] / shared["tokens"]
    return {
        "shape": dataclasses.asdict(shape),
        "parameters": parameters,
        "off": plain,
        "auto": shared,
        "bound": bound,
        "step": plain["seconds"] / shared["seconds"],
        "step_cpu": plain["cpu_s"] / shared["cpu_s"],
        "passes_cpu": plain["pass_cpu_s"] / shared["pass_cpu_s"],
        "loss_difference": abs(plain["loss"] - shared["loss"]),
        "grad_norm_difference": abs(plain["grad_norm"] / shared["grad_norm"] - 1),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default, text in (
        ("rounds", 2, "Steps of each turn that are measured."),
        ("turns", 1, "Times that both ways take turns."),
        ("hidden", 576, "Hidden size; heads have 64 channels."),
        ("layers", 30, "Layers."),
        ("vocabulary", 49152, "Vocabulary."),
        ("cap", 2048, "--max-tokens-per-gpu."),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=text)
    parser.add_argument("--bf16", action="store_true", help="Weights and arithmetic in bf16.")
    parser.add_argument("--shape", nargs="+", default=["4x8x140x12", "1x32x32x128"], help="Prompts x samples x …")
    parser.add_argument("--output", type=Path, help="Write OUTPUT.json and OUTPUT.md.")
    args = parser.parse_args()
    rows = [measure(args, Shape.of(text)) for text in args.shape]
    columns = (
        "prompts x samples x prompt x answer tokens", "tokens: plain, shared", "bound", "step: plain, shared", "faster",
        "in CPU seconds, of the bound", "passes alone, of the bound", "loss, gradient norm apart",
    )  # fmt: skip
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for text, row in zip(args.shape, rows, strict=True):
        off, auto = row["off"], row["auto"]
        lines.append(
            f"| {text} | {off['tokens']:.0f}, {auto['tokens']:.0f} | {row['bound']:.2f} | {off['seconds']:.2f} s,"
            f" {auto['seconds']:.2f} s | {row['step']:.2f} x | {row['step_cpu']:.2f} x,"
            f" {row['step_cpu'] / row['bound']:.0%} | {row['passes_cpu']:.2f} x,"
            f" {row['passes_cpu'] / row['bound']:.0%} | {row['loss_difference']:.1e},"
            f" {row['grad_norm_difference']:.1e} |"
        )
    title = (
        f"Llama of {rows[0]['parameters'] / 1e6:.0f}M parameters ({args.layers} layers, hidden {args.hidden},"
        f" vocabulary {args.vocabulary}), --max-tokens-per-gpu {args.cap}, {'bf16' if args.bf16 else 'fp32'},"
        f" one thread, {hardware_name()}"
    )
    text = f"{title}\n\n" + "\n".join(lines) + "\n"
    print(text)
    if args.output:
        args.output.with_suffix(".json").write_text(json.dumps({"title": title, "rows": rows}, indent=1) + "\n")
        args.output.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
