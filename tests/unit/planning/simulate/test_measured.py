"""A run whose law is known gives that law back, and its own step time."""

from __future__ import annotations

import json

import numpy as np
import pytest

from slime_like.errors import DataError
from slime_like.planning.simulate.flow import Flow
from slime_like.planning.simulate.measured import fit, not_negative, read_run, scenario_of
from slime_like.planning.simulate.scenario import EnginePace, Scenario, TrainerPace, Workload
from slime_like.planning.simulate.simulation import simulate
from slime_like.planning.simulate.spread import Spread
from tests.helpers.measured_runs import write_run

RANDOM = np.random.default_rng(0)


def answers(steps: int, count: int, low: int = 20, high: int = 120) -> list[list[float]]:
    return [RANDOM.integers(low, high, size=count).astype(float).tolist() for _ in range(steps)]


def law(lengths) -> float:
    return 0.3 + 0.01 * max(lengths) + 0.002 * sum(lengths)


def train_law(tokens: float) -> float:
    return 0.5 + 1e-3 * tokens


@pytest.fixture
def run_dir(tmp_path) -> str:
    return write_run(tmp_path / "run", answers(12, 16), group_size=2, generate_s=law, train_s=train_law)


def test_the_law_comes_back(run_dir):
    scenario = scenario_of(read_run(run_dir))
    assert scenario.work.reward_s.mean == pytest.approx(0.3, rel=1e-6)
    assert scenario.engines.base_s == pytest.approx(0.01) and scenario.engines.per_request_s == pytest.approx(0.002)
    assert scenario.trainer.fixed_s == pytest.approx(0.5) and scenario.trainer.per_token_s == pytest.approx(1e-3)
    assert scenario.trainer.sync_s.mean == pytest.approx(0.2) and scenario.trainer.overhead_s == pytest.approx(0.05)
    assert (scenario.work.batch, scenario.work.group_size, scenario.work.prompt_tokens) == (8, 2, 10)


def test_a_run_is_predicted_from_its_half_and_from_another_of_other_size(tmp_path, run_dir):
    run = read_run(run_dir)
    half = scenario_of(run.part(0, 6))
    assert simulate(half).step_s == pytest.approx(run.part(6).step_s, rel=0.05)
    other = read_run(write_run(tmp_path / "o", answers(12, 60, 40, 300), generate_s=law, train_s=train_law))
    asked = scenario_of(other).work
    assert simulate(half.with_work(**vars(asked)).with_work(reward_s=half.work.reward_s)).step_s == pytest.approx(
        other.step_s, rel=0.05
    )


def test_several_engines_take_the_runs_own_mean(tmp_path):
    truth = Scenario(
        work=Workload(batch=24, group_size=1, response_tokens=Spread.parse("20-120")),
        engines=EnginePace(num_engines=3, base_s=0.01, per_request_s=0.002),
        trainer=TrainerPace(),
    )

    def simulated(lengths) -> float:
        values = Spread("measured", tuple(lengths))
        return Flow(truth.with_work(response_tokens=values)).run().step_s

    path = write_run(tmp_path / "r", answers(8, 24), generate_s=simulated, train_s=train_law, engines=3)
    run = read_run(path)
    scenario = scenario_of(run)
    assert scenario.engines.num_engines == 3
    assert simulate(scenario).step_s == pytest.approx(run.step_s, rel=0.05)


def test_a_step_in_which_the_host_did_something_else_is_no_law():
    rows = np.column_stack([np.ones(12), np.arange(12.0) + 5])
    seconds = rows @ np.array([0.5, 0.1])
    seconds[4] += 9
    assert fit(rows, seconds) == pytest.approx((0.5, 0.1))


def test_a_column_must_be_worth_it_and_nothing_is_negative():
    longest = RANDOM.uniform(50, 100, size=20)
    tokens = 10 * longest + RANDOM.uniform(-20, 20, size=20)
    seconds = 0.01 * longest + RANDOM.normal(0, 0.004, size=20)
    factors = not_negative(np.column_stack([np.ones(20), longest, tokens]), seconds)
    assert factors[0] == factors[2] == 0 and factors[1] == pytest.approx(0.01, rel=0.02)
    falling = not_negative(np.column_stack([np.ones(5), np.arange(5.0)]), 9 - np.arange(5.0))
    assert falling[1] == 0 and falling[0] == pytest.approx(7)


@pytest.mark.parametrize("log", [True, False])
def test_lengths_as_logged_or_by_what_the_metrics_say(tmp_path, log):
    path = write_run(tmp_path / "r", answers(12, 16), generate_s=law, train_s=train_law, log=log)
    run = read_run(path)
    spread = scenario_of(run).work.response_tokens
    assert (len(run.lengths) == 11 * 16) == log
    assert spread.mean == pytest.approx(run.response_mean, rel=0.02)
    assert spread.highest <= 120


def test_a_mode_that_the_run_was_told(tmp_path, run_dir):
    write_run(tmp_path / "off", answers(9, 16), generate_s=law, train_s=train_law)
    path = f"{run_dir}/config.json"
    with open(path, encoding="utf-8") as file:
        config = json.load(file)
    config["asynchrony"] = {
        "async_mode": "full",
        "max_staleness": 3,
        "stale_policy": "requeue",
        "update_weights_interval": 2,
    }
    config["sync"] |= {"update_weight_pause_mode": "in_place"}
    with open(path, "w", encoding="utf-8") as file:
        json.dump(config, file)
    run, off = read_run(run_dir), read_run(str(tmp_path / "off"))
    with pytest.raises(DataError, match="ran in --async-mode full"):
        scenario_of(run)
    rules = scenario_of(run, others=[off], own_pace=False).rules
    assert (rules.mode, rules.max_staleness, rules.stale_policy) == ("full", 3, "requeue")
    assert (rules.pause_mode, rules.sync_interval, rules.num_workers) == ("keep", 2, 256)


def test_what_is_no_run(tmp_path):
    with pytest.raises(DataError, match=r"metrics\.jsonl: no such file"):
        read_run(str(tmp_path))
    path = write_run(tmp_path / "short", answers(2, 4), generate_s=law, train_s=train_law)
    with pytest.raises(DataError, match="1 steps with rollout and train are left after the first 1"):
        read_run(path)
