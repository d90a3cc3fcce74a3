"""Weight syncs inside whole runs: what goes wrong there ends the run with its cause."""

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

from slime_like.rollout.debug_data import load_rollout
from tests.e2e.runs import (
    ROOT,
    SMALL_RUN,
    Finished,
    assert_nothing_left,
    environment,
    our_processes,
)
from tests.e2e.syncs import LONG, PLACES, buckets_left
from tests.helpers.tiny_models import make_tiny_model

pytestmark = pytest.mark.e2e

#: Of each step of a sync, in seconds: what goes wrong must be told within it.
DEADLINE_S = 30.0
#: How long a run may then take to end everything.
CLOSE_S = 25.0
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


@pytest.fixture
def faulty(tiny_data_dir, tmp_path):
    """Run train.py with a fault in the second sync, after one rollout."""

    def run(model: Path, what, *flags, rank: int = 0, transport: str = "ipc") -> Faulty:
        before, run_dir, mark = our_processes(), tmp_path / "run", tmp_path / "mark"
        order = json.dumps({"version": 2, "rank": rank, "mark": str(mark), "what": what})
        samples = f"{tmp_path}/samples/{{rollout_id}}.npz"
        command = [
            sys.executable, ROOT / "tests/e2e/faulty_train.py", order, *SMALL_RUN, "--hf-checkpoint", model,
            "--max-engine-restarts", "0",
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


# Every kind of change is caught by name in multiprocess/test_fault_table.py; the error ends a run as any does.
@LONG
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


#: How trainer and engine are cut.
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
    run.assert_ended_by(f"ProcessLost: trainer rank {rank} died during weight sync")
