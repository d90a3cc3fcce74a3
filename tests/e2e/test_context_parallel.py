"""Two trainer ranks that share every sequence, and an engine of its own, on the real stack."""

from __future__ import annotations

import pytest

from tests.e2e.runs import SMALL_RUN, assert_nothing_left, our_processes, run_train

# That the numbers are right is tested against transformers, by tests/multiprocess/test_context_parallel.py.
pytestmark = [pytest.mark.e2e, pytest.mark.long_run]


def test_context_parallel_trainer_and_one_engine(tiny_model_dir, tiny_data_dir, tmp_path):
    before = our_processes()
    flags = [*SMALL_RUN, "--prompt-data", tiny_data_dir / "train.jsonl"]
    flags[flags.index("--num-rollout") + 1] = "2"
    placement = [
        "--actor-num-nodes",
        "1",
        "--actor-num-gpus-per-node",
        "2",
        "--context-parallel-size",
        "2",
        "--rollout-num-gpus",
        "1",
    ]
    run = run_train("--hf-checkpoint", tiny_model_dir, *placement, *flags, run_dir=tmp_path / "run", timeout=240)
    assert run.returncode == 0, run.logs()
    train, sync = run.metrics("train"), run.metrics("sync")
    assert [line["step"] for line in train] == [0, 1]
    differences = [line["train/logprob_abs_diff_max"] for line in train]
    assert max(differences) <= 1e-4, differences
    assert all(line["train/grad_norm"] > 0 for line in train)
    assert len({line["sync/digest"] for line in sync}) == len(sync) == 3
    assert_nothing_left(before)
