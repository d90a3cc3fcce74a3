"""--deterministic: two runs of one command are equal in every metric but times, every token and every digest."""

from __future__ import annotations

import pytest

from tests.e2e import same_runs
from tests.e2e.runs import SMALL_RUN, run_train

pytestmark = [pytest.mark.e2e, pytest.mark.long_run]

COLOCATED = ["--colocate", "--actor-num-gpus-per-node", "1"]
#: name -> flags of the placement
ROWS = {
    "colocated": COLOCATED,
    "disaggregated, two engines": [
        "--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "2", "--rollout-num-gpus-per-engine", "1",
    ],
    "dp2, tp2 engine": ["--colocate", "--actor-num-gpus-per-node", "2", "--rollout-num-gpus-per-engine", "2"],
    "tp2, one step ahead": [
        "--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2", "--sequence-parallel",
        "--rollout-num-gpus", "1", "--async-mode", "one-step",
    ],
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS)
def test_two_runs_of_one_command_are_equal(row, tiny_model_dir, tiny_data_dir, tmp_path):
    runs = []
    for number in range(2):
        run_dir = tmp_path / f"run-{number}"
        runs.append(
            run_train(
                *SMALL_RUN, *ROWS[row], "--deterministic", "--hf-checkpoint", tiny_model_dir,
                "--prompt-data", tiny_data_dir / "train.jsonl", "--eval-prompt-data", "sort",
                f"{tiny_data_dir / 'train.jsonl'}@[0:4]", "--eval-interval", "2",
                *same_runs.flags(run_dir), run_dir=run_dir,
            )
        )  # fmt: skip
        assert runs[-1].returncode == 0, runs[-1].logs()
    print(f"{row}: {same_runs.assert_same(*runs)} numbers are equal")
    digests = [line.get("sync/digest") for line in runs[0].metrics("sync")]
    assert len(digests) == 4 and len(set(digests)) == 4, digests  # and the weights changed
