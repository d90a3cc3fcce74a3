"""The quickstart's task with engines in eight bits: with truncated importance sampling the reward rises as high as with
engines that keep what is trained.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.make_tiny_model import make_model
from scripts.show_rise import rise
from tests.e2e.runs import ROOT, assert_nothing_left, environment, our_processes, run_train

pytestmark = [pytest.mark.e2e, pytest.mark.long_run, pytest.mark.timeout(1800)]

COMMON = [
    "--actor-num-gpus-per-node", 1, "--input-key", "prompt", "--label-key", "label", "--apply-chat-template",
    "--use-dynamic-batch-size", "--max-tokens-per-gpu", 4096, "--adam-beta2", 0.98,
]  # fmt: skip
GRPO = [
    "--colocate", "--rollout-shuffle", "--num-rollout", 40, "--rollout-batch-size", 32, "--n-samples-per-prompt", 8,
    "--num-steps-per-rollout", 2, "--rollout-max-response-len", 6, "--rm-type", "exact", "--advantage-estimator",
    "grpo", "--eps-clip-high", 0.28, "--lr", 2e-4, "--lr-warmup-iters", 6, "--use-tis",
]  # fmt: skip
#: The tiny model with as many key heads as query heads: blocks of fp8 want 128 rows.
KEY_HEADS = 4


def warm_model(folder: Path, seed: int) -> tuple[Path, Path]:
    """(a model that is right in a third of its answers, the folder of the task's data)."""
    data, architecture = folder / "data", folder / "architecture"
    architecture.mkdir()
    config = json.loads((ROOT / "models" / "tiny-qwen3" / "config.json").read_text())
    (architecture / "config.json").write_text(json.dumps(config | {"num_key_value_heads": KEY_HEADS}))
    make_model(folder / "model", seed=seed, model=architecture)
    command = [sys.executable, "scripts/make_tiny_data.py", "sort4", str(data), "--seed", str(seed)]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True, timeout=60)
    run = run_train(
        *COMMON,
        *("--loss-type", "sft_loss", "--hf-checkpoint", folder / "model", "--prompt-data", data / "sft.jsonl"),
        *("--num-rollout", 200, "--rollout-batch-size", 64, "--lr", 1e-3, "--lr-warmup-iters", 10),
        *("--save", folder / "checkpoints", "--save-hf", folder / "hf", "--no-save-optim", "--seed", seed),
        run_dir=folder / "run",
        timeout=400,
    )
    assert run.returncode == 0, run.logs()
    return folder / "hf", data


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_reward_rises_as_high(seed, tmp_path):
    before = our_processes()
    model, data = warm_model(tmp_path, seed)
    last, digests = {}, {}
    for scheme in ("none", "int8", "fp8"):
        run = run_train(
            *(*COMMON, *GRPO, "--rollout-quantization", scheme, "--seed", seed, "--rollout-seed", seed),
            *("--hf-checkpoint", model, "--prompt-data", data / "train.jsonl"),
            run_dir=tmp_path / scheme,
            timeout=500,
        )
        assert run.returncode == 0, run.logs()
        assert_nothing_left(before)
        first, last[scheme] = rise([line["rollout/reward_mean"] for line in run.metrics("rollout")])
        syncs, trained = run.metrics("sync"), run.metrics("train")
        differences = [line["train/logprob_abs_diff"] for line in trained]
        print(
            f"seed {seed}, {scheme}: reward {first:.2f} -> {last[scheme]:.2f}, mean |log-prob difference|"
            f" {sum(differences) / len(differences):.2g}, {syncs[0]['sync/bytes']} bytes a sync"
        )
        assert last[scheme] > first + 0.4
        assert all((line["sync/engines_proven"], line["sync/tensors_unproven"]) == (1, 0) for line in syncs)
        digests[scheme] = [line["sync/digest"] for line in syncs]
        assert len(set(digests[scheme])) == len(syncs)
    assert digests["none"][0] != digests["int8"][0] != digests["fp8"][0]
    assert min(last["int8"], last["fp8"]) > last["none"] - 0.05
