"""Weight syncs inside whole runs that go right: streams from two stages, and deltas to engines of others."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from tests.e2e.conftest import free_ports
from tests.e2e.hf_oracle import largest_difference
from tests.e2e.runs import (
    ROOT,
    SMALL_RUN,
    Finished,
    assert_nothing_left,
    environment,
    our_processes,
    run_train,
    stop_group,
)
from tests.e2e.syncs import LONG, PLACES, buckets_left

pytestmark = pytest.mark.e2e


@LONG
@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
def test_two_stages_stream_at_once(tiny_model_dir, tiny_data_dir, tmp_path, transport):
    """Three trainings; engines that have one request a sync, and prove all that they hold."""
    before = our_processes()
    run = run_train(
        *SMALL_RUN, "--hf-checkpoint", tiny_model_dir, "--prompt-data", f"{tiny_data_dir}/train.jsonl",
        *PLACES[transport],
        "--actor-num-gpus-per-node", 2, "--pipeline-model-parallel-size", 2, "--rollout-num-gpus", 2,
        "--rollout-num-gpus-per-engine", 1,
        "--update-weight-transport", transport, "--update-weight-buffer-size", 200_000, "--verify-weight-sync", "full",
        "--save", tmp_path / "save", "--save-interval", 1, "--save-hf", f"{tmp_path}/hf/{{rollout_id}}",
        "--save-debug-rollout-data", f"{tmp_path}/samples/{{rollout_id}}.npz", run_dir=tmp_path / "run", timeout=240,
    )  # fmt: skip
    assert run.returncode == 0, run.logs()
    check_weights(run, tiny_model_dir, tmp_path, transport, engines=2)
    assert all(line["sync/probe_logprob_abs_diff"] <= 1e-5 for line in run.metrics("sync")), (
        "full: each sync was probed"
    )
    for number in range(2):
        log = (run.run_dir / f"logs/engine-{number}.log").read_text()
        assert "/update_weights_from_distributed" not in log, "that is one request for every bucket"
        assert log.count("POST /begin_weight_update") == log.count("POST /update_weights_from_tensor") == 4
    assert_nothing_left(before)
    assert transport == "broadcast" or buckets_left() == []


def check_weights(run: Finished, model: Path, folder: Path, transport: str, *, engines: int) -> None:
    """Three rollouts; engines that proved each version, and generated with it."""
    train, sync = run.metrics("train"), run.metrics("sync")
    assert [line["step"] for line in train] == [0, 1, 2]
    assert max(line["train/logprob_abs_diff_max"] for line in train) <= 1e-4
    assert [
        (line["sync/version"], line["sync/transport"], line["sync/engines_proven"], line["sync/tensors_unproven"])
        for line in sync
    ] == [(version, transport, engines, 0) for version in (1, 2, 3, 4)]
    assert len({line["sync/digest"] for line in sync}) == 4
    # Samples of the last rollout were generated after two trainings: HF with those weights agrees, HF with the first
    # does not.
    assert largest_difference(folder / "hf/2", folder / "samples/2.npz") <= 1e-4
    assert largest_difference(model, folder / "samples/2.npz") > 1e-2


KEY = "key-of-somebody-else"


@pytest.fixture
def two_engines(tiny_model_dir, tmp_path) -> Iterator[list[str]]:
    """URLs of two servers that somebody else started."""
    urls, processes = [], []
    with contextlib.ExitStack() as stack:
        for number, port in enumerate(free_ports(2)):
            command = [
                sys.executable, "-m", "slime_like.sglang_backend.cpu_server", "--model-path", str(tiny_model_dir),
                "--host", "127.0.0.1", "--port", str(port),
                "--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32", "--max-total-tokens",
                "4096", "--sleep-on-idle",
                "--disable-overlap-schedule", "--skip-server-warmup", "--api-key", KEY,
                "--custom-weight-loader", "slime_like.weight_sync.in_engine.shm_loader.load",
            ]  # fmt: skip
            with open(tmp_path / f"external-{number}.log", "w") as log:
                env = environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
                processes.append(
                    subprocess.Popen(
                        command, cwd=ROOT, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
                    )
                )
            stack.callback(stop_group, processes[-1], grace_s=0)
            urls.append(f"http://127.0.0.1:{port}")
        deadline = time.monotonic() + 120
        for number, (url, process) in enumerate(zip(urls, processes, strict=True)):
            while not served_version(url):
                assert process.poll() is None and time.monotonic() < deadline, (
                    tmp_path / f"external-{number}.log"
                ).read_text()[-3000:]
                time.sleep(0.3)
        yield urls


def served_version(url: str) -> str | None:
    """The engine's weight version; None if it does not answer."""
    try:
        answer = requests.get(f"{url}/model_info", headers={"Authorization": f"Bearer {KEY}"}, timeout=10)
    except requests.RequestException:
        return None
    return answer.json()["weight_version"] if answer.ok else None


