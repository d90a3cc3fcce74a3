"""The rows of scripts/run-smollm2.sh: held out is held out, labels are balanced, no answer is shown; and its report."""

# Covers scripts/examples/smollm2/make_data.py and report.py.

from __future__ import annotations

import collections
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.examples.smollm2 import make_data, report
from slime_like.errors import DataError
from slime_like.rollout.agents.adapters.reasoning_gym import score

pytest.importorskip("reasoning_gym")

SIZES = {"sft": 96, "train": 60, "eval": 48}


def written(out: Path, task: str, seed: int) -> dict[str, list[dict]]:
    make_data.write_task(make_data.TASKS[task], out, seed=seed, sizes=SIZES)
    return {name: report.read_lines(out / f"{name}.jsonl") for name in SIZES}


def asked(rows: list[dict]) -> list[str]:
    return [row["prompt"][-1]["content"] for row in rows]


@pytest.mark.parametrize("task", sorted(make_data.TASKS))
def test_no_held_out_question_is_trained_on_and_every_seed_has_the_same(tmp_path: Path, task: str):
    first, second = (written(tmp_path / str(seed), task, seed) for seed in (0, 1))
    assert {name: len(rows) for name, rows in first.items()} == SIZES
    assert first["eval"] == second["eval"]
    assert asked(first["train"]) != asked(second["train"])
    for rows in (first, second):
        assert not set(asked(rows["eval"])) & {*asked(rows["train"]), *asked(rows["sft"])}


@pytest.mark.parametrize("task", [name for name, task in make_data.TASKS.items() if task.labels])
def test_labels_are_equally_often(tmp_path: Path, task: str):
    labels = make_data.TASKS[task].labels
    rows = written(tmp_path, task, 0)
    counts = collections.Counter(row["label"] for row in rows["eval"])
    assert counts == dict.fromkeys(labels, SIZES["eval"] // len(labels))


@pytest.mark.parametrize("task", sorted(make_data.TASKS))
def test_the_reward_pays_the_label_and_nothing_that_holds_it(tmp_path: Path, task: str):
    for row in written(tmp_path, task, 0)["eval"][:10]:
        source = row["metadata"]["reasoning_gym"]
        pay = [
            score(source["task"], source["options"], source["entry"], text)
            for text in (row["label"], f"It is {row['label']}, I think", "Zzz")
        ]
        assert pay == [1.0, 0.0, 0.0]


def test_the_warm_up_answers_with_a_name_of_the_text_and_knows_nothing(tmp_path: Path):
    rows = written(tmp_path, "needle", 0)["sft"]
    for row in rows:
        names = make_data.names_of_statements({"question": asked([row])[0]})
        assert len(names) == 3
        assert {row["response"], row["label"]} <= set(names)
    # 96 draws of one in three: 5 standard deviations
    assert statistics.fmean(row["response"] == row["label"] for row in rows) == pytest.approx(1 / 3, abs=0.24)


def test_baselines_by_hand():
    task = make_data.Task(name="letter_counting", options={})
    rows = [{"entry": {"answer": answer}} for answer in "1123"]
    # constant: "1" in two of four; random: a half for each "1", a quarter for the others
    assert make_data.baselines(task, rows) == {"constant": 0.5, "random": (0.5 + 0.5 + 0.25 + 0.25) / 4}


def test_a_generator_that_has_nothing_new_is_an_error():
    task = make_data.Task(name="chain_sum", options=make_data.TASKS["sums"].options)
    known = {row["entry"]["question"] for row in make_data.choose(task, 8000, first_seed=0, without=set())}
    assert len(known) == 200  # ten digits, twice, and two signs
    with pytest.raises(DataError, match="chain_sum: 0 of 3 questions are new"):
        make_data.choose(task, 3, first_seed=5 * make_data.SEEDS_APART, without=known)


def test_the_script_plans_without_a_file_and_passes_flags_on(repo_root: Path, tmp_path: Path):
    script = str(repo_root / "scripts/run-smollm2.sh")
    variables = {"PYTHON": sys.executable, "RUN": str(tmp_path / "run"), "MODELS": str(tmp_path / "models")}
    command = ["bash", script, "--lora-rank", "8", "--plan", "json"]
    done = subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert (plan["mode"], plan["num_gpus"], plan["problems"]) == ("colocate", 1, [])
    assert list(tmp_path.iterdir()) == []
    wrong = subprocess.run([*command, "--no-such-flag"], env=os.environ | variables, capture_output=True, text=True)
    assert wrong.returncode == 2 and "--no-such-flag" in wrong.stdout + wrong.stderr


def test_the_report_reads_what_a_run_wrote():
    lines = [
        {"kind": "eval", "step": 0, "eval/needle/pass@1": 0.25},
        {"kind": "rollout", "step": 0, "rollout/reward_mean": 0.5, "rollout/seconds": 1.0},
        {"kind": "train", "step": 0, "train/logprob_abs_diff": 1e-5, "train/seconds": 3.0, "step/seconds": 6.0},
        {"kind": "sync", "step": 0, "sync/seconds": 2.0},
        {"kind": "rollout", "step": 1, "rollout/reward_mean": 0.75, "rollout/seconds": 2.0},
        {"kind": "train", "step": 1, "train/logprob_abs_diff": 3e-5, "train/seconds": 5.0, "step/seconds": 8.0},
        {"kind": "sync", "step": 1, "sync/seconds": 2.0},
        {"kind": "eval", "step": 2, "eval/needle/pass@1": 0.75},
    ]
    summary = report.of_metrics(lines, "needle")
    assert summary["rewards"] == [0.5, 0.75]
    assert summary["pass"] == {"before": 0.25, "after": 0.75}
    assert summary["logprob_abs_diff"] == {"mean": pytest.approx(2e-5), "largest": 3e-5}
    assert summary["seconds"] == {
        "step/seconds": 7.0,
        "rollout/seconds": 1.5,
        "train/seconds": 4.0,
        "sync/seconds": 2.0,
    }
    json.dumps(summary)
