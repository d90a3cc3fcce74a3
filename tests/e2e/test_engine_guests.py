"""An engine that somebody else started joins a run while it is up, by a line in its file, and leaves it again."""
# Covers slime_like.cluster.engine_guests.

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import pytest
import requests

from slime_like.utils.net import free_port, wait_until
from tests.e2e.runs import (
    ROOT,
    SMALL_RUN,
    Finished,
    assert_nothing_left,
    environment,
    our_processes,
    start_train,
    stop_group,
    wait_for,
)

pytestmark = [pytest.mark.e2e, pytest.mark.long_run]


@pytest.fixture
def server(tiny_model_dir, tmp_path):
    """The address of a plain SGLang server, which answers."""
    port = free_port("127.0.0.1")
    command = [
        sys.executable, "-m", "slime_like.sglang_backend.cpu_server", "--model-path", tiny_model_dir,
        "--host", "127.0.0.1", "--port", port, "--device", "cpu", "--attention-backend", "torch_native",
        "--dtype", "float32", "--max-total-tokens", "4096", "--sleep-on-idle", "--disable-overlap-schedule",
        "--skip-server-warmup", "--custom-weight-loader", "slime_like.weight_sync.in_engine.shm_loader.load",
    ]  # fmt: skip
    with open(tmp_path / "server.log", "w") as log:
        process = subprocess.Popen(
            list(map(str, command)),
            cwd=ROOT,
            env=environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo"),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    address = f"http://127.0.0.1:{port}"

    def answers() -> str | None:
        try:
            return None if requests.get(f"{address}/model_info", timeout=5).ok else "an error"
        except requests.RequestException as error:
            return str(error)

    try:
        wait_until(answers, deadline_s=150, who="test", whom="the server", phase="start")
        yield address
    finally:
        stop_group(process, grace_s=0)


def test_it_joins_with_the_present_weights_and_leaves_when_its_line_goes(
    tiny_model_dir, tiny_data_dir, tmp_path, server
):
    before = our_processes()
    command = [*SMALL_RUN, "--hf-checkpoint", tiny_model_dir, "--prompt-data", tiny_data_dir / "train.jsonl"]
    command += ["--actor-num-gpus-per-node", "1", "--rollout-num-gpus-per-engine", "1", "--rollout-num-gpus", "1"]
    process = start_train(*command, "--num-rollout", "12", run_dir=tmp_path / "run")
    output, file = tmp_path / "run.out", tmp_path / "run" / "engines.txt"
    try:
        wait_for(output, "rollout 1/12", 200, process)
        file.touch(0o600)
        file.write_text(f"{server}\n")
        wait_for(output, f"engine 1 at {server} joins, and waits for its weights", 60, process)
        wait_for(tmp_path / "run" / "metrics.jsonl", '"sync/engines_proven": 2', 120, process)
        file.write_text("# nobody\n")
        wait_for(output, f"engine 1 at {server} has left", 120, process)
        assert process.wait(300) == 0, output.read_text()[-3000:]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    run = Finished(process.returncode, output.read_text(), tmp_path / "run")
    proven = [line["sync/engines_proven"] for line in run.metrics("sync")]
    assert 2 in proven and (proven[0], proven[-1]) == (1, 1), proven
    assert max(line["train/logprob_abs_diff_max"] for line in run.metrics("train")) <= 1e-4, "of the right weights"
    version = int(requests.get(f"{server}/model_info", timeout=20).json()["weight_version"])
    assert 2 <= version < len(proven), "what it was sent last; it goes on without the run"
    assert re.search(r"engine 1 at \S+ leaves: it takes no more requests", run.output)
    assert_nothing_left(before)
