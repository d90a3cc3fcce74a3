"""Training roles on GPUs of their own: started where the plan says, and computing what the swapped ones compute."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from slime_like.records import Prompt, Sample, SampleGroup
from slime_like.rollout.debug_data import save_rollout
from tests.e2e.runs import (
    ROOT,
    SMALL_RUN,
    assert_nothing_left,
    our_processes,
    run_train,
    start_train,
    stop_group,
    wait_for,
)

pytestmark = pytest.mark.e2e


def sample(prompt: int, index: int, rng: np.random.Generator) -> Sample:
    length = int(rng.integers(6, 30))
    mask = np.r_[np.zeros(4, np.int8), np.ones(length - 4, np.int8)]
    tokens = rng.integers(1, 300, length).astype(np.int32)
    return Sample(
        prompt_index=prompt, sample_index=index, tokens=tokens, loss_mask=mask,
        engine_logprobs=-mask.astype(np.float32),
        weight_versions=mask.astype(np.int32), response="", reward=float(rng.integers(0, 2)),
    )  # fmt: skip


@pytest.fixture(scope="module")
def saved_rollouts(tmp_path_factory):
    """Three rollouts of four prompts with four random answers each: no engine is needed to train on them."""
    folder, rng = tmp_path_factory.mktemp("rollouts"), np.random.default_rng(0)
    for step in range(3):
        groups = []
        for number in range(4):
            prompt = Prompt(index=4 * step + number, text="", tokens=np.arange(1, 5, dtype=np.int32))
            groups.append(SampleGroup(prompt=prompt, samples=tuple(sample(prompt.index, i, rng) for i in range(4))))
        save_rollout(f"{folder}/{{rollout_id}}.npz", step, tuple(groups))
    return f"{folder}/{{rollout_id}}.npz"


@pytest.fixture(scope="module")
def other_model(tmp_path_factory):
    """The tiny model with other weights, so that the reference is not the policy."""
    folder = tmp_path_factory.mktemp("reference") / "model"
    subprocess.run([sys.executable, ROOT / "scripts/make_tiny_model.py", folder, "--seed", "7"], check=True, timeout=60)
    return folder


@pytest.mark.long_run
def test_reference_on_its_own_gpus_gives_the_swapped_losses(tiny_model_dir, other_model, saved_rollouts, tmp_path):
    before = our_processes()
    flags = [
        *SMALL_RUN, "--debug-train-only", "--load-debug-rollout-data", saved_rollouts, "--hf-checkpoint",
        tiny_model_dir, "--load", tiny_model_dir,
        "--ref-load", other_model, "--use-kl-loss", "--kl-loss-coef", "0.2", "--kl-loss-type", "low_var_kl",
        "--actor-num-gpus-per-node", "2",
    ]  # fmt: skip
    swapped = run_train(*flags, run_dir=tmp_path / "swapped")
    layout = ["--no-colocate-policy-ref", "--ref-num-gpus-per-node", "1"]
    apart = run_train(*flags, *layout, run_dir=tmp_path / "apart")
    assert swapped.returncode == 0, swapped.logs()
    assert apart.returncode == 0, apart.logs()
    plan = json.loads((apart.run_dir / "plan.json").read_text())
    assert (
        plan["num_gpus"] == 3 and plan["roles"]["ref"]["bundles"] == [2] and plan["bundles"][2]["roles"] == {"ref": 1.0}
    )
    assert (apart.run_dir / "logs/ref-0.log").exists() and not (swapped.run_dir / "logs/ref-0.log").exists()
    for ours, theirs in zip(apart.metrics("train"), swapped.metrics("train"), strict=True):
        for name in ("train/loss", "train/kl", "train/kl_loss", "train/grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], abs=1e-6, rel=1e-6), name
        assert theirs["train/kl"] > 1e-3
        assert ours["train/reference_seconds"] > 0
    assert_nothing_left(before)


@pytest.mark.long_run  # which seats roles get is for test_multinode.py, that they train together for test_ppo.py
def test_critic_and_reference_on_their_own_gpus_give_the_shared_losses(
    tiny_model_dir, other_model, saved_rollouts, tmp_path
):
    """Two data parallel ranks beside the policy's, or one elsewhere: values, returns and advantages are the same."""
    before = our_processes()
    flags = [
        *SMALL_RUN, "--debug-train-only", "--load-debug-rollout-data", saved_rollouts, "--hf-checkpoint",
        tiny_model_dir, "--load", tiny_model_dir,
        "--ref-load", other_model, "--kl-coef", "0.05", "--advantage-estimator", "ppo", "--gamma", "0.99", "--lambd",
        "0.9",
        "--normalize-advantages", "--critic-lr", "3e-4", "--critic-load", other_model, "--actor-num-gpus-per-node", "2",
    ]  # fmt: skip
    shared = run_train(*flags, "--colocate-training", run_dir=tmp_path / "shared")
    layout = ["--critic-num-gpus-per-node", "1", "--no-colocate-policy-ref", "--ref-num-gpus-per-node", "1"]
    apart = run_train(*flags, *layout, run_dir=tmp_path / "apart")
    assert shared.returncode == 0, shared.logs()
    assert apart.returncode == 0, apart.logs()
    plan = json.loads((apart.run_dir / "plan.json").read_text())
    assert (
        plan["num_gpus"] == 4 and plan["roles"]["critic"]["bundles"] == [2] and plan["roles"]["ref"]["bundles"] == [3]
    )
    assert len(list((shared.run_dir / "logs").glob("critic-*.log"))) == 2
    for ours, theirs in zip(apart.metrics("train"), shared.metrics("train"), strict=True):
        for name in (
            "train/value_loss",
            "train/value_mean",
            "train/return_mean",
            "train/critic_grad_norm",
            "train/pg_loss",
            "train/grad_norm",
        ):
            assert ours[name] == pytest.approx(theirs[name], abs=1e-4, rel=1e-3), name
    assert_nothing_left(before)


