"""The quickstart's task in every asynchronous mode: the reward rises as it does when the two sides take turns."""

from __future__ import annotations

import subprocess
import sys

import pytest

from scripts.show_rise import rise
from tests.e2e.runs import ROOT, assert_nothing_left, environment, our_processes, run_train

pytestmark = [pytest.mark.e2e, pytest.mark.long_run, pytest.mark.timeout(900)]

COMMON = [
    "--actor-num-gpus-per-node", 1, "--input-key", "prompt", "--label-key", "label", "--apply-chat-template",
    "--use-dynamic-batch-size", "--max-tokens-per-gpu", 4096, "--adam-beta2", 0.98,
]  # fmt: skip
GRPO = [
    "--rollout-shuffle", "--num-rollout", 40, "--rollout-batch-size", 32, "--n-samples-per-prompt", 8,
    "--num-steps-per-rollout", 2, "--rollout-max-response-len", 6, "--rm-type", "exact", "--advantage-estimator",
    "grpo", "--eps-clip-high", 0.28, "--lr", 2e-4, "--lr-warmup-iters", 6,
]  # fmt: skip
APART = ["--rollout-num-gpus", 1]
MODES = {
    "one-step": [*APART, "--async-mode", "one-step"],
    "retract": [*APART, "--async-mode", "full", "--update-weight-pause-mode", "retract"],
    "abort": [*APART, "--async-mode", "full", "--update-weight-pause-mode", "abort"],
    "keep": [
        *APART, "--async-mode", "full", "--update-weight-pause-mode", "in_place", "--sglang-disable-radix-cache",
    ],
    "partial": ["--colocate", "--partial-rollout", "--over-sampling-batch-size", 40],
}  # fmt: skip


@pytest.fixture(scope="module")
def warm_model(tiny_model_dir, tmp_path_factory):
    """(a model that is right in a third of its answers, the folder of the task's data)."""
    folder = tmp_path_factory.mktemp("warm")
    data = folder / "data"
    command = [sys.executable, "scripts/make_tiny_data.py", "sort4", str(data), "--seed", "0"]
    subprocess.run(command, cwd=ROOT, env=environment(), check=True, timeout=60)
    run = run_train(
        *COMMON,
        *("--loss-type", "sft_loss", "--hf-checkpoint", tiny_model_dir, "--prompt-data", data / "sft.jsonl"),
        *("--num-rollout", 200, "--rollout-batch-size", 64, "--lr", 1e-3, "--lr-warmup-iters", 10),
        *("--save", folder / "checkpoints", "--save-hf", folder / "hf", "--no-save-optim"),
        run_dir=folder / "run",
        timeout=400,
    )
    assert run.returncode == 0, run.logs()
    return folder / "hf", data


@pytest.mark.parametrize("mode", MODES)
def test_the_reward_rises(warm_model, tmp_path, mode):
    before = our_processes()
    model, data = warm_model
    run = run_train(
        *(*COMMON, *GRPO, *MODES[mode], "--hf-checkpoint", model, "--prompt-data", data / "train.jsonl"),
        run_dir=tmp_path / "run",
        timeout=400,
    )
    assert run.returncode == 0, run.logs()
    assert_nothing_left(before)
    rewards = [line["rollout/reward_mean"] for line in run.metrics("rollout")]
    first, last = rise(rewards)
    steps = [line["step/seconds"] for line in run.metrics("step")]
    print(f"{mode}: reward {first:.2f} -> {last:.2f}, {sum(steps):.0f} s of {len(steps)} steps")
    assert len(rewards) == 40 and last > first + 0.4
    proofs = run.metrics("sync")
    assert proofs and all(line["sync/engines_proven"] == 1 for line in proofs)
