"""Mode full as arrays is the same run as event by event."""

from __future__ import annotations

import pytest

from slime_like.planning.simulate.flow import Flow
from slime_like.planning.simulate.pipeline import can_do_full, simulate_full
from slime_like.planning.simulate.scenario import AsyncRules, EnginePace, Scenario, TrainerPace, Workload
from slime_like.planning.simulate.spread import Spread

BASE = Scenario(
    work=Workload(
        batch=11, group_size=3, response_tokens=Spread.parse("100~300"), prompt_tokens=20, reward_s=Spread.parse("0-2")
    ),
    engines=EnginePace(num_engines=5, base_s=0.01, per_request_s=0.002, prefill_s=1e-3),
    trainer=TrainerPace(fixed_s=0.5, per_token_s=1e-4, overhead_s=0.1, sync_s=Spread.parse("0.1-0.4")),
    rules=AsyncRules(mode="full"),
    steps=9,
)


@pytest.mark.parametrize(("seed", "pause_share"), [(0, 1.0), (1, 0.3), (1, 0.0)])
@pytest.mark.parametrize("engines", [1, 5, 40])
@pytest.mark.parametrize("pause_mode", ["keep", "retract"])
@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_the_same_as_event_by_event(staleness: int, pause_mode: str, engines: int, seed: int, pause_share: float):
    scenario = BASE.with_rules(max_staleness=staleness, pause_mode=pause_mode, order="prompt")
    scenario = scenario.with_engines(num_engines=engines).with_trainer(pause_share=pause_share)
    scenario = Scenario(**{**vars(scenario), "seed": seed})
    events, arrays = Flow(scenario).run().to_dict(), simulate_full(scenario).to_dict()
    for name in events.keys() - {"ready_mean", "decoded_tokens"}:
        if isinstance(events[name], float):
            assert arrays[name] == pytest.approx(events[name], rel=1e-8, abs=1e-9), name
        else:
            assert arrays[name] == events[name], name
    assert arrays["decoded_tokens"] == pytest.approx(events["decoded_tokens"], rel=1e-6)


@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_by_age_it_comes_to_the_same(staleness: int):
    scenario = Scenario(**{**vars(BASE.with_rules(max_staleness=staleness)), "steps": 40})
    events, arrays = Flow(scenario).run(), simulate_full(scenario)
    assert arrays.step_s == pytest.approx(events.step_s, rel=0.03)
    assert arrays.staleness_mean == events.staleness_mean and arrays.staleness_max == events.staleness_max


def test_what_arrays_cannot_do_is_left_to_events():
    assert can_do_full(BASE) and can_do_full(BASE.with_rules(num_workers=22))
    for other in (
        BASE.with_rules(mode="off"),
        BASE.with_rules(num_workers=21),
        BASE.with_rules(pause_mode="abort"),
        BASE.with_rules(order="finish", stale_policy="drop"),
        BASE.with_rules(order="age", stale_policy="drop"),
        BASE.with_rules(sync_interval=2),
        BASE.with_rules(contention=0.1),
        BASE.with_engines(slots=13),
        BASE.with_work(filtered_share=0.1),
        BASE.with_work(turns=Spread.constant(2)),
    ):
        assert not can_do_full(other)
