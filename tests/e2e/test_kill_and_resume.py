"""Whoever is killed, wherever a step just is: the same command goes on, and from there on every token, reward, loss and
weight digest is that of a run that nobody killed, to the bit.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e import same_runs
from tests.e2e.runs import ROOT, SMALL_RUN, Finished, assert_nothing_left, environment, our_processes

#: Up to eight whole runs, each of which has 180 s.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(8 * 180)]

#: What the first sync of a process measures beside what the others do.
OF_A_START = ("sync/probe_logprob_abs_diff", "sync/probe_seconds")
#: Each a run that is killed again and again: (who, where, rollouts done there).
CHAINS = {
    # the checkpoint is there, the sync and the evaluation after it are not
    "quick": [("driver", "saved", 2)],
    "driver": [
        ("driver", "build", 0), ("driver", "generate", 1), ("driver", "score", 1), ("driver", "train", 1),
        ("driver", "sync", 2), ("driver", "eval", 2),
    ],
    "trainer, engine, router": [
        ("engine", "generate", 0), ("trainer", "train", 1), ("router", "generate", 1),
        ("trainer", "publish checkpoint", 2), ("engine", "sync", 2),
    ],
    "Ray, servers": [
        ("raylet", "train", 1), ("gcs", "score", 1), ("supervisor", "trained", 1), ("engine server", "eval", 2),
        ("driver", "saved", 3),
    ],
}  # fmt: skip


def command(model: Path, data: Path, run_dir: Path, order: dict) -> list[str]:
    """A run of three rollouts that resumes itself, with a blow."""
    flags = list(SMALL_RUN)
    flags[flags.index("--custom-rm-path") + 1] = "tests.e2e.killed_train.even_tokens"
    return [
        sys.executable, str(ROOT / "tests/e2e/killed_train.py"), json.dumps(order), *flags,
        "--deterministic", "--max-engine-restarts", "0", "--max-trainer-restarts", "0", "--max-router-restarts", "0",
        "--resume", "auto", "--save-interval", "1", "--save-total-limit", "2",
        "--colocate", "--actor-num-gpus-per-node", "1", "--hf-checkpoint", str(model),
        "--prompt-data", f"{data}/train.jsonl", "--eval-prompt-data", "sort", f"{data}/train.jsonl@[0:8]",
        "--eval-interval", "1", "--run-dir", str(run_dir), *same_runs.flags(run_dir),
    ]  # fmt: skip


def run(*arguments, more: tuple[str, ...] = ()) -> Finished:
    """One process of the run."""
    line = [*command(*arguments), *more]
    environ = environment(PYTHONPATH=os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    done = subprocess.run(
        line, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=180
    )
    return Finished(done.returncode, done.stdout, Path(line[line.index("--run-dir") + 1]))


@pytest.fixture(scope="module")
def unharmed(tiny_model_dir, tiny_data_dir, tmp_path_factory) -> Finished:
    """The run that nobody killed."""
    done = run(tiny_model_dir, tiny_data_dir, tmp_path_factory.mktemp("unharmed") / "run", {})
    assert done.returncode == 0, done.logs()
    return done


@pytest.mark.long_run
@pytest.mark.parametrize("chain", CHAINS)
def test_a_killed_run_goes_on_as_if_nothing_had_been(chain, unharmed, tiny_model_dir, tiny_data_dir, tmp_path):
    before = our_processes()
    for number, (who, where, step) in enumerate(CHAINS[chain]):
        order = {"who": who, "at": where, "step": step, "mark": str(tmp_path / f"mark-{number}")}
        killed = run(tiny_model_dir, tiny_data_dir, tmp_path / "run", order)
        assert Path(order["mark"]).exists() and killed.returncode != 0, killed.logs()
        assert "the driver outlives" not in killed.output, killed.logs()
        assert_nothing_left(before, seconds=45)
        print(f"{who} killed at {where} {step}: status {killed.returncode}", flush=True)
    done = run(tiny_model_dir, tiny_data_dir, tmp_path / "run", order)
    assert done.returncode == 0, done.logs()
    print(f"{same_runs.assert_same(unharmed, done, without=OF_A_START)} numbers are equal")
    kept = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("iter_*"))
    assert kept == ["iter_0000002", "iter_0000003"]


@pytest.mark.long_run
def test_a_run_that_is_preempted_and_requeued_goes_on_as_if_nothing_had_been(
    unharmed, tiny_model_dir, tiny_data_dir, tmp_path
):
    """SLURM's signal while answers come, Kubernetes' while the trainer works: each start saves, which nothing else
    would.
    """
    seldom = ("--save-interval", "100", "--preemption-timeout-s", "60")
    orders = [
        {"who": "SIGUSR1", "at": "generate", "step": 1, "mark": str(tmp_path / "first")},
        {"who": "SIGTERM", "at": "train", "step": 1, "mark": str(tmp_path / "second")},
        {"who": "SIGTERM", "at": "never", "step": 0, "mark": str(tmp_path / "third")},
    ]
    before = our_processes()
    for number, order in enumerate(orders, 1):
        done = run(tiny_model_dir, tiny_data_dir, tmp_path / "run", order, more=seldom)
        assert done.returncode == (143 if number < 3 else 0), done.logs()
        saved = tmp_path / "run" / "checkpoints" / f"iter_{number:07d}"
        assert saved.exists(), done.logs()
        if number < 3:
            seconds = saved.stat().st_mtime - float(Path(order["mark"]).read_text())
            print(f"{order['who']} at {order['at']}: saved after {seconds:.1f} s")
            assert seconds < 60 and f"preempted after {number} rollouts, which are saved" in done.output
            assert_nothing_left(before, seconds=1)
    print(f"{same_runs.assert_same(unharmed, done, without=OF_A_START)} numbers are equal")
