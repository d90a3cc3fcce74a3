"""The ladder of scripts/gpu_check.sh: verdicts, deadlines, the page, and memory by phase."""

import json
import math
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts" / "gpu_check"))

import check  # noqa: E402
import ladder  # noqa: E402
import memory  # noqa: E402
import page  # noqa: E402

PRETEND = {"device": "pretend", "gpus": 2, "hf_checkpoint": None}


def _rung(name="one", **more):
    return ladder.Rung(name=name, title=name.title(), **({"deadline_s": 30.0} | more))


def _answer(value, where="cuda"):
    numbers = {"tokens/s": 12.5}
    return {
        "summary": "fine", "where": where, "numbers": numbers,
        "checks": [{"what": "difference", "value": value, "sign": "<=", "limit": 0.02}],
    }  # fmt: skip


@pytest.mark.parametrize(
    ("value", "where", "verdict"),
    [
        (0.01, "cuda", "passed"),
        (0.01, "the CPU", "passed, pretended"),
        (0.03, "cuda", "failed"),
        (0.03, "the CPU", "failed"),
        (math.nan, "cuda", "failed"),
    ],
)
def test_a_rung_passes_within_its_limits_and_says_where(value, where, verdict):
    outcome = ladder.judge(_rung(), _answer(value, where), {"seconds": 1.0, "log": "x.log", "log_tail": "end"})
    assert outcome.verdict == verdict
    assert outcome.is_bad == (verdict == "failed")
    assert bool(outcome.log_tail) == outcome.is_bad


def test_a_rung_at_its_deadline_is_ended_with_all_it_started(tmp_path):
    outcome = ladder.run_rung(_rung("imports", deadline_s=0.3), PRETEND, tmp_path)
    assert outcome.verdict == "timed out"
    assert "not done after 0 s" in outcome.summary
    lines = [" ".join(process.info["cmdline"] or []) for process in psutil.process_iter(["cmdline"])]
    assert not [line for line in lines if str(tmp_path) in line]


def test_a_ladder_that_is_ended_ends_its_rung(tmp_path, repo_root):
    command = [sys.executable, "scripts/gpu_check/check.py", "--device", "pretend", "--only", "engine"]
    ladder_run = subprocess.Popen(
        [*command, "--output", str(tmp_path)], cwd=repo_root, stdout=subprocess.PIPE, start_new_session=True
    )
    rung: list[psutil.Process] = []
    end = time.monotonic() + 60.0
    try:
        while not rung and time.monotonic() < end:
            time.sleep(0.02)
            children = psutil.Process(ladder_run.pid).children()
            rung = [process for process in children if "rungs.py" in str(process.cmdline())]
        ladder_run.terminate()
        assert ladder_run.wait(timeout=60) == 128 + 15
    finally:
        ladder_run.kill()
    assert rung and not any(process.is_running() for process in rung)


def test_a_rung_that_breaks_shows_the_end_of_its_log(tmp_path):
    outcome = ladder.run_rung(_rung("no_such_rung"), PRETEND, tmp_path)
    assert outcome.verdict == "failed"
    assert "KeyError: 'no_such_rung'" in outcome.summary


def test_what_cannot_tell_anything_is_skipped_with_the_reason(tmp_path):
    rungs = [_rung("no_such_rung"), _rung("driver", needs=("no_such_rung",)), _rung("parallel", min_gpus=2)]
    outcomes = ladder.climb(rungs, PRETEND | {"device": "cuda"}, 1, tmp_path)
    assert [(o.verdict, o.summary) for o in outcomes[1:]] == [
        ("skipped", "needs no_such_rung"),
        ("skipped", "needs 2 GPUs, 1 here (--gpus)"),
    ]


def test_the_page_says_what_was_pretended_and_what_to_send_back(tmp_path):
    ending = {"seconds": 1.0, "log": "/logs/two.log", "log_tail": "the last line"}
    good = ladder.judge(_rung("one"), _answer(0.01, "the CPU"), ending)
    bad = ladder.judge(_rung("two"), _answer(0.5), ending)
    text = page.write_report([good, bad], {"commit": "abc"}, tmp_path).read_text()
    assert "**Not on a GPU** (CPU or pretended device): one." in text
    assert "| Two | failed | 1 | cuda | difference: 0.5, must be <= 0.02 |" in text
    assert "the last line" in text and "`/logs/two.log`" in text.split("What to send back")[1]
    data = json.loads((tmp_path / "gpu_report.json").read_text())
    assert [rung["verdict"] for rung in data["rungs"]] == ["passed, pretended", "failed"]
    assert data["rungs"][1]["checks"][0]["ok"] is False


def test_memory_is_the_peak_of_each_phase(tmp_path):
    samples = [(0.0, 5), (1.0, 9), (2.0, 7)]
    assert memory.phase_peaks(samples, [("train", 0.5, 1.5), ("sync", 1.6, 1.7)]) == {"train": 9, "sync": 7}
    event = {"name": "train", "ts": 0, "dur": 2_000_000, "args": {"step": 0, "time": 100.0}}
    (tmp_path / "trace.json").write_text("[\n" + json.dumps(event) + ",\n")
    assert memory.read_trace(tmp_path / "trace.json") == [("train", 100.0, 102.0)]


def test_memory_of_trainers_and_engines_apart():
    lines = [
        "ray::TrainActor.train, 5072",
        "ray::TrainActor, 1302",
        "sglang::scheduler, 2440",
        "/usr/bin/other, 9",
        "x",
    ]
    held = memory.process_bytes([*lines, "sglang::scheduler, [N/A]"])
    assert held == {"trainer": 5072 << 20, "engine": 2440 << 20}


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--only", "driver,engin"], "--only engin: no such rung. Known: driver, imports"),
        (["--gpus", "0"], "--gpus 0 must be at least 1"),
        (["--hf-checkpoint", "/nowhere"], "--hf-checkpoint /nowhere has no config.json"),
    ],
)
def test_a_wrong_command_line_ends_with_status_2(argv, text, capsys):
    with pytest.raises(SystemExit) as ending:
        check.parse(argv)
    assert ending.value.code == 2
    assert text in capsys.readouterr().err


def test_every_rung_of_the_ladder_has_its_function_and_what_it_needs_comes_before_it():
    code = "import rungs, json; print(json.dumps(list(rungs.RUNGS)))"
    folder = ROOT / "scripts" / "gpu_check"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=60, check=True
    )
    names = [rung.name for rung in check.LADDER]
    assert sorted(json.loads(done.stdout)) == sorted(names)
    for number, rung in enumerate(check.LADDER):
        assert set(rung.needs) <= set(names[:number])
