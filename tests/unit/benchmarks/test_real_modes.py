"""Which bound is the ideal of a run with a real engine, by hand; the pace of an engine from runs that know it."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.real_modes import FIRST, LAST, real_table, row_of, token_s
from slime_like.planning.simulate.measured import MeasuredRun, MeasuredStep

COUNTED = 5


def lines() -> list[dict]:
    """Steps of 2 s, of 600 tokens, that train for 0.8 s and sync for 0.1; the first and last ones take longer."""
    result, time = [], 100.0
    for step in range(FIRST + COUNTED + LAST):
        is_counted = FIRST <= step < FIRST + COUNTED
        time += 2.0 if is_counted else 9.0
        result.append({"kind": "rollout", "step": step, "rollout/tokens": 600.0 if is_counted else 1e6})
        seconds = {"step/train_seconds": 0.8, "step/sync_seconds": 0.1, "async/trainer_idle_seconds": 0.3}
        result.append({"kind": "step", "step": step, "time": time, **seconds})
    return result


def test_the_ideal_is_the_largest_of_three_bounds():
    samples = [
        {"time": 100.0},
        {"time": 1000.0, "engine": 900.0, "trainer": 450.0, "host": 1800.0},
    ]  # 1, 0.5, 2 a second
    row = dataclasses.replace(row_of("case", "full, 1", lines(), samples, token=0.002), num_processors=2)
    assert (row.steps, row.step_s) == (COUNTED, 2.0) and row.generate_s == pytest.approx(1.2)
    assert row.processor_s["engine"] == pytest.approx(2.0) and row.processor_s["trainer"] == pytest.approx(1.0)
    assert row.alone_s == pytest.approx(0.9) and row.processors_s == pytest.approx(1.5)
    assert row.others_s == pytest.approx(1.0)
    assert (row.ideal_s, row.bound) == (row.processors_s, "processors")
    assert "| 1.500 (processors) | **0.75** |" in real_table([row])
    assert dataclasses.replace(row, alone_s=1.7).bound == "trainer"
    assert dataclasses.replace(row, generate_s=1.8).bound == "engine"


def test_the_pace_of_an_engine_that_is_full():
    """0.01 s a decode step and 0.001 s for each request in it: of 10 at a time a token takes 0.002 s."""
    times = {"seconds": 9.0, "train_s": 1.0, "sync_s": 0.1, "overhead_s": 0.0}
    sizes = [(100.0, 400.0), (50.0, 400.0), (80.0, 100.0), (120.0, 900.0)]
    steps = []
    for number, (longest, tokens) in enumerate(sizes):
        counts = {"generated_tokens": tokens, "train_tokens": tokens, "response_tokens": tokens}
        generate_s = 0.01 * longest + 0.001 * tokens
        steps.append(MeasuredStep(step=number, longest_tokens=longest, generate_s=generate_s, **counts, **times))
    answers = {"response_mean": 1.0, "truncated_ratio": 0.0, "turns_mean": 1.0, "lengths": ()}
    layout = {"num_engines": 1, "gpus_per_engine": 1, "trainer_gpus": 1, "colocated": False}
    unknown = {"staleness_mean": None, "staleness_max": None}
    run = MeasuredRun(path="run", config={}, mode="off", steps=tuple(steps), **answers, **layout, **unknown)
    assert token_s([run], 10) == pytest.approx(0.002)