def test_a_rank_that_dies_while_training_is_named_at_once(tiny_model_dir, saved_rollouts, tmp_path):
    """Its sibling hangs in, or is thrown out of, a collective with it; the message names the one that died."""
    before = our_processes()
    (tmp_path / "rollouts").mkdir()
    for step in range(1000):
        (tmp_path / f"rollouts/{step}.npz").symlink_to(saved_rollouts.replace("{rollout_id}", "0"))
    flags = [
        *SMALL_RUN, "--debug-train-only", "--load-debug-rollout-data", tmp_path / "rollouts/{rollout_id}.npz",
        "--hf-checkpoint", tiny_model_dir,
        "--actor-num-gpus-per-node", "2", "--num-rollout", "1000",
    ]  # fmt: skip
    process = start_train(*flags, run_dir=tmp_path / "run")
    try:
        wait_for(tmp_path / "run.out", "rollout 2/1000", 120, process)
        ranks = [pid for pid, line in our_processes().items() if pid not in before and "ray::TrainActor" in line]
        (victim,) = [pid for pid in ranks if os.readlink(f"/proc/{pid}/fd/1").endswith("actor-1.log")]
        os.kill(victim, signal.SIGKILL)
        assert process.wait(20) == 1
        assert "ProcessLost: trainer rank 1 died during train" in (output := (tmp_path / "run.out").read_text())
        end = json.loads((tmp_path / "run/end.json").read_text())
        assert (end["role"], end["rank"], end["pid"], end["phase"]) == ("actor", 1, victim, "train")
        assert end["step"] >= 2 and end["error"]["type"] == "ProcessLost" and end["log_file"].endswith("actor-1.log")
        assert f"actor, rank 1, process {victim}" in output and "what to do" in output
        assert_nothing_left(before)
    finally:
        stop_group(process)
