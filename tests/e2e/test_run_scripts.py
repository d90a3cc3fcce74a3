"""The examples under scripts/ run as they stand: tiny models, a CPU host, jobs submitted to a Ray that is there."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.e2e.conftest import started_cluster
from tests.e2e.runs import ROOT, Finished, assert_nothing_left, environment, our_processes

pytestmark = [pytest.mark.e2e, pytest.mark.long_run]

#: Script -> variables, how its weights travel, and one of the metrics that its flags ask for.
EXAMPLES = {
    "colocate": ({}, "ipc", "train/kl_loss"),
    "disaggregated": ({}, "broadcast", "train/kl_loss"),
    "delta": ({}, "delta", "train/kl_loss"),
    "interleaved": ({}, "broadcast", "train/kl_loss"),
    "algorithms": ({}, "ipc", "train/pg_loss"),
    "algorithms by covariance": ({"ALGORITHM": "clip-cov"}, "ipc", "train/picked_ratio"),
    "reward-model": ({}, "broadcast", "reward/model"),
    "roles": ({}, "broadcast", "train/value_loss"),
    "routing-replay": ({"REPLAY": "engine"}, "ipc", "train/kl_loss"),
    "routing-replay of the trainer": ({"REPLAY": "trainer"}, "ipc", "train/kl_loss"),
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with started_cluster(tmp_path_factory.mktemp("ray"), num_gpus=5) as started:
        yield started


@pytest.fixture(scope="module")
def run_example(cluster, tmp_path_factory):
    """Run a script as it stands; tiny models are made in a folder of the tests."""
    tiny = tmp_path_factory.mktemp("tiny")

    def run(script: str, run_dir: Path, **variables: str) -> Finished:
        extra = {"RAY_ADDRESS": cluster.dashboard, "RAY_JOB_ADDRESS": cluster.dashboard, "TINY": str(tiny), "RUN_DIR": str(run_dir)}
        command = ["bash", str(ROOT / "scripts" / f"run-{script}.sh")]
        done = subprocess.run(command, cwd=ROOT, env=environment(**extra | variables), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240)
        return Finished(done.returncode, done.stdout, run_dir)

    return run


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_runs_as_it_stands(run_example, tmp_path, example):
    variables, transport, metric = EXAMPLES[example]
    before = our_processes()
    run = run_example(example.split()[0], tmp_path / "run", **variables)
    assert run.returncode == 0, run.logs()
    train = run.metrics("train")
    assert [line["step"] for line in train] == [0, 1, 2]
    lines = train if metric.startswith("train/") else run.metrics("rollout")
    assert len(lines) == 3 and all(metric in line for line in lines), sorted(lines[0])
    assert {line["sync/transport"] for line in run.metrics("sync")} == {transport}
    assert max(line["train/logprob_abs_diff_max"] for line in train) <= 1e-4
    assert_nothing_left(before)


def test_kept_rollouts_are_trained_on_without_engines(run_example, tmp_path):
    samples = {"SAMPLES": str(tmp_path / "samples")}
    before = our_processes()
    kept = run_example("debug-rollout-only", tmp_path / "first", **samples)
    assert kept.returncode == 0, kept.logs()
    trained = run_example("debug-train-only", tmp_path / "second", **samples)
    assert trained.returncode == 0, trained.logs()
    assert len(list((tmp_path / "samples").glob("*.npz"))) == len(trained.metrics("train")) == 3
    assert not list((tmp_path / "second/logs").glob("engine*"))
    assert_nothing_left(before)
