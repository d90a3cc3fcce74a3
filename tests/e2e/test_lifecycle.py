"""Interrupting, killing, replaying: nothing is left behind. Resuming: test_ppo.py, with two models."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import tempfile
import threading
from pathlib import Path

import psutil
import pytest

from slime_like.sglang_backend.shared_memory import shared_directories
from tests.e2e.runs import SMALL_RUN, assert_nothing_left, our_processes, run_train, start_train, wait_for

pytestmark = pytest.mark.e2e


@pytest.fixture
def base(tiny_model_dir, tiny_data_dir):
    return [
        *SMALL_RUN,
        "--hf-checkpoint",
        str(tiny_model_dir),
        "--prompt-data",
        f"{tiny_data_dir}/train.jsonl",
        "--actor-num-gpus-per-node",
        "1",
        "--colocate",
    ]


def with_rollouts(flags, count):
    flags = list(flags)
    flags[flags.index("--num-rollout") + 1] = str(count)
    return flags


@pytest.mark.parametrize(
    ("number", "status"),
    [
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.long_run),  # as SIGTERM; test_supervise.py tells them apart
        (signal.SIGTERM, 143),
        (signal.SIGKILL, -9),
    ],
)
def test_interrupted_run_leaves_nothing(base, tmp_path, number, status, files_left):
    before = our_processes()
    process = start_train(*with_rollouts(base, 1000), run_dir=tmp_path / "run")
    try:
        wait_for(tmp_path / "run.out", "rollout 2/1000", 120, process)
        os.kill(process.pid, number)  # to train.py alone: everything else must follow by itself
        assert process.wait(60) == status
        # Nobody outlives a SIGKILL to tidy up at once; else everything has ended before train.py does.
        assert_nothing_left(before, seconds=45 if number == signal.SIGKILL else 1)
        if number != signal.SIGKILL:
            assert files_left() == set()
            assert "SIGTERM received" not in (tmp_path / "run.out").read_text(), "Ray's own handler aborts"
            end = json.loads((tmp_path / "run/end.json").read_text())
            assert (end["exit_status"], end["role"], end["version"] >= 3) == (status, "driver", True)
            assert "last progress" in (tmp_path / "run.out").read_text()
        if number == signal.SIGINT:
            assert "interrupted" in (tmp_path / "run.out").read_text()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


# While it runs, what is left behind is the test above's; what is said, this one's at its start.
@pytest.mark.parametrize("when", ["starting", pytest.param("running", marks=pytest.mark.long_run)])
def test_a_driver_that_is_killed_is_named_and_leaves_nothing(base, tmp_path, files_left, when):
    """As the kernel does when memory runs out; train.py, which the user sees, tells it."""
    before = our_processes()
    process = start_train(*with_rollouts(base, 1000), run_dir=tmp_path / "run")
    try:
        wait_for(tmp_path / "run.out", "run directory" if when == "starting" else "rollout 2/1000", 120, process)
        (driver,) = [
            child for child in psutil.Process(process.pid).children() if "train.py" in " ".join(child.cmdline())
        ]
        driver.kill()
        assert process.wait(60) == 137
        assert_nothing_left(before, seconds=1)
        assert files_left() == set()
        assert "the driver was ended by SIGKILL" in (output := (tmp_path / "run.out").read_text())
        end = json.loads((tmp_path / "run/end.json").read_text())
        assert (end["role"], end["pid"], end["exit_status"]) == ("driver", driver.pid, 137)
        assert f"driver, rank 0, process {driver.pid}" in output and "--resume auto" in output
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


# What it says, and that it is no success: test_supervise.py. What a driver leaves that is gone all at once: above.
@pytest.mark.long_run
def test_a_reward_that_ends_the_process_is_named_and_is_no_success(base, tmp_path, files_left):
    before = our_processes()
    flags = list(base)
    flags[flags.index("--custom-rm-path") + 1] = "tests.e2e.rewards.leaves"
    run = run_train(*flags, run_dir=tmp_path / "run")
    assert run.returncode == 1, run.logs()
    assert "RunError: the driver ended itself with status 0" in run.output and "os._exit" in run.output
    assert re.search(r"reward function tests\.e2e\.rewards\.leaves for prompt \d+, sample \d+", run.output)
    assert_nothing_left(before, seconds=1)
    assert files_left() == set()


@pytest.fixture
def files_left(monkeypatch, request):
    """What lies in Ray's temporary folder, which is the test's own, and in shared memory of what processes of the test
    had mapped there.
    """
    seen: set[str] = set()
    over = threading.Event()

    def look() -> None:
        while not over.wait(0.3):
            seen.update(path for pid in our_processes() for path in _mapped(pid))

    with tempfile.TemporaryDirectory(prefix="slt", dir="/tmp") as folder:  # pytest's own are too long for sockets
        monkeypatch.setenv("RAY_TMPDIR", folder)
        looking = threading.Thread(target=look, daemon=True)
        looking.start()
        yield lambda: {path for path in seen if os.path.exists(path)} | set(os.listdir(folder)) | _weights_of_the_dead()
        over.set()
        looking.join(10)
    assert seen or "starting" in request.node.name, "a run has files in shared memory"


def _mapped(pid: int) -> set[str]:
    """Files in shared memory that a process has mapped."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/maps") as lines:
        return {line.split()[-1] for line in lines if "/dev/shm/" in line and not line.rstrip().endswith("(deleted)")}
    return set()


