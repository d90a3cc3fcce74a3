"""Tokens by weight are shared evenly, whoever asks how often."""

from __future__ import annotations

import random

from slime_like.tinker.execution.fair_clock import FairClock


def serve(clock: FairClock, sizes: dict[str, int], num_tokens: int) -> dict[str, int]:
    """Tokens of tenants that always have a call of their size waiting."""
    served = dict.fromkeys(sizes, 0)
    while sum(served.values()) < num_tokens:
        clock.advance(sizes)
        tenant = min(sizes, key=clock.position)
        clock.charge(tenant, sizes[tenant])
        served[tenant] += sizes[tenant]
    return served


def test_tenants_with_calls_of_any_size_get_the_same():
    served = serve(FairClock(), {"small": 1, "middle": 10, "large": 100}, 3000)
    assert max(served.values()) - min(served.values()) <= 100


def test_a_weight_of_three_gets_three_times_as_much():
    served = serve(FairClock({"paying": 3.0, "other": 1.0}.__getitem__), {"paying": 10, "other": 10}, 4000)
    assert abs(served["paying"] - 3000) <= 20


def test_idling_saves_up_no_claim():
    clock = FairClock()
    serve(clock, {"busy": 10}, 10_000)
    served = serve(clock, {"busy": 10, "late": 10}, 1000)
    assert abs(served["busy"] - served["late"]) <= 10


def test_what_was_given_back_counts():
    clock = FairClock()
    clock.charge("a", 100)
    clock.charge("a", -90)
    assert clock.position("a") == 10


def test_tenants_that_went_away_are_forgotten():
    clock, source = FairClock(), random.Random(0)
    for number in range(1000):
        clock.advance([f"tenant-{number}"])
        clock.charge(f"tenant-{number}", source.randint(1, 9))
        clock.advance([])
    assert len(clock._served) <= 2
