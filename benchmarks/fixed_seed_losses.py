"""Losses of fixed seeds to the last bit: supervised runs, and replays of recorded rollouts under several algorithms and
layouts.

usage: fixed_seed_losses.py [--select REGEX] [--write FILE.json] [--compare FILE.json]

Each row is a whole `train.py` run without engines, on samples drawn from a seed. A refactor must not move one bit of
any number but
times: write before it, compare after it, on the same host (another one may round otherwise). Exit status 1 if something
moved.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from slime_like.records import COMPLETED, TRUNCATED, Prompt, Sample, SampleGroup
from slime_like.rollout.debug_data import save_rollout

ROOT = Path(__file__).resolve().parent.parent

NUM_ROLLOUT, NUM_PROMPTS, NUM_SAMPLES = 3, 4, 4
VOCAB = 300
LAYERS, TOPK, EXPERTS = 4, 2, 8  # of models/tiny-qwen3-moe

COMMON = [
    "--apply-chat-template", "--input-key", "prompt", "--label-key", "label", "--num-rollout", str(NUM_ROLLOUT),
    "--rollout-batch-size", str(NUM_PROMPTS), "--use-dynamic-batch-size", "--max-tokens-per-gpu", "128", "--lr", "1e-3",
    "--adam-beta2", "0.98",
    "--seed", "7", "--share-prompt", "off",  # which adds up in another order
]  # fmt: skip
REPLAY = ["--debug-train-only", "--n-samples-per-prompt", str(NUM_SAMPLES), "--num-steps-per-rollout", "2"]
REWARD_KL = ["--kl-coef", "0.01", "--ref-load", "{model}", "--normalize-advantages"]
KL = ["--use-kl-loss", "--kl-loss-coef", "0.01", "--kl-loss-type", "k3", "--ref-load", "{model}"]
TP2, PP2, DP2 = (
    ["--actor-num-gpus-per-node", "2", *split]
    for split in (
        ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
        ["--pipeline-model-parallel-size", "2"],
        ["--balance-data"],
    )
)

#: Name -> flags; {model}, {moe} and {data} are folders.
ROWS: dict[str, list[str]] = {
    "sft": ["--loss-type", "sft_loss", "--n-samples-per-prompt", "1"],
    "sft, dp2": ["--loss-type", "sft_loss", "--n-samples-per-prompt", "1", *DP2],
    "grpo": [*REPLAY, "--eps-clip-high", "0.28"],
    "grpo, kl, tis, entropy, tp2": [*REPLAY, *KL, *TP2, "--use-tis", "--entropy-coef", "0.01"],
    "gspo, pp2": [*REPLAY, *PP2, "--advantage-estimator", "gspo"],
    "cispo, dp2": [*REPLAY, *DP2, "--advantage-estimator", "cispo"],
    "rloo, token mean": [*REPLAY, "--advantage-estimator", "rloo", "--loss-reduction", "token"],
    "reinforce++, kl in the reward": [*REPLAY, *REWARD_KL, "--advantage-estimator", "reinforce_plus_plus"],
    "ppo, critic": [*REPLAY, *REWARD_KL, "--advantage-estimator", "ppo", "--colocate-training"],
    "experts, replayed routing, ep2": [
        *REPLAY, "--actor-num-gpus-per-node", "2", "--expert-model-parallel-size", "2", "--use-rollout-routing-replay",
        "--hf-checkpoint", "{moe}",
    ],
}  # fmt: skip


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--select", default=".", help="Rows whose name has this regular expression.")
    parser.add_argument("--write", type=Path, help="Write every number here.")
    parser.add_argument("--compare", type=Path, help="Compare every number with those written there.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder)
        results = {
            row: run_row(folder, number, flags)
            for number, (row, flags) in enumerate(ROWS.items())
            if re.search(options.select, row)
        }
    for row, steps in results.items():
        print(f"{row}: losses {', '.join(str(step.get('train/loss', step.get('train/value_loss'))) for step in steps)}")
    if options.write:
        options.write.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if not options.compare:
        return 0
    before = json.loads(options.compare.read_text(encoding="utf-8"))
    moved = [line for row in results for line in differences(row, before[row], results[row])]
    print("\n".join(moved) if moved else f"{len(results)} runs: every number is the same to the last bit")
    return 1 if moved else 0


def differences(row: str, before: list[dict], after: list[dict]) -> list[str]:
    """A line for every number of the earlier run that is another one now, or gone."""
    if len(before) != len(after):
        return [f"{row}: {len(before)} train steps before, {len(after)} after"]
    return [
        f"{row}, rollout {number}, {name}: {value!r} before, {now.get(name)!r} after"
        for number, (then, now) in enumerate(zip(before, after, strict=True))
        for name, value in then.items()
        if now.get(name) != value
    ]


def make_inputs(folder: Path) -> None:
    """Models, supervised rows and recorded rollouts, all from seeds."""
    for name, source in (("model", "tiny-qwen3"), ("moe", "tiny-qwen3-moe")):
        command = [
            sys.executable,
            str(ROOT / "scripts/make_tiny_model.py"),
            str(folder / name),
            "--model",
            str(ROOT / "models" / source),
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    subprocess.run(
        [sys.executable, str(ROOT / "scripts/make_tiny_data.py"), "sort4", str(folder / "data")],
        check=True,
        capture_output=True,
        timeout=120,
    )
    for name, routed in (("model", False), ("moe", True)):
        generator = np.random.default_rng(5)
        for number in range(NUM_ROLLOUT):
            save_rollout(
                str(folder / f"{name}-{{rollout_id}}.npz"),
                number,
                [_group(generator, number * NUM_PROMPTS + i, routed) for i in range(NUM_PROMPTS)],
            )


def _group(generator: np.random.Generator, index: int, routed: bool) -> SampleGroup:
    prompt = Prompt(
        index=index, text="", tokens=generator.integers(0, VOCAB, int(generator.integers(4, 12))).astype(np.int32)
    )
    return SampleGroup(
        prompt=prompt, samples=tuple(_sample(generator, prompt, number, routed) for number in range(NUM_SAMPLES))
    )


def _sample(generator: np.random.Generator, prompt: Prompt, number: int, routed: bool) -> Sample:
    start, length = len(prompt.tokens), int(generator.integers(3, 20))
    experts = None
    if routed:
        experts = (
            np.stack([generator.permutation(EXPERTS)[:TOPK] for _ in range((start + length) * LAYERS)])
            .reshape(-1, LAYERS, TOPK)
            .astype(np.int8)
        )
        experts[-1] = -1
    return Sample(
        prompt_index=prompt.index,
        sample_index=number,
        tokens=np.concatenate([prompt.tokens, generator.integers(0, VOCAB, length)]).astype(np.int32),
        loss_mask=np.repeat([0, 1], [start, length]).astype(np.int8),
        engine_logprobs=np.concatenate([np.zeros(start), -5.7 + 0.2 * generator.standard_normal(length)]).astype(
            np.float32
        ),
        weight_versions=np.repeat([-1, 1], [start, length]).astype(np.int32),
        response="",
        status=TRUNCATED if number == 1 else COMPLETED,
        reward=float(generator.integers(0, 3)),
        routed_experts=experts,
    )


def run_row(folder: Path, number: int, flags: list[str]) -> list[dict]:
    """One run's training metrics without times, a dict a rollout."""
    run_dir = folder / f"run-{number}"
    supervised = "sft_loss" in flags
    model = "moe" if "{moe}" in flags else "model"
    inputs = (
        ["--prompt-data", str(folder / "data/sft.jsonl")]
        if supervised
        else ["--load-debug-rollout-data", str(folder / f"{model}-{{rollout_id}}.npz")]
    )
    own = [flag.replace("{model}", str(folder / "model")).replace("{moe}", str(folder / "moe")) for flag in flags]
    if "--hf-checkpoint" not in own:
        own += ["--hf-checkpoint", str(folder / "model")]
    if "--actor-num-gpus-per-node" not in own:
        own += ["--actor-num-gpus-per-node", "1"]
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "RAY_ADDRESS": "local",
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = [sys.executable, str(ROOT / "train.py"), *COMMON, *inputs, *own, "--run-dir", str(run_dir)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\nended with status {done.returncode}:\n{done.stderr[-3000:]}")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [
        {name: value for name, value in line.items() if "seconds" not in name and name != "time"}
        for line in lines
        if line["kind"] == "train"
    ]


if __name__ == "__main__":
    sys.exit(main())
