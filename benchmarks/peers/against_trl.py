"""A GRPO step of ours against TRL's GRPOTrainer on a CPU: the same model, prompts and numbers of tokens, in turns.

usage: python -m benchmarks.peers.against_trl steps --model FOLDER [--shape 4x8x140x12] [--turns 2] [--ranks 1]
                                                     [--output FILE.json]
       python -m benchmarks.peers.against_trl loss --model FOLDER [--shape 4x8x140x12] [--output FILE.json]

steps: whole steps, generating included, of `train.py` (real SGLang and Megatron, colocated) and of GRPOTrainer, each in
a process of its own, one after the other, with the same threads; medians over all turns without each process's first
step. loss: of fixed samples with clipped ratios, and the norm of its gradient, which both sides compute. TRL stands in
an environment of its own (benchmarks/peers/setup.sh).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from benchmarks.peers.work import Shape, endless_model, fixed_samples, prompt
from benchmarks.step_phases import cpu_name

ROOT = Path(__file__).resolve().parents[2]
SIDE = Path(__file__).with_name("trl_side.py")
#: Where setup.sh puts it.
TRL_PYTHON = Path(os.environ.get("TRL_PYTHON", Path.home() / ".cache/slime-like-peers/trl/bin/python"))
#: How many times as many samples a second are asked for, by shape.
GOALS = {"4x8x140x12": 3.0, "4x8x32x128": 1.5}
LOSS_GOAL = 1e-5
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"}


def of_trl(what: str, folder: str, options: argparse.Namespace) -> dict:
    """What trl_side.py says."""
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "trl.json"
        command = [str(TRL_PYTHON), str(SIDE), what, "--model", folder, "--shape", options.shape]
        command += ["--steps", str(options.steps), "--batch", str(options.batch), "--output", str(output)]
        _run(command, options, {"PYTHONPATH": ""})
        return json.loads(output.read_text(encoding="utf-8"))


def _run(command: list[str], options: argparse.Namespace, more: dict[str, str]) -> None:
    environment = os.environ | OFFLINE | {"OMP_NUM_THREADS": str(options.threads)} | more
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=options.timeout_s, check=False
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with status {done.returncode}:\n{done.stderr[-3000:]}")


def our_steps(folder: str, options: argparse.Namespace, shape: Shape) -> dict:
    """Seconds of each step of train.py but the first, by part."""
    with tempfile.TemporaryDirectory() as scratch:
        rows = Path(scratch) / "rows.jsonl"
        texts = [prompt(number, shape.prompt_tokens) for number in range(shape.prompts * (options.steps + 1))]
        rows.write_text("".join(json.dumps({"prompt": text, "label": ""}) + "\n" for text in texts), encoding="utf-8")
        command = [
            sys.executable, "train.py", "--colocate", "--actor-num-nodes", "1",
            "--actor-num-gpus-per-node", str(options.ranks), "--rollout-num-gpus-per-engine", "1",
            "--hf-checkpoint", folder, "--prompt-data", str(rows),
            "--input-key", "prompt", "--label-key", "label", "--num-rollout", str(options.steps + 1),
            "--rollout-batch-size", str(shape.prompts), "--n-samples-per-prompt", str(shape.samples),
            "--num-steps-per-rollout", "1", "--rollout-max-response-len", str(shape.new_tokens),
            "--rollout-temperature", "1.0", "--custom-rm-path", "benchmarks.peers.reward.reward",
            "--advantage-estimator", "grpo", "--eps-clip", "0.2", "--lr", "1e-6", "--lr-decay-style", "constant",
            "--weight-decay", "0", "--clip-grad", "1.0", "--use-dynamic-batch-size",
            "--max-tokens-per-gpu", str(options.tokens), "--no-bf16", "--run-dir", f"{scratch}/run",
        ]  # fmt: skip
        of_each = str(max(1, options.threads // options.ranks))
        threads = {"OMP_NUM_THREADS": of_each, "SLIME_LIKE_ENGINE_OMP_THREADS": of_each}
        _run(command, options, threads | {"RAY_ADDRESS": "local"})
        lines = [json.loads(line) for line in Path(scratch, "run/metrics.jsonl").read_text("utf-8").splitlines()]
    of_kind = {kind: [line for line in lines if line["kind"] == kind] for kind in ("rollout", "train", "step")}
    tokens = of_kind["rollout"][-1]["rollout/generated_tokens"]
    trained = of_kind["train"][-1]["train/tokens"]
    if tokens != shape.num_samples * shape.new_tokens or trained != tokens + shape.num_samples * shape.prompt_tokens:
        raise SystemExit(
            f"against_trl: other work than asked for: {tokens:g} new, {trained:g} trained tokens of {shape}"
        )
    return {
        "generate_s": [line["rollout/seconds"] for line in of_kind["rollout"]][1:],
        "train_s": [line["train/seconds"] for line in of_kind["train"]][1:],
        "step_s": [line["step/seconds"] for line in of_kind["step"]][1:],
        "computed_tokens": of_kind["train"][-1]["perf/computed_tokens"],
        "new_tokens": tokens,
    }


def steps(options: argparse.Namespace, shape: Shape, folder: str) -> dict:
    """Both in turns, the first one first every other time."""
    sides = {"ours": lambda: our_steps(folder, options, shape), "trl": lambda: of_trl("steps", folder, options)}
    turns: dict[str, list[dict]] = {name: [] for name in sides}
    for turn in range(options.turns):
        for name in sides if turn % 2 == 0 else reversed(sides):
            turns[name].append(sides[name]())
    medians = {
        name: {
            part: statistics.median(value for turn in of_side for value in turn[part])
            for part in ("generate_s", "train_s", "step_s")
        }
        for name, of_side in turns.items()
    }
    faster = {part: medians["trl"][part] / medians["ours"][part] for part in medians["ours"]}
    return {
        **{name: row | {"samples_per_second": shape.num_samples / row["step_s"]} for name, row in medians.items()},
        "faster": faster,
        "goal": GOALS.get(options.shape),
        "computed_tokens": turns["ours"][0]["computed_tokens"],
        "tokens": shape.num_samples * (shape.prompt_tokens + shape.new_tokens),
        "turns": turns,
    }


def our_loss(folder: str, options: argparse.Namespace, shape: Shape, old: list[list[float]]) -> dict:
    """The same samples through one trainer rank: loss and gradient's norm."""
    from slime_like.config.batch import BatchConfig
    from slime_like.config.checkpoint import CheckpointConfig
    from slime_like.config.data import DataConfig
    from slime_like.config.hf_model import model_from_hf, read_hf_config
    from slime_like.config.loss import LossConfig
    from slime_like.config.model import ModelConfig
    from slime_like.config.optimizer import OptimizerConfig
    from slime_like.config.placement import PlacementConfig
    from slime_like.config.rollout import RolloutConfig
    from slime_like.config.run import RunConfig
    from slime_like.megatron_backend.step.loss_spec import LossSpec
    from slime_like.megatron_backend.worker import TrainWorker
    from slime_like.records import BASE, TrainSample, per_token
    from slime_like.utils.net import free_port

    model = model_from_hf(read_hf_config(folder), ModelConfig())
    config = RunConfig(
        placement=PlacementConfig(actor_num_gpus_per_node=1), model=model,
        checkpoint=CheckpointConfig(hf_checkpoint=folder), data=DataConfig(num_rollout=1),
        rollout=RolloutConfig(rollout_batch_size=shape.prompts, n_samples_per_prompt=shape.samples),
        batch=BatchConfig(use_dynamic_batch_size=True, max_tokens_per_gpu=options.tokens),
        loss=LossConfig(use_rollout_logprobs=True),  # what is given as the engine's is what ratios are taken against
        optimizer=OptimizerConfig(lr=1e-6, bf16=False),
    )  # fmt: skip
    records = []
    for number, sample in enumerate(fixed_samples(shape, model.vocab_size)):
        start, length = len(sample["prompt"]), len(sample["answer"])
        mask = np.repeat([0, 1], [start, length]).astype(np.int8)
        records.append(
            TrainSample(
                prompt_index=number // shape.samples, sample_index=number % shape.samples,
                tokens=np.array(sample["prompt"] + sample["answer"], dtype=np.int32), loss_mask=mask,
                engine_logprobs=np.concatenate([np.zeros(start), old[number]]).astype(np.float32),
                weight_versions=np.zeros(start + length, dtype=np.int32), reward=0.0,
                advantages=per_token(sample["advantage"], mask), weights=per_token(1.0, mask),
            )
        )  # fmt: skip
    worker = TrainWorker(
        config, rank=0, world_size=1, local_rank=0, master_address="127.0.0.1", master_port=free_port()
    )
    worker.start()
    batch = worker.prepare(records)
    metrics = worker.forward_backward(batch, LossSpec(), weights=BASE).metrics
    norm = worker.optim_step(None, weights=BASE)["train/grad_norm"]
    worker.close()
    return {
        "loss": metrics["train/loss"], "grad_norm": norm, "clip_ratio": metrics["train/clip_ratio"],
        "computed_tokens": batch.num_computed_tokens, "tokens": batch.num_tokens,
    }  # fmt: skip


