"""Weight syncs inside whole runs: what goes wrong there ends the run with its cause.

Streams from two stages, and deltas to engines of others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import requests

from slime_like.rollout.debug_data import load_rollout
from slime_like.sglang_backend.shared_memory import shared_directory
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
from tests.helpers.tiny_models import make_tiny_model

pytestmark = pytest.mark.e2e

#: Whole runs of what tests/multiprocess/test_fault_table.py does in a world of its own (scripts/test_long.sh).
LONG = pytest.mark.fault_table
#: Of each step of a sync, in seconds: what goes wrong must be told within it.
DEADLINE_S = 30.0
#: How long a run may then take to end everything.
CLOSE_S = 25.0
SHARED = Path(shared_directory())
TENSOR = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture(scope="module")
def moe_model_dir(tmp_path_factory) -> Path:
    """A random Qwen3-MoE with the tokenizer of models/tiny-qwen3."""
    folder = tmp_path_factory.mktemp("models") / "tiny-qwen3-moe"
    make_tiny_model(str(folder), "qwen3_moe", vocab_size=320, num_layers=2, eos_token_id=299, pad_token_id=297)
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copyfile(ROOT / "models/tiny-qwen3" / name, folder / name)
    return folder


@dataclasses.dataclass
class Faulty(Finished):
    """A run in whose second sync something went wrong."""

    seconds: float  # from the beginning of that sync to the run's end

    @property
    def error(self) -> str:
        """What it said after it had started, without warnings."""
        said = self.output.partition("started in")[2].splitlines()[1:]
        return "\n".join(line for line in said if not line.startswith("WARNING"))

    def assert_ended_by(self, *words: str) -> None:
        """Status 1 in time, these words in its error, and no traceback."""
        print(f"{self.seconds:.1f} s after the sync began: {self.error}")
        assert self.returncode == 1, self.logs()
        assert all(word in self.error for word in words), f"{words} are to be in: {self.error}"
        assert "Traceback" not in self.error, self.error
        assert self.seconds < DEADLINE_S + CLOSE_S, f"{self.seconds:.0f} s"

    def assert_nothing_generated(self, samples: str) -> None:
        """One rollout, all of it with version 1; then none."""
        assert [line["step"] for line in self.metrics("rollout")] == [0]
        assert [line["sync/version"] for line in self.metrics("sync")] == [1]
        versions = {
            int(v) for group in load_rollout(samples, 0) for sample in group.samples for v in sample.weight_versions
        }
        assert versions == {-1, 1}
        assert not Path(samples.replace("{rollout_id}", "1")).exists()


def buckets_left() -> list[str]:
    """Folders in shared memory of processes that are gone.

    Those of earlier runs are removed by each run that needs some.
    """
    return [
        path.name for path in SHARED.glob("*-source-*") if not Path(f"/proc/{path.name.partition('-')[0]}").exists()
    ]


@pytest.fixture
def faulty(tiny_data_dir, tmp_path):
    """Run train.py with a fault in the second sync, after one rollout."""

    def run(model: Path, what, *flags, rank: int = 0, transport: str = "ipc") -> Faulty:
        before, run_dir, mark = our_processes(), tmp_path / "run", tmp_path / "mark"
        order = json.dumps({"version": 2, "rank": rank, "mark": str(mark), "what": what})
        samples = f"{tmp_path}/samples/{{rollout_id}}.npz"
        command = [
            sys.executable, ROOT / "tests/e2e/faulty_train.py", order, *SMALL_RUN, "--hf-checkpoint", model,
            "--prompt-data", f"{tiny_data_dir}/train.jsonl",
            "--update-weight-transport", transport, "--update-weight-timeout-s", DEADLINE_S,
            "--verify-weight-sync-interval", 0,
            "--update-weight-buffer-size", 200_000, "--save-debug-rollout-data", samples, "--run-dir", run_dir, *flags,
        ]  # fmt: skip
        env = environment(PYTHONPATH=str(ROOT))
        done = subprocess.run(
            list(map(str, command)),
            cwd=ROOT,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
        )
        ended = time.time()
        (tmp_path / "run.out").write_text(done.stdout)
        finished = Finished(done.returncode, done.stdout, run_dir)
        assert mark.exists(), f"it did not come to the second sync:\n{finished.logs()}"
        outcome = Faulty(done.returncode, done.stdout, run_dir, seconds=ended - float(mark.read_text()))
        assert_nothing_left(before, seconds=10)
        # who cannot be asked leaves them, to the next run that needs some
        if transport == "ipc" and what not in ("trainer", "engine hangs"):
            assert buckets_left() == []
        outcome.assert_nothing_generated(samples)
        return outcome

    return run


def test_a_tensor_changed_in_flight_ends_the_run(faulty, tiny_model_dir):
    """Nothing but the engine's own digests can know of it."""
    run = faulty(tiny_model_dir, {"kind": "flipped", "names": [TENSOR]}, "--actor-num-gpus-per-node", 1, "--colocate")
    run.assert_ended_by("WeightSyncError: engine 0 at http", "rank 0", f"{TENSOR} is not what was sent")


