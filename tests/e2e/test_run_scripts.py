"""The examples under scripts/ run as they stand: tiny models, a CPU host.

run-*.sh submit jobs to a Ray that is there, run_example.sh has its own.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.e2e.conftest import free_ports, started_cluster
from tests.e2e.runs import ROOT, Finished, assert_nothing_left, environment, our_processes

pytestmark = [pytest.mark.e2e, pytest.mark.long_run]

#: Script -> how its weights travel.
SCRIPTS = {
    "run-colocate.sh": "ipc",
    "run-disaggregated.sh": "broadcast",
    "run-async.sh": "broadcast",
    "run-env.sh": "ipc",
    "run-lora.sh": "ipc",
    "run-served-agent.sh": "ipc",
}

#: Example, and a file laid over its run.toml -> how its weights travel, and one of the metrics that its flags ask for.
EXAMPLES = {
    "calculator": ("ipc", "rollout/episodes/turns_mean"),
    "colocate": ("ipc", "train/kl_loss"),
    "disaggregated": ("broadcast", "train/kl_loss"),
    "external": ("broadcast", "train/pg_loss"),
    "delta": ("delta", "sync/delta_bytes"),
    "guess": ("ipc", "rollout/episodes/turns_mean"),
    "interleaved": ("broadcast", "train/pg_loss"),
    "own-functions": ("ipc", "rollout/different_tokens"),
    "own-functions rollout": ("ipc", "rollout/probe_reward_mean"),
    "own-functions imitate": ("ipc", "rollout/correct/share"),
    "reward-model": ("broadcast", "reward/model"),
    "roles": ("broadcast", "train/value_loss"),
    "routing-replay": ("ipc", "train/pg_loss"),
    "routing-replay trainer": ("ipc", "train/pg_loss"),
    "algorithms": ("ipc", "train/pg_loss"),
    "algorithms reinforce++": ("ipc", "train/pg_loss"),
    "algorithms reinforce++-baseline": ("ipc", "train/pg_loss"),
    "algorithms dr-grpo": ("ipc", "train/pg_loss"),
    "algorithms icepop": ("ipc", "train/mismatch_kl"),
    "algorithms sequence-masking": ("ipc", "train/opsm_masked_ratio"),
    "algorithms distillation": ("ipc", "train/opd_kl"),
    "algorithms clip-cov": ("ipc", "train/picked_ratio"),
}

#: They move no weights; the second trains on what the first kept.
DEBUG_EXAMPLES = ("debug-rollout-only", "debug-train-only")

#: Supervised: it runs in test_conversations.py.
SUPERVISED_EXAMPLE = "conversations"


def finish(command: list[str], run_dir: Path, timeout: float = 240, **variables: str) -> Finished:
    """Run a script of scripts/ to its end."""
    command = ["bash", str(ROOT / "scripts" / command[0]), *command[1:]]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environment(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    return Finished(done.returncode, done.stdout, run_dir)


def assert_three_rollouts(run: Finished, transport: str, metric: str) -> None:
    """Three rollouts, whose weights went out as they should; engine and trainer agree."""
    assert run.returncode == 0, run.logs()
    train = run.metrics("train")
    assert [line["step"] for line in train] == [0, 1, 2]
    kind = {"train": "train", "sync": "sync"}.get(metric.split("/")[0], "rollout")
    assert any(metric in line for line in run.metrics(kind)), sorted(run.metrics(kind)[-1])
    assert {line["sync/transport"] for line in run.metrics("sync")} == {transport}
    assert max(line["train/logprob_abs_diff_max"] for line in train) <= 1e-4


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with started_cluster(tmp_path_factory.mktemp("ray"), num_gpus=4) as started:
        yield started


@pytest.fixture
def job_variables(cluster, tmp_path_factory, tmp_path) -> dict[str, str]:
    """What the run-*.sh scripts are told: the cluster, and where files go."""
    return {
        "RAY_ADDRESS": cluster.dashboard,
        "RAY_JOB_ADDRESS": cluster.dashboard,
        "TINY": str(tmp_path_factory.getbasetemp() / "tiny"),
        "RUN_DIR": str(tmp_path / "run"),
    }


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_submits_a_job_that_runs(job_variables, tmp_path, script):
    before = our_processes()
    run = finish([script], tmp_path / "run", **job_variables)
    assert_three_rollouts(run, SCRIPTS[script], "train/pg_loss")
    assert_nothing_left(before)


@pytest.mark.timeout(700)
def test_an_agent_learns_to_use_its_tool(job_variables, tmp_path):
    """The warm-up has shown the calculator; the reward makes a habit of it."""
    before = our_processes()
    run = finish(["run-agent.sh"], tmp_path / "run", timeout=640, **job_variables)
    assert run.returncode == 0, run.logs()
    rollouts = run.metrics("rollout")
    rewards = [line["rollout/reward_mean"] for line in rollouts]
    assert len(rewards) == 40 and np.mean(rewards[-5:]) >= np.mean(rewards[:3]) + 0.35, rewards
    turns = [line["rollout/episodes/turns_mean"] for line in rollouts]
    assert np.mean(turns[-5:]) > np.mean(turns[:3]) + 0.2, "it asks the tool more often"
    assert max(line["train/logprob_abs_diff_max"] for line in run.metrics("train")) <= 1e-4
    assert f"reward  {np.mean(rewards[:3]):.2f} -> {np.mean(rewards[-5:]):.2f}" in run.output
    assert_nothing_left(before)


def test_every_example_has_its_row():
    """Each folder, and each file that is laid over its run.toml."""
    there = {
        f"{path.parent.name} {path.stem}".removesuffix(" run") for path in (ROOT / "scripts/examples").glob("*/*.toml")
    }
    assert there == {*EXAMPLES, *DEBUG_EXAMPLES, SUPERVISED_EXAMPLE}


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_runs_as_it_stands(tmp_path, example):
    name, _, overlay = example.partition(" ")
    flags = ["--config", f"scripts/examples/{name}/{overlay}.toml"] if overlay else []
    before = our_processes()
    run = finish(
        ["run_example.sh", name, *flags, "--run-dir", str(tmp_path / "run")],
        tmp_path / "run",
        PORT=str(free_ports(1)[0]),
    )
    assert_three_rollouts(run, *EXAMPLES[example])
    assert_nothing_left(before)


def test_kept_rollouts_are_trained_on_without_engines(tmp_path):
    samples = str(tmp_path / "samples/{rollout_id}.npz")
    before = our_processes()
    kept = finish(
        [
            "run_example.sh",
            DEBUG_EXAMPLES[0],
            "--save-debug-rollout-data",
            samples,
            "--run-dir",
            str(tmp_path / "first"),
        ],
        tmp_path / "first",
    )
    assert kept.returncode == 0, kept.logs()
    trained = finish(
        [
            "run_example.sh",
            DEBUG_EXAMPLES[1],
            "--load-debug-rollout-data",
            samples,
            "--run-dir",
            str(tmp_path / "second"),
        ],
        tmp_path / "second",
    )
    assert trained.returncode == 0, trained.logs()
    assert len(list((tmp_path / "samples").glob("*.npz"))) == len(trained.metrics("train")) == 3
    assert not list((tmp_path / "second/logs").glob("engine*"))
    assert_nothing_left(before)
