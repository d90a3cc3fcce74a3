"""A Qwen3-MoE policy whose experts lie on two trainer ranks, with one SGLang engine, started as users start it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.e2e.hf_oracle import largest_difference
from tests.e2e.runs import ROOT, SMALL_RUN, assert_nothing_left, our_processes, run_train
from tests.helpers.tiny_models import make_tiny_model

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def moe_model_dir(tmp_path_factory) -> Path:
    """A random Qwen3-MoE with the tokenizer of models/tiny-qwen3."""
    folder = tmp_path_factory.mktemp("models") / "tiny-qwen3-moe"
    tokenizer = ROOT / "models/tiny-qwen3"
    make_tiny_model(str(folder), "qwen3_moe", vocab_size=320, num_layers=2, eos_token_id=299, pad_token_id=297)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(tokenizer / name, folder / name)
    return folder


def test_experts_on_two_ranks_reach_the_engine(moe_model_dir, tiny_data_dir, tmp_path):
    before = our_processes()
    run = run_train(
        *SMALL_RUN, "--hf-checkpoint", moe_model_dir, "--prompt-data", f"{tiny_data_dir}/train.jsonl",
        "--actor-num-gpus-per-node", 2, "--expert-model-parallel-size", 2, "--rollout-num-gpus", 1,
        "--moe-router-dtype", "fp32",
        "--use-rollout-routing-replay",
        "--save", tmp_path / "save", "--save-interval", 1, "--save-hf", f"{tmp_path}/hf/{{rollout_id}}",
        "--save-debug-rollout-data", f"{tmp_path}/samples/{{rollout_id}}.npz", run_dir=tmp_path / "run",
    )  # fmt: skip
    assert run.returncode == 0, run.logs()
    train, sync = run.metrics("train"), run.metrics("sync")
    assert [line["step"] for line in train] == [0, 1, 2]
    differences = [line["train/logprob_abs_diff_max"] for line in train]
    assert max(differences) <= 1e-4, differences
    assert [line["sync/version"] for line in sync] == [1, 2, 3, 4]
    assert len({line["sync/digest"] for line in sync}) == 4
    # Samples of the last rollout were generated after two trainings: HF with those weights agrees, HF with the first
    # does not.
    assert largest_difference(tmp_path / "hf/2", tmp_path / "samples/2.npz") <= 1e-4
    assert largest_difference(moe_model_dir, tmp_path / "samples/2.npz") > 1e-2
    assert_nothing_left(before)