@LONG
def test_a_full_disk_ends_the_run(faulty, tiny_model_dir, tmp_path):
    """The first version fits, the second beside it does not."""
    folder = tmp_path / "small"
    size = (tiny_model_dir / "model.safetensors").stat().st_size
    with small_disk(folder, size * 3 // 2) as what:
        flags = ("--actor-num-gpus-per-node", 1, "--rollout-num-gpus", 1, "--update-weight-disk-dir", folder)
        run = faulty(tiny_model_dir, what, *flags, transport="disk")
        assert [path.name for path in folder.iterdir()] == ["version-00000001"], (
            "what was written of the second one is gone"
        )
    run.assert_ended_by(
        f"WeightSyncError: {folder} cannot be written to",
        "bytes are free",
        "--update-weight-disk-dir",
        "Engines keep the weights",
    )


@contextlib.contextmanager
def small_disk(folder: Path, size: int) -> Iterator[str | dict]:
    """A file system of so many bytes where that is allowed (root), else a trainer that may write no large files.

    What the run is to do about it.
    """
    folder.mkdir()
    nothing = {"kind": "flipped", "names": []}
    if (
        os.getuid() == 0
        and subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], capture_output=True
        ).returncode
        == 0
    ):
        try:
            yield nothing
        finally:
            subprocess.run(["umount", folder], check=True)
    else:
        yield "disk"


#: How trainer and engine are cut, and how they are placed by transport.
SIZES = {
    1: ("--actor-num-gpus-per-node", 1, "--rollout-num-gpus", 1),
    2: (
        "--actor-num-gpus-per-node",
        2,
        "--tensor-model-parallel-size",
        2,
        "--sequence-parallel",
        "--rollout-num-gpus",
        2,
        "--rollout-num-gpus-per-engine",
        2,
    ),
}
PLACES = {"ipc": ("--colocate",), "broadcast": ()}


@LONG
@pytest.mark.parametrize("transport", ["ipc", "broadcast"])
@pytest.mark.parametrize("tp", [1, 2])
def test_an_engine_with_experts_that_is_killed_is_named(faulty, moe_model_dir, transport, tp):
    run = faulty(
        moe_model_dir, "engine", *SIZES[tp], *PLACES[transport], "--moe-router-dtype", "fp32", transport=transport
    )
    run.assert_ended_by("EngineError: ", "engine 0 ")


#: Two trainer ranks, a pipeline stage each, and two engines.
TWO_STAGES = (
    "--actor-num-gpus-per-node",
    2,
    "--pipeline-model-parallel-size",
    2,
    "--rollout-num-gpus",
    2,
    "--rollout-num-gpus-per-engine",
    1,
)


@LONG
@pytest.mark.parametrize(
    ("transport", "what"), [("broadcast", "engine"), ("ipc", "engine hangs"), ("broadcast", "engine hangs")]
)
def test_one_of_two_engines_that_dies_or_hangs_is_named(faulty, tiny_model_dir, transport, what):
    run = faulty(
        tiny_model_dir, what, *TWO_STAGES, *PLACES[transport], "--update-weight-timeout-s", 15, transport=transport
    )
    run.assert_ended_by("engine 1 ")
    # a broadcast waits for all of them; who answers afterwards tells
    if (transport, what) == ("broadcast", "engine hangs"):
        assert "abandoned weight update: client waited 5 s for engine 1 at" in run.output
        assert "for engine 0" not in run.output.partition("abandoned")[2].splitlines()[0]
    else:
        assert "engine 0 " not in run.error


@LONG
def test_a_tensor_of_the_second_stage_changed_in_flight_is_named(faulty, tiny_model_dir):
    fault = {"kind": "flipped", "names": ["model.layers.3.self_attn.o_proj.weight"]}
    flags = (*TWO_STAGES[:-1], 2)
    run = faulty(tiny_model_dir, fault, *flags, rank=1, transport="broadcast")
    run.assert_ended_by("engine 0 at http", "rank 1", "model.layers.3.self_attn.o_proj.weight is not what was sent")


@LONG
@pytest.mark.parametrize(("transport", "rank"), [("ipc", 0), ("broadcast", 1)])
def test_a_rank_of_either_stage_that_is_killed_is_named(faulty, tiny_model_dir, transport, rank):
    """The first also speaks for the other to the engines."""
    flags = ("--actor-num-gpus-per-node", 2, "--pipeline-model-parallel-size", 2, "--rollout-num-gpus", 1)
    run = faulty(tiny_model_dir, "trainer", *flags, *PLACES[transport], rank=rank, transport=transport)
    run.assert_ended_by(f"RunError: trainer rank {rank} died during weight sync")


# ------------------------------------------------------------------ what must go right


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
