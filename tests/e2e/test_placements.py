"""The three placements on the real stack, started as users start them, and proven against HF transformers."""

# Covers slime_like.job.build and slime_like.loops.sync_loop too, which it does not import itself.

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
import requests

from tests.e2e.conftest import free_ports
from tests.e2e.hf_oracle import largest_difference
from tests.e2e.runs import ROOT, SMALL_RUN, Finished, assert_nothing_left, environment, our_processes, stop_group

pytestmark = pytest.mark.e2e

SCRIPT = """
set -euo pipefail
source scripts/models/tiny-qwen3.sh
CKPT_ARGS=(--hf-checkpoint {model} --save {run_dir}-save --save-interval 1 --save-hf {run_dir}-hf/{{rollout_id}})
ROLLOUT_ARGS=({rollout} --prompt-data {data}/train.jsonl --save-debug-rollout-data {run_dir}-samples/{{rollout_id}}.npz)
PLACE_ARGS=({place})
ray job submit --address {dashboard} -- python train.py "${{MODEL_ARGS[@]}}" "${{CKPT_ARGS[@]}}" \\
  "${{ROLLOUT_ARGS[@]}}" "${{PLACE_ARGS[@]}}" --run-dir {run_dir}
"""


@pytest.fixture
def submit(ray_cluster, tiny_model_dir, tiny_data_dir, tmp_path):
    """Run a bash script with arrays that submits train.py as a Ray job."""

    def run(place: str) -> Finished:
        run_dir = tmp_path / "run"
        text = SCRIPT.format(
            model=tiny_model_dir,
            run_dir=run_dir,
            rollout=shlex.join(SMALL_RUN),
            data=tiny_data_dir,
            place=place,
            dashboard=ray_cluster.dashboard,
        )
        (tmp_path / "run.sh").write_text(text)
        done = subprocess.run(
            ["bash", tmp_path / "run.sh"],
            cwd=ROOT,
            env=environment(RAY_ADDRESS=ray_cluster.dashboard),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
        )
        return Finished(done.returncode, done.stdout, run_dir)

    return run


def check_run(run: Finished, model: Path, transport: str, *, engines_proven: int) -> None:
    """Three rollouts, engines that always held the trainer's weights and proved it, and weights that really changed."""
    assert run.returncode == 0, run.logs()
    train, sync = run.metrics("train"), run.metrics("sync")
    assert [line["step"] for line in train] == [0, 1, 2]
    differences = [line["train/logprob_abs_diff_max"] for line in train]
    assert max(differences) <= 1e-4, differences
    assert [line["sync/version"] for line in sync] == [1, 2, 3, 4]
    assert {line["sync/transport"] for line in sync} == {transport}
    assert len({line["sync/digest"] for line in sync}) == 4
    assert {(line["sync/engines_proven"], line["sync/tensors_unproven"]) for line in sync} == {(engines_proven, 0)}
    assert all(0 < line["sync/verify_seconds"] < line["sync/seconds"] for line in sync)
    assert ["sync/probe_logprob_abs_diff" in line for line in sync] == [
        True,
        False,
        False,
        False,
    ], "the first, and then every tenth"
    assert sync[0]["sync/probe_logprob_abs_diff"] <= 1e-5 and sync[0]["sync/probe_seconds"] > 0
    assert all(line["train/grad_norm"] > 0 for line in train)
    # Samples of the last rollout were generated after two trainings: HF with those weights agrees, HF with the first
    # does not.
    samples = Path(f"{run.run_dir}-samples/2.npz")
    assert largest_difference(Path(f"{run.run_dir}-hf/2"), samples) <= 1e-4
    assert largest_difference(model, samples) > 1e-2


@pytest.mark.long_run  # the placement of test_episodes.py, with plain answers
def test_colocate_two_ranks_two_engines(submit, tiny_model_dir):
    before = our_processes()
    run = submit(
        "--actor-num-nodes 1 --actor-num-gpus-per-node 2 --colocate --rollout-num-gpus-per-engine 1"
        " --update-weight-buffer-size 500000"
    )
    check_run(run, tiny_model_dir, "ipc", engines_proven=2)
    assert_nothing_left(before)


def test_colocate_with_the_train_state_on_the_host_while_engines_generate(submit, tiny_model_dir):
    """--offload-train as GPUs do it by default: trainers start first and leave, and nothing of them stays."""
    before = our_processes()
    run = submit(
        "--actor-num-nodes 1 --actor-num-gpus-per-node 2 --tensor-model-parallel-size 2 --colocate"
        " --rollout-num-gpus-per-engine 1 --update-weight-buffer-size 500000 --offload-train --log-level debug"
    )
    check_run(run, tiny_model_dir, "ipc", engines_proven=2)
    (start,) = run.metrics("start")
    parts = [name for name in start if name in ("start/waiting_for_the_trainer_seconds", "start/engines_seconds")]
    assert parts == ["start/waiting_for_the_trainer_seconds", "start/engines_seconds"], "in this order"
    log = (run.run_dir / "logs" / "actor-0.log").read_text()
    assert log.count("GiB given up") == 1 + 2 * 4, "before engines start, and twice around each sync"
    assert "stay where they are" not in log
    assert_nothing_left(before)


