"""Our train step against a bare Megatron-core loop over the same packs, in one process, taking turns.

usage: train_step_ratio.py [--rounds 8] [--hidden 256] [--head-size 32] [--layers 4] [--tokens 1024] [--bf16]
[--group 1 --prompt 140 --answer 12] [--output benchmarks/results/train-step-ratio]

The bare loop does what nobody can leave out: the schedule's forward and backward passes with Megatron's own
vocabulary-parallel cross-entropy over ready tensors, gradient reduction, the optimizer's step. Ours adds cutting and
packing the samples, log-prob and entropy of each token, the clipped loss and its metrics. Ratio: bare / ours, of the
medians; 1 would be free. With --group G the samples come in groups of one prompt, which ours computes once; the bare
loop has each sample whole, in packs of as many tokens: above 1 is what shared prompts are worth. On the GPU,
where there is one.
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
from slime_like.config.model import ModelConfig
from slime_like.config.optimizer import OptimizerConfig
from slime_like.config.placement import PlacementConfig
from slime_like.config.rollout import RolloutConfig
from slime_like.config.run import RunConfig
from slime_like.records import TrainSample, per_token

GOAL = 0.97


def make_samples(args: argparse.Namespace) -> list[TrainSample]:
    """Log-normal lengths around 200 tokens; with --group so many answers of --answer tokens to each prompt."""
    generator, samples = np.random.default_rng(0), []
    prompt = generator.integers(0, args.vocabulary, args.prompt)
    for index in range(args.samples):
        if args.group == 1:
            length = int(np.clip(generator.lognormal(5.3, 0.5), 16, 600))
            start, tokens = length // 4, generator.integers(0, args.vocabulary, length)
        else:
            if index % args.group == 0:
                prompt = generator.integers(0, args.vocabulary, args.prompt)
            start, tokens = args.prompt, np.append(prompt, generator.integers(0, args.vocabulary, args.answer))
        mask = np.ones(len(tokens), dtype=np.int8)
        mask[:start] = 0
        samples.append(
            TrainSample(
                prompt_index=index // args.group, sample_index=index % args.group, tokens=tokens.astype(np.int32),
                loss_mask=mask, engine_logprobs=np.full(len(tokens), -5, dtype=np.float32),
                weight_versions=np.zeros(len(tokens), dtype=np.int32), reward=0.0,
                advantages=per_token(float(generator.normal()), mask), weights=per_token(1.0, mask),
            )
        )  # fmt: skip
    return samples


def make_config(args: argparse.Namespace, folder: str) -> RunConfig:
    """A dense model of the asked size on one rank."""
    model = ModelConfig(
        num_layers=args.layers, hidden_size=args.hidden, ffn_hidden_size=3 * args.hidden,
        num_attention_heads=args.hidden // args.head_size, kv_channels=args.head_size, vocab_size=args.vocabulary,
        swiglu=True, disable_bias_linear=True, normalization="RMSNorm", qk_layernorm=True,
        untie_embeddings_and_output_weights=True,
    )  # fmt: skip
    return RunConfig(
        placement=PlacementConfig(actor_num_gpus_per_node=1),
        model=model,
        checkpoint=CheckpointConfig(hf_checkpoint=folder, load=folder),
        data=DataConfig(num_rollout=1000),
        rollout=RolloutConfig(rollout_batch_size=args.samples // args.group, n_samples_per_prompt=args.group),
        batch=BatchConfig(use_dynamic_batch_size=True, max_tokens_per_gpu=args.tokens, log_probs_chunk_size=args.chunk),
        optimizer=OptimizerConfig(lr=1e-5, bf16=args.bf16),
    )


def write_model(config: ModelConfig, folder: str) -> None:
    """Random weights of that model as an HF folder."""
    from transformers import AutoModelForCausalLM, Qwen3Config

    sizes = {
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_hidden_size,
        "num_hidden_layers": config.num_layers,
    }
    sizes |= {
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_attention_heads,
        "head_dim": config.kv_channels,
    }
    AutoModelForCausalLM.from_config(
        Qwen3Config(vocab_size=config.vocab_size, tie_word_embeddings=False, **sizes)
    ).save_pretrained(folder)


def bare_step(worker, packs, targets) -> None:
    """What a loop on Megatron-core alone would do with these packs."""
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    def forward_step(iterator, model):
        pack, target = next(iterator)
        logits = model(pack.tokens, pack.positions, None, packed_seq_params=pack.sequences)

        def loss(output):
            losses = vocab_parallel_cross_entropy(output.transpose(0, 1).float(), target)
            return losses.mean(), {}

        return logits, loss

    get_forward_backward_func()(
        forward_step_func=forward_step, data_iterator=iter(zip(packs, targets, strict=True)), model=worker.model,
        num_microbatches=len(packs),
        seq_length=max(pack.tokens.size(1) for pack in packs), micro_batch_size=1, forward_only=False,
    )  # fmt: skip
    finalize_model_grads(list(worker.model))
    worker.optimizer.step()
    worker.scheduler.step(increment=1)
    for chunk in worker.model:
        chunk.zero_grad_buffer()
    worker.optimizer.zero_grad()


def measure(args: argparse.Namespace) -> dict:
    """Medians of both, taking turns; the first round of each is left out."""
    from slime_like.megatron_backend.rl_recipe import recipe_of
    from slime_like.megatron_backend.step.batch import StepCutter
    from slime_like.megatron_backend.step.forward import device_of
    from slime_like.megatron_backend.worker import TrainWorker
    from slime_like.utils.net import free_port

    with tempfile.TemporaryDirectory() as folder:
        config = make_config(args, folder)
        write_model(config.model, folder)
        worker = TrainWorker(
            config, rank=0, world_size=1, local_rank=0, master_address="127.0.0.1", master_port=free_port()
        )
        parameters = worker.start()["num_parameters"]
    samples = make_samples(args)
    whole = dataclasses.replace(config, batch=dataclasses.replace(config.batch, share_prompt="off"))
    packs = StepCutter(whole, device=device_of(worker.stage))(samples).packs
    computed = worker.prepare(samples).num_computed_tokens
    targets = [pack.targets[:, None] for pack in packs]
    times: dict[str, list[float]] = {"bare": [], "ours": []}
    for number in range(args.rounds + 1):
        turns = [
            ("bare", lambda: bare_step(worker, packs, targets)),
            ("ours", lambda step=number: recipe_of(worker).train(step, samples)),
        ]
        for name, step in turns if number % 2 else reversed(turns):
            started = time.perf_counter()
            step()
            _wait_for_device()
            times[name].append(time.perf_counter() - started)
    worker.close()
    bare, ours = (statistics.median(times[name][1:]) for name in ("bare", "ours"))
    least_bare, least_ours = (min(times[name][1:]) for name in ("bare", "ours"))
    tokens = sum(len(sample.tokens) for sample in samples)
    return {
        "bare_s": bare,
        "ours_s": ours,
        "ratio": bare / ours,
        "ratio_of_minima": least_bare / least_ours,
        "tokens": tokens,
        "our_tokens": computed,
        "packs": len(packs),
        "parameters": parameters,
        "bare_tflops": 6e-12 * parameters * tokens / bare,
    }


def _wait_for_device() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default, text in (
        ("rounds", 8, "Steps of each that are measured."),
        ("hidden", 256, "Hidden size."),
        ("head-size", 32, "Channels of a head."),
        ("layers", 4, "Layers."),
        ("vocabulary", 8192, "Vocabulary."),
        ("samples", 16, "Samples of a step."),
        ("tokens", 1024, "--max-tokens-per-gpu."),
        ("chunk", -1, "--log-probs-chunk-size."),
        ("group", 1, "Samples of one prompt; 1: each by itself, of other lengths."),
        ("prompt", 140, "Tokens of a prompt, with --group."),
        ("answer", 12, "Tokens of an answer, with --group."),
    ):
        parser.add_argument(f"--{name}", type=int, default=default, help=text)
    parser.add_argument("--bf16", action="store_true", help="Weights and arithmetic in bf16.")
    parser.add_argument("--output", type=Path, help="Write OUTPUT.json and OUTPUT.md.")
    args = parser.parse_args()
    if args.samples % args.group:
        parser.error(f"--samples {args.samples}: whole groups of {args.group}")
    timing, goal = measure(args), GOAL if args.group == 1 else 1.0
    shape = (
        f"{timing['parameters'] / 1e6:.1f}M parameters in {'bf16' if args.bf16 else 'fp32'}, hidden {args.hidden},"
        f" {args.layers} layers, vocabulary {args.vocabulary}, {timing['tokens']} tokens in"
        f" {timing['packs']} packs"
        + (f", of which ours computes {timing['our_tokens']}" if timing["our_tokens"] < timing["tokens"] else "")
    )
    lines = [
        "| shape | bare mcore loop | our train step | bare / ours (medians) | of minima |",
        "|---|---|---|---|---|",
    ]
    lines.append(
        f"| {shape} | {timing['bare_s']:.3f} s | {timing['ours_s']:.3f} s | {timing['ratio']:.3f} |"
        f" {timing['ratio_of_minima']:.3f} |"
    )
    speed = f"{timing['tokens'] / timing['bare_s']:.0f} tokens/s, {timing['bare_tflops']:.3g} TFLOP/s"
    lines += ["", f"bare: {speed} (6 x parameters x tokens)"]
    lines += ["", f"goal {goal}: {'met' if timing['ratio'] >= goal else 'MISSED'}"]
    print("\n".join(lines))
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        hardware = hardware_name()
        args.output.with_suffix(".json").write_text(
            json.dumps({"hardware": hardware, "shape": shape, **timing}, indent=1) + "\n", encoding="utf-8"
        )
        args.output.with_suffix(".md").write_text(f"{hardware}\n\n" + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
