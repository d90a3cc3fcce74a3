"""Whole batches as arrays are the same runs as event by event."""

from __future__ import annotations

import dataclasses

import pytest

from slime_like.planning.simulate.batches import can_do, simulate_batches
from slime_like.planning.simulate.flow import Flow
from slime_like.planning.simulate.scenario import EnginePace, Scenario, TrainerPace, Workload
from slime_like.planning.simulate.spread import Spread

BASE = Scenario(
    work=Workload(
        batch=13, group_size=3, response_tokens=Spread.parse("100~300"), prompt_tokens=20, reward_s=Spread.parse("0-2")
    ),
    engines=EnginePace(num_engines=5, base_s=0.01, per_request_s=0.002, prefill_s=1e-3),
    trainer=TrainerPace(fixed_s=0.5, per_token_s=1e-4, overhead_s=0.1, sync_s=Spread.parse("0.1-0.4")),
    steps=7,
)


@pytest.mark.parametrize("slots", [1, 2, 256])
@pytest.mark.parametrize("interval", [1, 3])
@pytest.mark.parametrize("engines", [1, 5, 64])
@pytest.mark.parametrize("mode", ["off", "one-step"])
def test_the_same_as_event_by_event(mode: str, engines: int, interval: int, slots: int):
    scenario = BASE.with_rules(mode=mode, sync_interval=interval).with_engines(num_engines=engines, slots=slots)
    events, arrays = Flow(scenario).run().to_dict(), simulate_batches(scenario).to_dict()
    # In one-step mode a batch overlaps the edge of what is counted, where arrays count all of it.
    edge = ("engines_busy", "engines_idle", "running_mean", "decoded_tokens") if mode == "one-step" else ()
    for name, value in events.items():
        if isinstance(value, float):
            assert arrays[name] == pytest.approx(value, rel=0.15 if name in edge else 1e-9, abs=1e-9), name
        else:
            assert arrays[name] == value, name


def test_what_arrays_cannot_do_is_left_to_events():
    assert can_do(BASE) and can_do(BASE.with_rules(mode="one-step"))
    for other in (
        BASE.with_rules(mode="full"),
        BASE.with_rules(contention=0.5),
        BASE.with_rules(over_sampling=20),
        BASE.with_work(filtered_share=0.1),
        BASE.with_work(turns=Spread.constant(2)),
    ):
        assert not can_do(other)


def test_the_first_steps_are_left_out():
    assert simulate_batches(dataclasses.replace(BASE, warm_up=0)).step_s != simulate_batches(BASE).step_s
