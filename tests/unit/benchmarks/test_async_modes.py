"""The ideal by hand, which steps count, and that a sleeping engine with slots takes what they allow."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.async_modes import CASES, FIRST, LAST, Row, main, measure, row_of, table
from benchmarks.sleeping_runs import SleepCase, SleepingScript
from slime_like.planning.simulate.spread import Spread

STEP_S = 0.8


def lines(counted: int) -> list[dict]:
    """A run of 0.8 s a step, which trains for 0.5 and syncs for 0.1. The other steps take longer, of more tokens."""
    result, time = [], 1000.0
    for step in range(FIRST + counted + LAST):
        is_counted = FIRST <= step < FIRST + counted
        time += STEP_S if is_counted else 7.0
        rollout = {"rollout/tokens": 6000.0 if is_counted else 9e9, "rollout/response_tokens_max": 120.0}
        result.append({"kind": "rollout", "step": step, "async/staleness_mean": 1.0, **rollout})
        seconds = {"step/train_seconds": 0.5, "step/sync_seconds": 0.1, "async/trainer_idle_seconds": 0.2}
        result.append({"kind": "step", "step": step, "time": time, **seconds})
    return [{"kind": "start", "step": 0, "time": 0.0}, *result]


def test_the_ideal_is_the_longer_side_of_the_counted_steps():
    row = row_of("even", "full, 1", lines(5), token_s=0.002, slots=16)
    assert row.steps == 5 and row.step_s == pytest.approx(STEP_S)
    assert row.generate_s == pytest.approx(6000 * 0.002 / 16) == pytest.approx(0.75)
    assert row.longest_s == pytest.approx(0.24) and row.trainer_idle_s == pytest.approx(0.2)
    assert row.ideal_s == row.generate_s and row.of_ideal == pytest.approx(0.75 / 0.8)
    longer_trainer = dataclasses.replace(row, sync_s=0.3)
    assert longer_trainer.ideal_s == pytest.approx(0.8) and longer_trainer.of_ideal == pytest.approx(1.0)


def test_the_table_compares_with_the_same_case_in_turns():
    row = row_of("even", "full, 1", lines(5), token_s=0.002, slots=16)
    rows = [dataclasses.replace(row, mode="off", step_s=1.6), row, dataclasses.replace(row, case="other")]
    cells = [line.split(" | ") for line in table(rows).splitlines()[2:]]
    assert [line[7] for line in cells] == ["1.00", "0.50", ""]
    assert [line[6] for line in cells] == ["0.47", "0.94", "0.94"]
    good = table([dataclasses.replace(row, step_s=0.75)])
    assert "**1.00**" in good


def test_a_request_waits_for_a_slot():
    """Two slots, answers of 1 s: the third and fourth end after 2 s, and the fifth after 3 s."""
    case = SleepCase(name="slots", batch=1, lengths=Spread.constant(10), token_s=0.1, slots=2)
    script = SleepingScript(case, seed=0)
    delays = [script.delay({"input_ids": [1]}).delay_s for _ in range(5)]
    assert delays == pytest.approx([1, 1, 2, 2, 3], abs=0.05)
    assert script.answer([1]) == ([5] * 10, [-1.0] * 10)
    unlimited = SleepingScript(dataclasses.replace(case, slots=None), seed=0)
    assert [unlimited.delay({"input_ids": [1]}).delay_s for _ in range(5)] == pytest.approx([1] * 5)


@pytest.mark.slow
def test_a_short_run_of_the_real_loop(tmp_path):
    quick = {"batch": 2, "token_s": 0.001, "train_fixed_s": 0.03, "sync_s": 0.01}
    case = dataclasses.replace(CASES[0], **quick, steps=FIRST + LAST + 3)
    row = measure(case, "full, 2", tmp_path)
    assert isinstance(row, Row) and row.steps == 3 and 0.03 <= row.train_s < 0.3 and 0.01 <= row.sync_s < 0.3
    assert 4 * 20 * 0.001 / 16 <= row.generate_s <= 4 * 100 * 0.001 / 16  # two groups of two, of 20 to 100 tokens
    assert row.of_ideal < 1.2 and row.staleness_mean <= 2


def test_an_unknown_mode_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["--modes", "half"])
    assert "invalid choice: 'half'" in capsys.readouterr().err
