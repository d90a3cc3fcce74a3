"""A rank of the trainer that is killed, wherever a step just is: all ranks are started anew while engines stay, and
every token, reward, loss and weight digest is that of a run that nobody killed, to the bit.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e import same_runs
from tests.e2e.runs import ROOT, SMALL_RUN, Finished, assert_nothing_left, environment, our_processes

pytestmark = [pytest.mark.e2e, pytest.mark.long_run]

#: What the first sync after a start measures beside what the others do.
OF_A_START = ("sync/probe_logprob_abs_diff", "sync/probe_seconds")
PLACES = {
    "colocated": ["--colocate", "--actor-num-gpus-per-node", "1"],
    "apart, two trainer ranks": ["--actor-num-gpus-per-node", "2", "--rollout-num-gpus", "1"],
    "one step ahead": ["--actor-num-gpus-per-node", "1", "--rollout-num-gpus", "1", "--async-mode", "one-step"],
}
#: (where, rollouts done there), each a blow in one run; before the first checkpoint and behind it.
BLOWS = [("train", 0), ("generate", 1), ("publish checkpoint", 2), ("sync", 2)]
#: The same one step ahead, where the last rollout is asked for when one is done.
BLOWS_AHEAD = [("train", 0), ("generate", 2), ("publish checkpoint", 2), ("sync", 2)]


def run(place: str, blows: list[tuple[str, int]], model: Path, data: Path, folder: Path, *more: str) -> Finished:
    """A run of three rollouts that saves each of them; trainer ranks are killed in it. Of several, the last."""
    folder.mkdir()
    which = -1 if "two" in place else 0
    orders = [
        {"who": "trainer", "at": at, "step": step, "which": which, "mark": str(folder / f"mark-{at}-{step}")}
        for at, step in blows
    ]
    flags = list(SMALL_RUN)
    flags[flags.index("--custom-rm-path") + 1] = "tests.e2e.killed_train.even_tokens"
    run_dir = folder / "run"
    line = [
        sys.executable, str(ROOT / "tests/e2e/killed_train.py"), json.dumps(orders), *flags, *PLACES[place],
        "--deterministic", "--save", str(folder / "saved"), "--save-interval", "1",
        "--hf-checkpoint", str(model), "--prompt-data", f"{data}/train.jsonl", "--run-dir", str(run_dir),
        *same_runs.flags(run_dir), *more,
    ]  # fmt: skip
    environ = environment(PYTHONPATH=os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
    done = subprocess.run(
        line, cwd=ROOT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600
    )
    assert all(Path(order["mark"]).exists() for order in orders), done.stdout[-3000:]
    return Finished(done.returncode, done.stdout, run_dir)


@pytest.mark.parametrize("place", PLACES)
def test_lost_ranks_are_started_anew_and_no_number_changes(place, tiny_model_dir, tiny_data_dir, tmp_path):
    before = our_processes()
    unharmed = run(place, [], tiny_model_dir, tiny_data_dir, tmp_path / "unharmed")
    assert unharmed.returncode == 0, unharmed.logs()
    most, blows = ("--max-trainer-restarts", str(len(BLOWS))), BLOWS_AHEAD if "ahead" in place else BLOWS
    harmed = run(place, blows, tiny_model_dir, tiny_data_dir, tmp_path / "harmed", *most)
    assert harmed.returncode == 0, harmed.logs()
    assert harmed.output.count("engines stayed") == len(BLOWS)
    assert "were started anew from the start in" in harmed.output
    assert "were started anew from the checkpoint after 2 rollouts in" in harmed.output
    assert [path.name for path in (harmed.run_dir / "logs").glob("engine-[0-9]*.log")] == ["engine-0.log"]
    assert (harmed.run_dir / "logs/engine-0.log").read_text().count("fired up and ready") == 1, "one server all along"
    print(f"{same_runs.assert_same(unharmed, harmed, without=OF_A_START)} numbers are equal")
    assert json.loads((harmed.run_dir / "end.json").read_text())["exit_status"] == 0
    assert_nothing_left(before)


def test_restarts_are_bounded_and_the_end_says_so(tiny_model_dir, tiny_data_dir, tmp_path):
    before = our_processes()
    blows = [("train", 0), ("train", 1)]
    most = ("--max-trainer-restarts", "1")
    ended = run("apart, two trainer ranks", blows, tiny_model_dir, tiny_data_dir, tmp_path / "run", *most)
    assert ended.returncode == 1, ended.logs()
    assert re.search(r"ProcessLost: trainer rank [01] died during train", ended.output)
    assert "cannot be started anew: --max-trainer-restarts 1 is used up" in ended.output
    end = json.loads((ended.run_dir / "end.json").read_text())
    assert (end["role"], end["phase"], end["step"], end["exit_status"]) == ("actor", "train", 1, 1)
    assert "--resume auto goes on after 1 rollouts" in ended.output
    assert_nothing_left(before)
