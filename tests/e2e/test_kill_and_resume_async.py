"""Whoever is killed while generation runs ahead of training: the same command goes on, each prompt of the epoch is
trained on exactly once or named in dropped.jsonl, and every loss is that of a trainer that nobody killed and that is
given the same groups in the same order.
"""

from __future__ import annotations

import collections
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime_like.rollout.debug_data import load_rollout
from slime_like.utils.files import read_json_lines
from tests.e2e import same_runs
from tests.e2e.rewards import even_tokens
from tests.e2e.runs import ROOT, SMALL_RUN, Finished, assert_nothing_left, environment, our_processes, run_train

#: Up to seven whole runs, each of which has 180 s, and the trainer alone.
pytestmark = [pytest.mark.e2e, pytest.mark.long_run, pytest.mark.timeout(8 * 180)]

NUM_ROLLOUTS, BATCH = 6, 4
APART = ("--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1")
#: name -> (flags, who is killed where, with how many rollouts done)
CHAINS = {
    "full": (
        (*APART, "--async-mode", "full", "--max-staleness", "2", "--async-save"),
        [
            ("driver", "take", 1), ("trainer", "train", 2), ("trainer", "publish checkpoint", 3),
            ("engine", "synced", 4), ("gcs", "trained", 4), ("SIGTERM", "take", 5),
        ],
    ),
    "full, answers ended by syncs": (
        (*APART, "--async-mode", "full", "--update-weight-pause-mode", "abort"),
        [("driver", "saved", 2), ("router", "take", 3), ("raylet", "sync", 4)],
    ),
    "partial": (
        ("--actor-num-gpus-per-node", "1", "--colocate", "--partial-rollout", "--over-sampling-batch-size", "6"),
        [("driver", "saved", 1), ("SIGUSR1", "take", 2), ("driver", "train", 4)],
    ),
}  # fmt: skip


def common(model: Path, data: Path) -> list[str]:
    """Flags of the run, and of the trainer that is given what it has trained on."""
    flags = list(SMALL_RUN)
    flags[flags.index("--num-rollout") + 1] = str(NUM_ROLLOUTS)
    flags[flags.index("--rollout-max-response-len") + 1] = "40"
    flags[flags.index("--custom-rm-path") + 1] = "tests.e2e.killed_train.even_tokens"
    epoch = f"{data}/train.jsonl@[0:{NUM_ROLLOUTS * BATCH}]"
    return [
        *flags, "--hf-checkpoint", str(model), "--prompt-data", epoch, "--use-tis",
        "--rollout-stop-token-ids", *map(str, range(10, 20)),  # answers of many lengths
    ]  # fmt: skip


def run(model: Path, data: Path, run_dir: Path, order: dict, mode: tuple[str, ...]) -> Finished:
    """One process of the run."""
    line = [
        sys.executable, str(ROOT / "tests/e2e/killed_train.py"), json.dumps(order), *common(model, data), *mode,
        "--max-engine-restarts", "0", "--max-trainer-restarts", "0", "--max-router-restarts", "0",
        "--resume", "auto", "--save-interval", "1", "--save-total-limit", "2",
        "--run-dir", str(run_dir), *same_runs.flags(run_dir),
    ]  # fmt: skip
    environ = environment(PYTHONPATH=os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    done = subprocess.run(
        line, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=180
    )
    return Finished(done.returncode, done.stdout, run_dir)


@pytest.mark.parametrize("chain", CHAINS)
def test_each_prompt_is_trained_on_once_whoever_is_killed(chain, tiny_model_dir, tiny_data_dir, tmp_path):
    mode, kills = CHAINS[chain]
    before, folder = our_processes(), tmp_path / "run"
    for number, (who, where, step) in enumerate(kills):
        order = {"who": who, "at": where, "step": step, "mark": str(tmp_path / f"mark-{number}")}
        killed = run(tiny_model_dir, tiny_data_dir, folder, order, mode)
        assert Path(order["mark"]).exists() and killed.returncode != 0, killed.logs()
        assert "the driver outlives" not in killed.output, killed.logs()
        assert_nothing_left(before, seconds=45)
        saved = sorted(path.name for path in (folder / "checkpoints").glob("iter_*"))
        print(f"{who} killed at {where} {step}: status {killed.returncode}, checkpoints {saved}", flush=True)
        if who.startswith("SIG"):
            assert killed.returncode == 143, killed.logs()
    done = run(tiny_model_dir, tiny_data_dir, folder, order, mode)
    assert done.returncode == 0, done.logs()
    account(done)
    compare_losses(done, tiny_model_dir, tiny_data_dir, tmp_path)


def account(done: Finished) -> None:
    """By prompt: trained on once, or dropped by name; and the metrics' ledger says the same."""
    samples = str(done.run_dir / "rollouts" / "{rollout_id}.npz")
    groups = [group for step in range(NUM_ROLLOUTS) for group in load_rollout(samples, step)]
    trained = [group.prompt.index for group in groups]
    path = done.run_dir / "dropped.jsonl"
    dropped = [line["prompt"] for line in (read_json_lines(path) if path.exists() else []) if "prompt" in line]
    times = collections.Counter([*trained, *dropped])
    assert all(times[prompt] == 1 for prompt in range(NUM_ROLLOUTS * BATCH)), times
    assert len(trained) == len(set(trained)) == NUM_ROLLOUTS * BATCH and max(times.values()) == 1
    for group in groups:
        assert [sample.sample_index for sample in group.samples] == list(range(len(group.samples)))
        for sample in group.samples:
            assert sample.reward == even_tokens(None, sample)
    for step, line in enumerate(done.metrics("rollout")):
        assert line["step"] == step and line["rollout/ledger/trained"] == step * BATCH
    kept = [path.name for path in (done.run_dir / "checkpoints").glob("iter_*")]
    print(f"{len(trained)} prompts trained on once, {len(dropped)} dropped by name, checkpoints {sorted(kept)}")


def compare_losses(done: Finished, model: Path, data: Path, folder: Path) -> None:
    """A trainer alone, from the beginning to the end, on the groups that were trained on."""
    recorded = str(done.run_dir / "rollouts" / "{rollout_id}.npz")
    alone = run_train(
        *common(model, data), "--debug-train-only", "--load-debug-rollout-data", recorded,
        "--actor-num-gpus-per-node", "1", run_dir=folder / "alone",
    )  # fmt: skip
    assert alone.returncode == 0, alone.logs()
    ours, theirs = done.metrics("train"), alone.metrics("train")
    assert len(ours) == len(theirs) == NUM_ROLLOUTS
    furthest = 0.0
    for one, other in zip(ours, theirs, strict=True):
        assert one["step"] == other["step"]
        for name in ("train/loss", "train/grad_norm", "train/entropy", "train/logprob_abs_diff"):
            assert math.isclose(one[name], other[name], rel_tol=1e-5, abs_tol=1e-5), (one["step"], name)
            furthest = max(furthest, abs(one[name] - other[name]))
    assert len({line["train/grad_norm"] for line in ours}) == NUM_ROLLOUTS  # the steps differ
    print(f"losses, gradient norms, entropies and log-prob differences differ by {furthest:.1e} at most")
