"""An engine that dies while a run generates: another takes its place with the present weights, and the run goes on."""

from __future__ import annotations

import os
import re
import signal

import psutil
import pytest

from tests.e2e.runs import SMALL_RUN, Finished, assert_nothing_left, our_processes, start_train, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.long_run]


def servers(pid: int) -> list[psutil.Process]:
    """The run's SGLang servers; each has children of its own."""
    ours = [one for one in psutil.Process(pid).children(recursive=True) if "--port=" in " ".join(one.cmdline())]
    return [one for one in ours if "cpu_server" in " ".join(one.cmdline()) and one.ppid() not in {p.pid for p in ours}]


@pytest.mark.parametrize("placement", ["alone", "one of two", "colocated"])
def test_a_killed_engine_is_replaced_and_the_run_ends_well(tiny_model_dir, tiny_data_dir, tmp_path, placement):
    before = our_processes()
    where = {
        "alone": ["--rollout-num-gpus", "1"],
        "one of two": ["--rollout-num-gpus", "2"],
        "colocated": ["--colocate"],
    }[placement]
    flags = [*SMALL_RUN, "--hf-checkpoint", tiny_model_dir, "--prompt-data", tiny_data_dir / "train.jsonl"]
    flags += ["--actor-num-gpus-per-node", "1", "--rollout-num-gpus-per-engine", "1", *where, "--num-rollout", "6"]
    process = start_train(*flags, run_dir=tmp_path / "run")
    try:
        wait_for(tmp_path / "run.out", "rollout 2/6", 150, process)
        servers(process.pid)[0].kill()
        assert process.wait(240) == 0, (tmp_path / "run.out").read_text()[-3000:]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    run = Finished(process.returncode, (tmp_path / "run.out").read_text(), tmp_path / "run")
    assert re.search(r"engine [01] is being replaced by engine", run.output)
    assert [line["sync/version"] for line in run.metrics("sync")] == list(range(1, 8))
    assert max(line["train/logprob_abs_diff_max"] for line in run.metrics("train")) <= 1e-4, "of the right weights"
    last = run.metrics("sync")[-1]
    assert last["sync/engines_proven"] == (2 if placement == "one of two" else 1)
    assert_nothing_left(before)