@LONG
def test_deltas_to_engines_and_receivers_of_somebody_else(two_engines, tiny_model_dir, tiny_data_dir, tmp_path):
    """A receiver beside each of two engines, both started by hand with one key.

    The first sync is whole, the others are deltas.
    """
    before, key = our_processes(), "key-of-the-receivers-0123456789"
    with contextlib.ExitStack() as stack:
        receivers = [
            stack.enter_context(hand_started_receiver(tmp_path / f"receiver-{number}", key)) for number in range(2)
        ]
        run = run_train(
            *SMALL_RUN, "--hf-checkpoint", tiny_model_dir, "--prompt-data", f"{tiny_data_dir}/train.jsonl",
            "--actor-num-gpus-per-node", 2, "--pipeline-model-parallel-size", 2, "--update-weight-mode", "delta",
            "--update-weight-buffer-size", 200_000,
            "--rollout-external", "--rollout-external-engine-addrs",
            *(url.removeprefix("http://") for url in two_engines),
            "--rollout-external-receiver-addrs", *receivers,
            "--save", tmp_path / "save", "--save-interval", 1, "--save-hf", f"{tmp_path}/hf/{{rollout_id}}",
            "--save-debug-rollout-data", f"{tmp_path}/samples/{{rollout_id}}.npz", run_dir=tmp_path / "run",
            timeout=240,
            env=environment(SLIME_LIKE_ENGINE_API_KEY=KEY, SLIME_LIKE_RECEIVER_API_KEY=key),
        )  # fmt: skip
        assert run.returncode == 0, run.logs()
        check_weights(run, tiny_model_dir, tmp_path, "delta", engines=2)
        sync = run.metrics("sync")
        assert [line["sync/full_engines"] for line in sync] == [2, 0, 0, 0]
        assert "sync/changed_share" not in sync[0]
        assert all(
            0 < line["sync/changed_share"] <= 1 and line["sync/delta_bytes"] < sync[0]["sync/delta_bytes"]
            for line in sync[1:]
        )
        assert [served_version(url) for url in two_engines] == ["4", "4"], "they live on, with the last weights"
        for address in receivers:
            state = requests.get(
                f"http://{address}/state", headers={"Authorization": f"Bearer {key}"}, timeout=10
            ).json()
            assert state["version"] == 4 and set(state["sources"]) == {"0", "1"}
        left = [
            path
            for path in run.run_dir.rglob("*")
            if path.is_file() and any(k.encode() in path.read_bytes() for k in (KEY, key))
        ]
        assert not left and key not in run.output, "the keys are written nowhere"
    assert_nothing_left(before)


@contextlib.contextmanager
def hand_started_receiver(folder: Path, key: str) -> Iterator[str]:
    """As a user starts it; gives host:port."""
    folder.mkdir()
    key_path, log_path = folder / "key.txt", folder / "receiver.log"
    key_path.touch(0o600)
    key_path.write_text(key)
    command = [
        sys.executable,
        "-m",
        "slime_like.weight_sync.delta.receiver",
        "--directory",
        folder / "weights",
        "--port",
        "0",
        "--api-key-file",
        key_path,
    ]
    with open(log_path, "w") as log:
        process = subprocess.Popen(
            list(map(str, command)),
            cwd=ROOT,
            env=environment(),
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 30
        while "receiver at " not in (text := log_path.read_text()):
            assert process.poll() is None and time.monotonic() < deadline, text
            time.sleep(0.1)
        yield text.split("receiver at ")[1].split()[0]
        assert process.poll() is None, "an external receiver is never ended: " + log_path.read_text()[-3000:]
    finally:
        stop_group(process)