def _weights_of_the_dead() -> set[str]:
    """Folders `<pid>-...` of processes that have ended, in the user's folders for weights: other tests have some at the
    same time.
    """
    names = [path.name for folder in shared_directories() for path in Path(folder).glob("[0-9]*-*")]
    return {name for name in names if not psutil.pid_exists(int(name.partition("-")[0]))}


def test_train_only_replays_saved_rollouts_to_the_same_losses(base, tmp_path):
    """Samples saved by a full run, trained on without engines, give the very same losses: also the reference and its
    KL.
    """
    flags = [
        *base,
        "--use-kl-loss",
        "--kl-loss-coef",
        "0.05",
        "--kl-loss-type",
        "low_var_kl",
        "--ref-load",
        base[base.index("--hf-checkpoint") + 1],
    ]
    full = run_train(
        *flags, "--save-debug-rollout-data", f"{tmp_path}/samples/{{rollout_id}}.npz", run_dir=tmp_path / "full"
    )
    assert full.returncode == 0, full.logs()
    replay = run_train(
        *flags,
        "--debug-train-only",
        "--load-debug-rollout-data",
        f"{tmp_path}/samples/{{rollout_id}}.npz",
        run_dir=tmp_path / "replay",
    )
    assert replay.returncode == 0, replay.logs()
    for name in ("train/loss", "train/grad_norm", "train/kl", "train/entropy"):
        theirs, ours = ([line[name] for line in run.metrics("train")] for run in (full, replay))
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-7), name
    assert full.metrics("train")[2]["train/kl"] > 0


def test_rollout_only_evaluates_and_filters(base, tiny_data_dir, tmp_path):
    flags = ["--debug-rollout-only", "--rollout-num-gpus", "1", "--eval-prompt-data", "held_out",
        f"{tiny_data_dir}/eval.jsonl@[0:8]", "--eval-interval", "2",
             "--dynamic-sampling-filter-path", "slime_like.rollout.filters.reward_nonzero_std"]  # fmt: skip
    run = run_train(*[f for f in base if f != "--colocate"], *flags, run_dir=tmp_path / "run")
    assert run.returncode == 0, run.logs()
    assert len(run.metrics("rollout")) == 3 and not run.metrics("train") and not run.metrics("sync")
    assert [line["step"] for line in run.metrics("eval")] == [0, 2, 3]
    assert all(0 <= line["eval/held_out/pass@1"] <= 1 for line in run.metrics("eval"))
    assert json.loads((run.run_dir / "plan.json").read_text())["mode"] == "rollout_only"
