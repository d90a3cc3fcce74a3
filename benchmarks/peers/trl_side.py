"""TRL's side, in TRL's own environment: GRPO steps with GRPOTrainer on a CPU, or its loss on fixed samples.

usage: trl_side.py steps --model FOLDER --shape 4x8x140x12 --steps 3 --output FILE.json
       trl_side.py loss --model FOLDER --shape 4x8x140x12 --output FILE.json
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import trl
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from work import Shape, fixed_samples, noise, prompt, reward

CLIP = 0.2


class TimedTrainer(GRPOTrainer):
    """Notes the seconds of each generation (with rewards and advantages)."""

    generating: list[float]

    def _generate_and_score_completions(self, inputs):
        started = time.perf_counter()
        outputs = super()._generate_and_score_completions(inputs)
        self.generating.append(time.perf_counter() - started)
        self.answer_tokens = int(outputs["completion_mask"].sum())
        self.prompt_tokens = int(outputs["prompt_mask"].sum())
        return outputs


class StepTimes(TrainerCallback):
    """Seconds of each optimizer step, generation included."""

    def __init__(self):
        self.seconds: list[float] = []

    def on_step_begin(self, args, state, control, **kwargs):
        """One begins."""
        self._started = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        """One ended: weights are stepped and gradients cleared."""
        self.seconds.append(time.perf_counter() - self._started)


def trainer_of(options: argparse.Namespace, shape: Shape, folder: str) -> TimedTrainer:
    """Its defaults, but for what the other side does, too: fp32, no recomputation, the loss's mean over samples."""
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    config = GRPOConfig(
        output_dir=folder, use_cpu=True, bf16=False, fp16=False, gradient_checkpointing=False,
        per_device_train_batch_size=options.batch, gradient_accumulation_steps=shape.num_samples // options.batch,
        num_generations=shape.samples, max_completion_length=shape.new_tokens, max_steps=options.steps + 1,
        temperature=1.0, loss_type="grpo", epsilon=CLIP, beta=0.0, learning_rate=1e-6, lr_scheduler_type="constant",
        weight_decay=0.0, max_grad_norm=1.0, shuffle_dataset=False, save_strategy="no", report_to=[], logging_steps=1,
        disable_tqdm=True, dataloader_num_workers=0, seed=0,
    )  # fmt: skip
    count = shape.prompts * (options.steps + 1)
    rows = Dataset.from_list([{"prompt": prompt(number, shape.prompt_tokens)} for number in range(count)])
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32)
    trainer = TimedTrainer(
        model=model, processing_class=tokenizer, args=config, train_dataset=rows,
        reward_funcs=lambda completions, **_: [reward(text) for text in completions],
    )  # fmt: skip
    trainer.generating = []
    return trainer


def steps(options: argparse.Namespace, shape: Shape) -> dict:
    """Seconds of each step but the first, and of its generation."""
    with tempfile.TemporaryDirectory() as folder:
        trainer, times = trainer_of(options, shape, folder), StepTimes()
        trainer.add_callback(times)
        trainer.train()
    tokens = {"prompt_tokens": trainer.prompt_tokens, "new_tokens": trainer.answer_tokens}
    if trainer.answer_tokens != shape.num_samples * shape.new_tokens:
        raise SystemExit(f"trl_side: other work than asked for: {tokens} in a step of {shape}")
    pairs = list(zip(times.seconds, trainer.generating, strict=True))[1:]
    return {
        "generate_s": [generate for _, generate in pairs],
        "train_s": [whole - generate for whole, generate in pairs],
        "step_s": [whole for whole, _ in pairs],
        **tokens,
    }


def loss(options: argparse.Namespace, shape: Shape) -> dict:
    """The loss on fixed samples, its gradient's norm, and the old log-probs that it was computed with."""
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_of(options, shape, folder)
    model = trainer.model
    model.eval()
    samples = fixed_samples(shape, model.config.vocab_size)
    width = max(len(sample["answer"]) for sample in samples)

    def padded(rows: list, dtype: torch.dtype) -> torch.Tensor:
        return torch.stack([torch.tensor([*row, *([0] * (width - len(row)))], dtype=dtype) for row in rows])

    prompts = torch.tensor([sample["prompt"] for sample in samples])
    answers = padded([sample["answer"] for sample in samples], torch.int64)
    mask = padded([[1] * len(sample["answer"]) for sample in samples], torch.int64)
    whole, seen = torch.cat([prompts, answers], dim=1), torch.cat([torch.ones_like(prompts), mask], dim=1)
    with torch.no_grad():
        own, _, _ = trainer._get_per_token_logps_and_entropies(model, whole, seen, width, batch_size=shape.samples)
    old = [
        (own[index, : len(sample["answer"])].numpy() + noise(index, len(sample["answer"]))).astype(np.float32)
        for index, sample in enumerate(samples)
    ]
    inputs = {
        "prompt_ids": prompts, "prompt_mask": torch.ones_like(prompts), "completion_ids": answers,
        "completion_mask": mask, "advantages": torch.tensor([sample["advantage"] for sample in samples]),
        "old_per_token_logps": padded([row.tolist() for row in old], torch.float32), "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    value = trainer._compute_loss(model, inputs)
    value.backward()
    norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
    return {"loss": value.item(), "grad_norm": norm.item(), "old": [row.tolist() for row in old]}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("steps", "loss"))
    parser.add_argument("--model", required=True, help="HF folder.")
    parser.add_argument("--shape", default="4x8x140x12", help="Prompts x samples x prompt tokens x new tokens.")
    parser.add_argument("--steps", type=int, default=3, help="Measured ones.")
    parser.add_argument("--batch", type=int, default=8, help="Samples of a forward and backward pass.")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    shape = Shape.of(options.shape)
    result = (steps if options.what == "steps" else loss)(options, shape)
    versions = {"trl": trl.__version__, "torch": torch.__version__, "threads": torch.get_num_threads()}
    options.output.write_text(json.dumps(versions | result), encoding="utf-8")


if __name__ == "__main__":
    main()
