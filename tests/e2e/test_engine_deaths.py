"""Engines that die or hang, and a router that dies, while a run generates: another takes the place, an engine with the
present weights, the router with the same engines, and the run goes on.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from tests.e2e.runs import SMALL_RUN, Finished, assert_nothing_left, our_processes, start_train, wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.long_run]

PLACES = {
    "alone": ["--rollout-num-gpus", "1"],
    "one of two": ["--rollout-num-gpus", "2"],
    "colocated": ["--colocate"],
    "deltas": ["--rollout-num-gpus", "2", "--update-weight-mode", "delta"],
    "ahead": ["--rollout-num-gpus", "1", "--async-mode", "one-step"],
}
#: Of an engine that hangs: silence until it is ended, far longer than a batch of the tiny model takes on a busy host.
HANG = ["--engine-hang-timeout-s", "20", "--update-weight-timeout-s", "40"]


def processes(pid: int, module: str) -> list[psutil.Process]:
    """The run's processes of this module, without their guards."""
    ours = [one for one in psutil.Process(pid).children(recursive=True) if module in " ".join(_command(one))]
    # The router has given itself a title.
    servers = [one for one in ours if any(word in " ".join(_command(one)) for word in ("--port=", "sglang::router"))]
    return [one for one in servers if one.ppid() not in {other.pid for other in servers}]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def scheduler(server: psutil.Process) -> psutil.Process:
    """SGLang's scheduler under its server, which starts it first."""
    return min(server.children(), key=lambda child: child.pid)


@pytest.fixture
def disturbed(tiny_model_dir, tiny_data_dir, tmp_path):
    """A run of six rollouts in which `disturb(pid of train.py)` is called after the second one."""

    def run(placement: str, disturb, *flags) -> Finished:
        before = our_processes()
        command = [*SMALL_RUN, "--hf-checkpoint", tiny_model_dir, "--prompt-data", tiny_data_dir / "train.jsonl"]
        command += ["--actor-num-gpus-per-node", "1", "--rollout-num-gpus-per-engine", "1", *PLACES[placement]]
        process = start_train(*command, "--num-rollout", "6", *flags, run_dir=tmp_path / "run")
        try:
            wait_for(tmp_path / "run.out", "rollout 2/6", 200, process)
            disturb(process.pid)
            assert process.wait(300) == 0, (tmp_path / "run.out").read_text()[-3000:]
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        finished = Finished(process.returncode, (tmp_path / "run.out").read_text(), Path(tmp_path / "run"))
        assert_nothing_left(before)
        return finished

    return run


def assert_whole(run: Finished, num_engines: int) -> None:
    """Every rollout and sync once, trained on what the right weights have answered."""
    assert [line["step"] for line in run.metrics("rollout")] == list(range(6))
    assert [line["sync/version"] for line in run.metrics("sync")] == list(range(1, 8))
    assert max(line["train/logprob_abs_diff_max"] for line in run.metrics("train")) <= 1e-4, "of the right weights"
    assert run.metrics("sync")[-1]["sync/engines_proven"] == num_engines


@pytest.mark.parametrize("placement", PLACES)
def test_a_killed_engine_is_replaced_and_the_run_ends_well(disturbed, placement):
    run = disturbed(placement, lambda pid: processes(pid, "cpu_server")[0].kill())
    assert re.search(r"engine [01] is being replaced by engine", run.output)
    if placement != "ahead":
        assert_whole(run, 2 if placement in ("one of two", "deltas") else 1)
        return
    assert [line["step"] for line in run.metrics("rollout")] == list(range(6))
    versions = [line["sync/version"] for line in run.metrics("sync")]  # one more where it came before its rollout
    assert versions == list(range(1, len(versions) + 1)) and len(versions) in (7, 8), versions


@pytest.mark.parametrize(
    ("placement", "what"), [("alone", "scheduler"), ("one of two", "server"), ("one of two", "scheduler")]
)
def test_an_engine_that_hangs_is_ended_and_replaced(disturbed, placement, what):
    """Its scheduler is stopped, while its HTTP server answers; or the HTTP server is."""

    def stop(pid: int) -> None:
        server = processes(pid, "cpu_server")[0]
        (server if what == "server" else scheduler(server)).suspend()

    run = disturbed(placement, stop, *HANG)
    who = "its scheduler, though its HTTP server answers" if what == "scheduler" else "its HTTP server"
    said = re.search(
        r"engine [01] at \S+ hangs: no answer to /server_info for (\d+) s .* from (.*); it is ended", run.output
    )
    assert said is not None and said[2] == who and 20 <= int(said[1]) <= 60, run.output[-3000:]
    assert re.search(r"engine [01] is being replaced by engine", run.output)
    assert_whole(run, 2 if placement == "one of two" else 1)


def test_a_killed_router_is_started_again_with_its_engines(disturbed):
    run = disturbed("one of two", lambda pid: processes(pid, "sglang::router")[0].kill())
    assert "status 137" in run.output and "it is started again at its address; requests wait" in run.output
    assert re.search(r"the router runs again after [\d.]+ s, with 2 engines", run.output)
    assert_whole(run, 2)


def test_a_router_that_may_not_be_started_again_ends_the_run_by_name(tiny_model_dir, tiny_data_dir, tmp_path):
    before = our_processes()
    command = [*SMALL_RUN, "--hf-checkpoint", tiny_model_dir, "--prompt-data", tiny_data_dir / "train.jsonl"]
    command += ["--actor-num-gpus-per-node", "1", "--rollout-num-gpus-per-engine", "1", *PLACES["alone"]]
    process = start_train(*command, "--num-rollout", "20", "--max-router-restarts", "0", run_dir=tmp_path / "run")
    try:
        wait_for(tmp_path / "run.out", "rollout 2/20", 200, process)
        processes(process.pid, "sglang::router")[0].kill()
        assert process.wait(60) == 1
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    output = (tmp_path / "run.out").read_text()
    assert "ended with status 137" in output and "--max-router-restarts is 0, or used up" in output
    assert "Traceback" not in output
    assert_nothing_left(before)
