"""The rows of scripts/run-smollm2.sh: held out is held out, the warm-up shows no answer; and its report."""

# Covers scripts/examples/smollm2/needle_rows.py and report.py.

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.examples.smollm2 import needle_rows, report
from slime_like.errors import DataError
from slime_like.rollout.agents.adapters.reasoning_gym import score

pytest.importorskip("reasoning_gym")

SIZES = {"sft": 96, "train": 60, "eval": 48}


def written(out: Path, seed: int, statements: int = 3) -> dict[str, list[dict]]:
    needle_rows.write(out, seed=seed, statements=statements, sizes=SIZES)
    return {name: report.read_lines(out / f"{name}.jsonl") for name in SIZES}


def texts(rows: list[dict]) -> list[str]:
    return [row["prompt"][-1]["content"].partition("\n")[0].strip() for row in rows]


def test_no_held_out_text_is_trained_on_and_every_seed_has_the_same(tmp_path: Path):
    first, second = (written(tmp_path / str(seed), seed) for seed in (0, 1))
    assert {name: len(rows) for name, rows in first.items()} == SIZES
    assert first["eval"] == second["eval"]
    entries = [row["metadata"]["reasoning_gym"]["entry"] for row in first["eval"]]
    assert json.loads((tmp_path / "0/baselines.json").read_text()) == needle_rows.baselines(entries)
    assert not set(texts(first["train"])) & set(texts(second["train"]))
    for rows in (first, second):
        assert not set(texts(rows["eval"])) & {*texts(rows["train"]), *texts(rows["sft"])}


def test_a_text_that_is_held_out_is_left_out_wherever_the_generator_draws_it():
    [one, two, three] = [{"entry": {"question": f"{name} likes red. \nWho?"}} for name in "ABC"]
    assert needle_rows.choose(iter([one, two, three, one]), 2, without={"A likes red."}) == [two, three]
    with pytest.raises(DataError, match="1 of 3 texts are new"):
        needle_rows.choose(iter([one, two]), 3, without={"A likes red."})


def test_the_reward_pays_the_label_and_nothing_that_holds_it(tmp_path: Path):
    for row in written(tmp_path, 0)["eval"][:10]:
        source = row["metadata"]["reasoning_gym"]
        pay = [
            score(source["task"], source["options"], source["entry"], text)
            for text in (row["label"], f"It is {row['label']}, I think", "Zzz")
        ]
        assert pay == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("statements", [2, 4])
def test_the_warm_up_shows_a_name_of_the_text_and_never_the_question(tmp_path: Path, statements: int):
    rows = written(tmp_path, 0, statements)
    names = [needle_rows.names_of({"question": row["prompt"][-1]["content"]}) for row in rows["sft"]]
    for row, among in zip(rows["sft"], names, strict=True):
        assert len(among) == statements and row["response"] in among
        assert row["prompt"][-1]["content"].endswith("\nWho is named? Reply only with a name.")
    assert {among.index(row["response"]) for row, among in zip(rows["sft"], names, strict=True)} == set(
        range(statements)
    )
    for row in rows["train"]:
        assert row["label"] in needle_rows.names_of({"question": row["prompt"][-1]["content"]})


def test_baselines_by_hand():
    asked = [("A", "A likes b. C likes d."), ("A", "A likes b. A hates c. D likes e."), ("D", "D likes b. E likes f.")]
    entries = [{"answer": answer, "question": f"{text} \nWho?"} for answer, text in asked]
    # constant: "A" in two of three; random: one of two, two of three, one of two
    expected = {"constant": 2 / 3, "random": (1 / 2 + 2 / 3 + 1 / 2) / 3}
    assert needle_rows.baselines(entries) == pytest.approx(expected)


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
        {"kind": "eval", "step": 0, "eval/held-out/pass@1": 0.25},
        {"kind": "rollout", "step": 0, "rollout/reward_mean": 0.5, "rollout/seconds": 1.0},
        {"kind": "train", "step": 0, "train/logprob_abs_diff": 1e-5, "train/seconds": 3.0, "step/seconds": 6.0},
        {"kind": "sync", "step": 0, "sync/seconds": 2.0},
        {"kind": "rollout", "step": 1, "rollout/reward_mean": 0.75, "rollout/seconds": 2.0},
        {"kind": "train", "step": 1, "train/logprob_abs_diff": 3e-5, "train/seconds": 5.0, "step/seconds": 8.0},
        {"kind": "sync", "step": 1, "sync/seconds": 2.0},
        {"kind": "eval", "step": 2, "eval/held-out/pass@1": 0.75},
    ]
    summary = report.of_metrics(lines)
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
