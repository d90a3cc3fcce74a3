"""Ranges as they are written, and what each quantity changes."""

from __future__ import annotations

import pytest

from slime_like.errors import ConfigError, UserError
from slime_like.planning.simulate.scenario import EnginePace, Scenario, TrainerPace, Workload
from slime_like.planning.simulate.spread import Spread
from slime_like.planning.simulate.sweep import QUANTITIES, parse_sweep, sweep

BASE = Scenario(
    work=Workload(batch=4, group_size=1, response_tokens=Spread.parse("100~300")),
    engines=EnginePace(num_engines=2, per_request_s=0.01),
    trainer=TrainerPace(per_token_s=1e-3, num_gpus=2, sync_s=Spread.constant(1)),
    steps=3,
)


def test_lists_and_doublings():
    assert parse_sweep("engines=1,5,9") == ("engines", (1, 5, 9))
    assert parse_sweep("scale=1..10") == ("scale", (1, 2, 4, 8, 10))
    assert parse_sweep("batch=8..8") == ("batch", (8,))
    assert parse_sweep("contention=0,0.5") == ("contention", (0, 0.5))


@pytest.mark.parametrize("text", ["gpus=1", "engines", "engines=a", "engines=2..1", "engines=0..4", "engines=1.5"])
def test_what_is_no_sweep(text: str):
    with pytest.raises(UserError, match="--sweep"):
        parse_sweep(text)


@pytest.mark.parametrize("name", sorted(QUANTITIES))
def test_every_quantity_changes_the_scenario(name: str):
    value = 0.5 if name == "contention" else 3.0
    changed = QUANTITIES[name](BASE, value)
    changed.check()
    assert changed != BASE


def test_scale_keeps_each_sides_work():
    bigger = QUANTITIES["scale"](BASE.with_rules(num_workers=6), 10)
    assert (bigger.engines.num_engines, bigger.work.batch, bigger.rules.num_workers) == (20, 40, 60)
    assert bigger.trainer.num_gpus == 20 and bigger.trainer.per_token_s == pytest.approx(1e-4)


def test_longer_answers_keep_their_shape():
    spread = QUANTITIES["response-tokens"](BASE, 500).work.response_tokens
    assert spread.values == (500.0, 1500.0)


def test_points_in_the_order_of_the_values():
    points = sweep(BASE, "sync-seconds", (0, 5))
    assert [point.value for point in points] == [0, 5]
    off = [point.comparison.rows[0].outcome.step_s for point in points]
    assert off[1] - off[0] == pytest.approx(5)


def test_an_impossible_value():
    with pytest.raises(ConfigError, match="--engines 0"):
        sweep(BASE, "engines", (0,))