@pytest.mark.long_run
def test_disaggregated_tp2_trainer_tp2_engine(submit, tiny_model_dir):
    before = our_processes()
    run = submit(
        "--actor-num-nodes 1 --actor-num-gpus-per-node 2 --tensor-model-parallel-size 2 --rollout-num-gpus 2 "
        "--rollout-num-gpus-per-engine 2 --update-weight-buffer-size 500000"
    )
    check_run(run, tiny_model_dir, "broadcast", engines_proven=1)
    assert_nothing_left(before)


@pytest.mark.long_run
def test_disaggregated_pp2_trainer_over_disk(submit, tiny_model_dir):
    before = our_processes()
    run = submit(
        "--actor-num-nodes 1 --actor-num-gpus-per-node 2 --pipeline-model-parallel-size 2 --rollout-num-gpus 1"
        " --update-weight-transport disk"
    )
    check_run(run, tiny_model_dir, "disk", engines_proven=1)
    assert_nothing_left(before)


def test_disaggregated_pp2_trainer_by_delta(submit, tiny_model_dir):
    """Only what changed travels, from two sources to the receiver beside the engine."""
    before = our_processes()
    run = submit(
        "--actor-num-nodes 1 --actor-num-gpus-per-node 2 --pipeline-model-parallel-size 2 --rollout-num-gpus 1"
        " --update-weight-mode delta"
    )
    check_run(run, tiny_model_dir, "delta", engines_proven=1)
    sync = run.metrics("sync")
    assert [line["sync/full_engines"] for line in sync] == [1, 0, 0, 0]
    assert "sync/changed_share" not in sync[0]
    for line in sync[1:]:
        assert 0 < line["sync/changed_share"] <= 1
        assert line["sync/delta_bytes"] < sync[0]["sync/delta_bytes"]
    assert list((run.run_dir / "receivers").iterdir()) == [], "the receiver's copy goes with it"
    assert_nothing_left(before)


@pytest.fixture
def external_server(tiny_model_dir, tmp_path):
    """A server started by hand: SGLang's own command line behind the CPU shim, no key, not ours."""
    (port,) = free_ports(1)
    command = [
        sys.executable, "-m", "slime_like.sglang_backend.cpu_server", "--model-path", str(tiny_model_dir), "--host",
        "127.0.0.1", "--port", str(port),
        "--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32", "--max-total-tokens", "4096",
        "--sleep-on-idle",
        "--disable-overlap-schedule", "--skip-server-warmup",
    ]  # fmt: skip
    with open(tmp_path / "external.log", "w") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(OMP_NUM_THREADS="1"),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + 90
    while True:
        assert process.poll() is None and time.monotonic() < deadline, (tmp_path / "external.log").read_text()[-3000:]
        try:
            if requests.get(f"{url}/health", timeout=5).ok:
                break
        except requests.RequestException:
            time.sleep(0.3)
    yield url
    stop_group(process, grace_s=0)


def checksum(url: str):
    answer = requests.post(f"{url}/weights_checker", json={"action": "checksum"}, timeout=30)
    assert answer.ok, answer.text
    return answer.json()


@pytest.mark.parametrize("transport", ["broadcast"])
def test_external_engine_gets_no_gpu_and_lives_on(submit, tiny_model_dir, external_server, transport):
    before = our_processes()
    first = checksum(external_server)
    address = external_server.removeprefix("http://")
    run = submit(
        "--actor-num-nodes 1 --actor-num-gpus-per-node 2 --rollout-num-gpus-per-engine 1 --rollout-external "
        f"--rollout-external-engine-addrs {address} --update-weight-transport {transport}"
    )
    check_run(run, tiny_model_dir, transport, engines_proven=0)
    assert "digests prove the weights of 0 of 1 engines" in run.output
    assert "it was started without --custom-weight-loader" in (run.run_dir / "logs/actor-0.log").read_text()
    assert "mode external: 2 GPUs" in run.output
    router_log = (run.run_dir / "logs/router-0.log").read_text()
    assert address in router_log
    assert requests.get(f"{external_server}/health", timeout=30).ok, "an external engine is never stopped"
    assert checksum(external_server) != first
    assert_nothing_left(before)


def test_cluster_is_free_afterwards(ray_cluster):
    """Every GPU that the runs above reserved has been given back."""
    join = "import ray, os, time; ray.init(address=os.environ['RAY_ADDRESS'], logging_level='ERROR'); time.sleep(1)"
    script = f"{join}; print('free ' + str(ray.available_resources().get('GPU')))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=ray_cluster.environment | {"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert "free 4.0" in done.stdout, done.stdout + done.stderr
