"""The chaos matrix as data: no cell is lost, and what came of it is read right."""

from __future__ import annotations

import dataclasses
import os

import pytest

from tests.e2e.chaos.cells import FAULTS, MODES, PHASES, WHOM, Cell, alike, all_cells, campaigns, singles, why_not
from tests.e2e.chaos.growth import FEWEST, Life, Lives, named
from tests.e2e.chaos.runs import Outcome, blows_of, ended_how
from tests.e2e.chaos.table import Kept, markdown, summary

KILLED = Cell("kill", "trainer", "generate", "sync")


def test_each_cell_makes_no_sense_or_is_in_one_run():
    cells = all_cells()
    assert len(cells) == len(set(cells)) == len(FAULTS) * len(WHOM) * len(PHASES) * len(MODES) == 420
    run = [cell for one in campaigns() for cell in one.cells] + singles()
    assert sorted(run) == sorted(cell for cell in cells if not why_not(cell))


def test_what_is_alike_makes_sense_too_and_is_no_chain():
    for cell in all_cells():
        if not why_not(cell):
            assert cell not in alike(cell) and not any(why_not(other) for other in alike(cell))


def test_faults_of_a_campaign_come_one_a_step_and_engines_have_time_to_come_back():
    cells = [Cell("kill", "engine", "generate", "sync"), Cell("kill", "reward", "eval", "sync")]
    blows, num_rollout = blows_of(cells)
    assert [(blow["phase"], blow["step"]) for blow in blows] == [("generate", 1), ("eval rewards", 7)]
    assert num_rollout == 9
    assert blows_of([dataclasses.replace(KILLED, phase="start")])[0][0]["step"] == 0


@pytest.mark.parametrize(
    ("said", "what", "error"),
    [
        (
            "started in 3 s\nRunError: trainer rank 1 died during train\n",
            "ended",
            "RunError: trainer rank 1 died during train",
        ),
        ("started in 3 s\nWaitTimeout: train.py waited 20 s\n  more\n", "ended", "WaitTimeout: train.py waited 20 s"),
        ("EngineError: engine 0 did not start\n", "ended", "EngineError: engine 0 did not start"),
        (
            "started in 3 s\nTraceback (most recent call last):\nOSError: full\n",
            "NAMELESS",
            "a traceback, OSError: full",
        ),
        ("started in 3 s\nrollout 1/3\n", "NAMELESS", "rollout 1/3"),
    ],
)
def test_an_error_counts_if_it_has_a_name_and_no_traceback(said, what, error):
    assert ended_how(said, "") == (what, error)


def test_a_run_that_hangs_has_the_doctors_word():
    assert ended_how("started in 3 s\n", "HUNG  runs/x\n  why            no progress for 99 s") == (
        "HANGS",
        "why            no progress for 99 s",
    )


def test_outcomes_are_kept_and_one_stands_for_those_like_it(tmp_path):
    kept = Kept.read(tmp_path / "chaos.json")
    kept.add([Outcome(KILLED, "ended", 4.2, "RunError: rank 0 | died")])
    kept.add([Outcome(KILLED, "not struck", 0.0)])
    again = Kept.read(tmp_path / "chaos.json")
    assert again.outcomes == {KILLED: Outcome(KILLED, "ended", 4.2, "RunError: rank 0 | died")}
    text = markdown(again)
    assert "| trainer | not run | ends 4 s | = generate | not run | not run | not run | = generate |" in text
    assert "- kill trainer at generate, sync: ended after 4 s: RunError: rank 0 \\| died" in text
    assert summary(again).startswith(
        "420 cells, 150 make no sense; of the other 270: 3 good, 0 red, 267 not run (1 were"
    )
    again.add([Outcome(KILLED, "HANGS", 240.0, "no progress")])
    assert "3 red" in summary(again) and "**HANGS**" in markdown(again)


FLAT = [(20.0 * number, 500 << 20, 10 << 20, 40) for number in range(40)]


@pytest.mark.parametrize(
    ("what", "samples", "grows"),
    [
        ("flat", FLAT, False),
        ("warms up", [(t, r // 2 if t < 160 else r, s, f) for t, r, s, f in FLAT], False),
        ("works late", [(t, r, s, f + 30 * (t > 400 and t % 100 > 0)) for t, r, s, f in FLAT], False),
        ("leaks memory", [(t, r + int(t) * (1 << 18), s, f) for t, r, s, f in FLAT], True),
        ("leaks shared memory", [(t, r, s + int(t) * (1 << 15), f) for t, r, s, f in FLAT], True),
        ("leaks files", [(t, r, s, f + int(t) // 20) for t, r, s, f in FLAT], True),
        ("log_monitor.py", [(t, r, s, f + int(t) // 20) for t, r, s, f in FLAT], False),
        ("not at its size yet", [(t / 20, r + int(t) * (1 << 18), s, f) for t, r, s, f in FLAT], False),
    ],
)
def test_a_process_that_grows_is_seen_and_one_that_is_warm_is_not(what, samples, grows):
    assert Life(what, samples=samples).grows() is grows


def test_a_process_that_is_begun_under_way_counts_when_it_is_warm():
    begun = [(t, r // 2 if t < 300 else r, s, f) for t, r, s, f in FLAT]
    assert Life("begins", samples=begun).grows() and not Life("begins under way", 200.0, begun).grows()
    assert Life("short", samples=FLAT[: FEWEST - 1]).growth() is None


def test_each_process_is_looked_at_and_the_shared_memory(tmp_path):
    lives = Lives(os.getpid(), tmp_path)
    (tmp_path / "left").touch()
    lives.look()
    shared, *processes = lives
    assert (shared.name, shared.samples[0][3]) == ("shared memory of all", 1)
    own = processes[0].samples[0]
    assert own[1] > own[2] > 0 and own[3] > 2


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (["ray::ChaosActor.call", ""], "ray::ChaosActor"),
        (["sglang::scheduler"], "sglang::scheduler"),
        (
            ["/v/python", "-m", "slime_like.sglang_backend.cpu_server", "--port=1"],
            "slime_like.sglang_backend.cpu_server",
        ),
        (["/v/python", "-I", "-S", "/x/guard.py", "36"], "guard.py"),
        (["/v/raylet/raylet", "--x"], "raylet"),
        ([], ""),
    ],
)
def test_a_process_has_a_short_name(line, name):
    assert named(line) == name
