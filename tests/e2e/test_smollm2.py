"""A real model end to end: scripts/run-smollm2.sh, small; what it exports is what trainer and engine compute with."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from tests.e2e.hf_oracle import largest_difference
from tests.e2e.runs import ROOT, Finished, assert_nothing_left, environment, our_processes, run_train

pytestmark = [pytest.mark.e2e, pytest.mark.long_run, pytest.mark.timeout(2400)]

SMALL = {
    "PRECISION": "fp32",
    "NUM_ROLLOUT": "2",
    "PROMPTS": "2",
    "SAMPLES": "4",
    "WARM_UP_ROWS": "32",
    "EVAL_ROWS": "8",
    "SHOWN": "2",
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the model is made, once; SMOLLM2_MODELS names a folder that has it."""
    return Path(os.environ.get("SMOLLM2_MODELS") or tmp_path_factory.mktemp("smollm2"))


def run_script(models: Path, run: Path, *flags: str) -> dict:
    """A small whole run; its report."""
    before = our_processes()
    done = subprocess.run(
        ["bash", str(ROOT / "scripts/run-smollm2.sh"), *flags],
        cwd=ROOT,
        env=environment(MODELS=str(models), RUN=str(run), **SMALL),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1500,
    )
    finished = Finished(done.returncode, done.stdout, run / "grpo")
    assert done.returncode == 0, finished.logs() if (run / "grpo/logs").is_dir() else done.stdout[-4000:]
    assert_nothing_left(before)
    return json.loads((run / "report.json").read_text())


def test_the_whole_run_and_its_export(models: Path, tmp_path: Path):
    """Plain transformers, the trainer and the engine agree on the folder that the run leaves."""
    report = run_script(models, tmp_path / "run")
    assert len(report["rewards"]) == 2 and len(report["answers"]) == 2
    assert report["logprob_abs_diff"]["largest"] < 1e-4
    exported = tmp_path / "run/grpo/hf"
    # Not the warm-up's: so short a one may earn no reward yet, and GRPO has nothing to learn from.
    start = models / "SmolLM2-135M-Instruct"
    proof = run_train(
        "--colocate", "--hf-checkpoint", exported, "--actor-num-gpus-per-node", 1, "--rollout-num-gpus-per-engine", 1,
        "--prompt-data", tmp_path / "run/data/train.jsonl", "--input-key", "prompt", "--label-key", "label",
        "--apply-chat-template", "--rm-type", "exact", "--num-rollout", 1, "--rollout-batch-size", 2,
        "--n-samples-per-prompt", 4, "--rollout-max-response-len", 10, "--lr", 0, "--use-dynamic-batch-size",
        "--max-tokens-per-gpu", 1024, "--save-debug-rollout-data", tmp_path / "samples/{rollout_id}.npz",
        run_dir=tmp_path / "proof", timeout=500,
    )  # fmt: skip
    assert proof.returncode == 0, proof.logs()
    [train] = proof.metrics("train")
    assert train["train/logprob_abs_diff"] < 1e-4  # the trainer and the engine
    samples = tmp_path / "samples/0.npz"
    assert largest_difference(exported, samples) < 1e-4  # the engine and plain transformers
    assert largest_difference(start, samples) > 1e-2, "of other weights it says otherwise"


@pytest.mark.parametrize(
    ("flags", "least", "most"),
    [
        (("--lora-rank", "8", "--lora-alpha", "16", "--lr", "2e-4"), 0.0, 1e-4),
        (("--rollout-quantization", "int8", "--use-tis"), 1e-4, 0.2),  # eight bits show, and show little
    ],
    ids=["adapters", "int8"],
)
def test_forms(models: Path, tmp_path: Path, flags: tuple[str, ...], least: float, most: float):
    report = run_script(models, tmp_path / "run", *flags)
    assert len(report["rewards"]) == 2
    assert least <= report["logprob_abs_diff"]["mean"] < most
    AutoModelForCausalLM.from_pretrained(tmp_path / "run/grpo/hf")
