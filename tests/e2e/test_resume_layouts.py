"""One run that is killed after each rollout and goes on in another layout or placement: its losses are those of a run
on one card that nobody killed.
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

#: Five whole runs, each of which has 180 s.
pytestmark = [pytest.mark.e2e, pytest.mark.long_run, pytest.mark.timeout(6 * 180)]

PACKED = ("--use-dynamic-batch-size", "--max-tokens-per-gpu", "256")
ONE = ("--colocate", "--actor-num-gpus-per-node", "1")
#: Of each rollout: what it is, its flags, and a change that the resume names.
LAYOUTS = [
    (
        "TP 2, colocated",
        ("--colocate", "--actor-num-gpus-per-node", "2", "--tensor-model-parallel-size", "2", "--sequence-parallel"),
        "",
    ),
    ("DP 2, colocated", ("--colocate", "--actor-num-gpus-per-node", "2"), "--tensor-model-parallel-size 2 -> 1"),
    (
        "one card, an engine apart",
        ("--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1"),
        "--colocate True -> False",
    ),
    ("one card, colocated, padded", ONE, "--qkv-format thd -> bshd"),
]  # fmt: skip


def run(model: Path, data: Path, run_dir: Path, order: dict, *layout: str) -> Finished:
    """One process of the run."""
    flags = list(SMALL_RUN)
    begin = flags.index("--use-dynamic-batch-size")
    del flags[begin : begin + len(PACKED)]
    flags[flags.index("--num-rollout") + 1] = str(len(LAYOUTS))
    line = [
        sys.executable, str(ROOT / "tests/e2e/killed_train.py"), json.dumps(order), *flags, "--deterministic",
        "--resume", "auto", "--save-interval", "1", "--hf-checkpoint", str(model),
        "--prompt-data", f"{data}/train.jsonl", "--run-dir", str(run_dir), *layout, *same_runs.flags(run_dir),
    ]  # fmt: skip
    environ = environment(PYTHONPATH=os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    done = subprocess.run(
        line, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=180
    )
    return Finished(done.returncode, done.stdout, run_dir)


def test_a_run_goes_on_in_another_layout_and_placement(tiny_model_dir, tiny_data_dir, tmp_path):
    before, places = our_processes(), (tiny_model_dir, tiny_data_dir)
    straight = run(*places, tmp_path / "straight", {}, *ONE, *PACKED)
    assert straight.returncode == 0, straight.logs()
    for number, (_, layout, change) in enumerate(LAYOUTS, 1):
        is_last = number == len(LAYOUTS)
        batches = ("--qkv-format", "bshd", "--micro-batch-size", "4") if is_last else PACKED
        order = {} if is_last else {
            "who": "driver", "at": "saved", "step": number, "mark": str(tmp_path / f"mark-{number}")
        }  # fmt: skip
        done = run(*places, tmp_path / "run", order, *layout, *batches)
        assert (done.returncode == 0) == is_last, done.logs()
        assert change in done.output and ("changed since the last start" in done.output) == (number > 1), done.output
        assert_nothing_left(before, seconds=45)
    furthest = 0.0
    for ours, theirs, (name, _, _) in zip(done.metrics("train"), straight.metrics("train"), LAYOUTS, strict=True):
        for metric in ("train/loss", "train/entropy", "train/logprob_abs_diff"):
            assert ours[metric] == pytest.approx(theirs[metric], rel=0, abs=1e-5), (name, metric)
            furthest = max(furthest, abs(ours[metric] - theirs[metric]))
        assert ours["train/grad_norm"] == pytest.approx(theirs["train/grad_norm"], rel=1e-4), name
        print(f"{name}: loss {ours['train/loss']:.7f}, one card that was never stopped {theirs['train/loss']:.7f}")
    tokens = [{step: arrays["tokens"] for step, arrays in same_runs.samples(one).items()} for one in (done, straight)]
    assert tokens[0] == tokens[1] and len(tokens[0]) == len(LAYOUTS)
    print(f"furthest {furthest:.1e}; every token is the same")
