"""Large runs by arrays or by a smaller copy: what the copy keeps, and how far it is from the whole."""

from __future__ import annotations

import time

import pytest

from slime_like.errors import ConfigError
from slime_like.planning.simulate.flow import Flow
from slime_like.planning.simulate.scenario import MODES, AsyncRules, EnginePace, Scenario, TrainerPace, Workload
from slime_like.planning.simulate.simulation import simulate, smaller
from slime_like.planning.simulate.spread import Spread

BASE = Scenario(
    work=Workload(batch=96, group_size=2, response_tokens=Spread.parse("100~300")),
    engines=EnginePace(num_engines=48, base_s=0.01, per_request_s=0.001),
    trainer=TrainerPace(fixed_s=0.5, per_token_s=1e-5, sync_s=Spread.constant(0.2)),
    rules=AsyncRules(mode="full", max_staleness=3, num_workers=240, order="finish", stale_policy="train"),
    steps=8,
)


def test_a_small_run_is_simulated_whole():
    assert simulate(BASE, exact_samples=10_000) == Flow(BASE).run()


def test_a_copy_is_close_where_nobody_waits_for_the_slowest_of_many():
    copy, whole = simulate(BASE, exact_samples=800), Flow(BASE).run()
    assert copy.scaled_by == 3
    assert copy.step_s == pytest.approx(whole.step_s, rel=0.05)
    assert copy.engines_busy == pytest.approx(whole.engines_busy, rel=0.05)
    assert copy.trained_samples == whole.trained_samples
    assert copy.trained_tokens == pytest.approx(whole.trained_tokens, rel=0.05)


def test_a_copy_keeps_each_engines_share_and_the_train_step():
    copy = smaller(BASE, 4)
    assert (copy.engines.num_engines, copy.work.batch, copy.rules.num_workers) == (12, 24, 60)
    assert copy.trainer.per_token_s == pytest.approx(4e-5) and copy.trainer.fixed_s == 0.5


def test_ten_thousand_engines_in_every_mode_take_seconds():
    huge = BASE.with_engines(num_engines=10_000).with_work(batch=20_000, group_size=8)
    huge = huge.with_rules(order="age", stale_policy="wait", num_workers=None, max_staleness=1)
    begin = time.process_time()
    outcomes = [simulate(huge.with_rules(mode=mode)) for mode in MODES]
    assert time.process_time() - begin < 6
    assert all(outcome.scaled_by == 1 and outcome.steps >= 4 for outcome in outcomes)
    off, one_step, full = (outcome.step_s for outcome in outcomes)
    assert full <= one_step <= off


def test_the_impossible_is_refused():
    with pytest.raises(ConfigError, match="--batch 0"):
        simulate(BASE.with_work(batch=0))
