"""A trainer of two tensor by two pipeline parallel ranks with an engine of two, on the same logical GPUs, started as
users start it.
"""

from __future__ import annotations

import pytest

from tests.e2e.hf_oracle import largest_difference
from tests.e2e.runs import SMALL_RUN, assert_nothing_left, our_processes, run_train

pytestmark = pytest.mark.e2e


def test_tp2_pp2_trainer_and_tp2_engine_share_gpus(tiny_model_dir, tiny_data_dir, tmp_path):
    before = our_processes()
    run = run_train(
        *SMALL_RUN, "--hf-checkpoint", tiny_model_dir, "--prompt-data", f"{tiny_data_dir}/train.jsonl", "--num-rollout",
        2,
        "--actor-num-gpus-per-node", 4, "--tensor-model-parallel-size", 2, "--pipeline-model-parallel-size", 2,
        "--sequence-parallel",
        "--colocate", "--rollout-num-gpus", 2, "--rollout-num-gpus-per-engine", 2, "--update-weight-buffer-size",
        500_000,
        "--save", tmp_path / "save", "--save-interval", 1, "--save-hf", f"{tmp_path}/hf/{{rollout_id}}",
        "--save-debug-rollout-data", f"{tmp_path}/samples/{{rollout_id}}.npz", run_dir=tmp_path / "run", timeout=240,
    )  # fmt: skip
    assert run.returncode == 0, run.logs()
    train, sync = run.metrics("train"), run.metrics("sync")
    assert [line["step"] for line in train] == [0, 1]
    differences = [line["train/logprob_abs_diff_max"] for line in train]
    assert max(differences) <= 1e-4, differences
    assert [line["sync/version"] for line in sync] == [1, 2, 3]
    assert {line["sync/transport"] for line in sync} == {"ipc"}
    assert len({line["sync/digest"] for line in sync}) == 3
    # Samples of the last rollout were generated after one training: HF with those weights agrees, HF with the first
    # does not.
    assert largest_difference(tmp_path / "hf/1", tmp_path / "samples/1.npz") <= 1e-4
    assert largest_difference(tiny_model_dir, tmp_path / "samples/1.npz") > 1e-2
    assert_nothing_left(before)