def loss(options: argparse.Namespace, shape: Shape, folder: str) -> dict:
    """Both losses of the same samples, and how far they are apart, as shares of TRL's."""
    theirs = of_trl("loss", folder, options)
    ours = our_loss(folder, options, shape, theirs.pop("old"))
    apart = {name: abs(ours[name] - theirs[name]) / abs(theirs[name]) for name in ("loss", "grad_norm")}
    return {"ours": ours, "trl": theirs, "apart": apart, "goal": LOSS_GOAL, "met": apart["loss"] <= LOSS_GOAL}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("steps", "loss"))
    parser.add_argument("--model", type=Path, required=True, help="HF folder, as SmolLM2-135M-Instruct's.")
    for name, default, text in (
        ("shape", "4x8x140x12", "Prompts x samples of each x tokens of a prompt x new tokens."),
        ("steps", 2, "Measured steps of each process."),
        ("turns", 2, "Processes of each side."),
        ("batch", 8, "TRL's samples of a forward and backward pass."),
        ("tokens", 2048, "Our --max-tokens-per-gpu."),
        ("threads", os.cpu_count() or 1, "Of each side, which run one after the other."),
        ("ranks", 1, "Our trainer ranks, and as many engines, which share the threads."),
        ("timeout-s", 1500, "Most seconds of a process."),
    ):
        parser.add_argument(f"--{name}", type=type(default), default=default, help=text)
    parser.add_argument("--output", type=Path, help="Write the result here.")
    options = parser.parse_args()
    if not TRL_PYTHON.exists():
        raise SystemExit(f"against_trl: no {TRL_PYTHON}. Fix: bash benchmarks/peers/setup.sh, or set TRL_PYTHON.")
    shape = Shape.of(options.shape)
    with tempfile.TemporaryDirectory() as scratch:
        folder = endless_model(options.model, Path(scratch) / "model")
        result = (steps if options.what == "steps" else loss)(options, shape, folder)
    hardware = f"{cpu_name()}, {options.threads} threads" + f", of {options.ranks} ranks" * (options.ranks > 1)
    result = {"what": options.what, "shape": options.shape, "model": options.model.name, "hardware": hardware} | result
    print(json.dumps({name: value for name, value in result.items() if name != "turns"}, indent=1))
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
