"""The token clock against a loop over decode steps, one token at a time."""

from __future__ import annotations

import numpy as np
import pytest

from slime_like.planning.simulate.engine import SimulatedEngine
from slime_like.planning.simulate.scenario import EnginePace


def run_out(engine: SimulatedEngine) -> list[tuple[float, int]]:
    ends = []
    while engine.num_requests:
        now = engine.next_end()
        ends += [(now, request) for request in engine.ended(now)]
    return ends


def step_by_step(lengths: list[int], pace: EnginePace, prompt: float) -> list[tuple[float, int]]:
    """Plainly: every decode step gives each running request a token; who is admitted is prefilled before the next."""
    waiting, running, now, ends = list(enumerate(lengths)), [], 0.0, []
    while waiting or running:
        while waiting and len(running) < pace.slots:
            running.append(list(waiting.pop(0)))
            now += prompt * pace.prefill_s
        now += pace.base_s + pace.per_request_s * len(running)
        for request in running:
            request[1] -= 1
        ends += [(now, number) for number, left in running if left == 0]
        running = [request for request in running if request[1] > 0]
    return ends


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("slots", [1, 3, 100])
def test_the_same_as_counting_tokens(seed: int, slots: int):
    lengths = np.random.default_rng(seed).integers(1, 40, size=12).tolist()
    pace = EnginePace(slots=slots, base_s=0.01, per_request_s=0.003, prefill_s=0.001)
    engine = SimulatedEngine(pace)
    for number, length in enumerate(lengths):
        engine.submit(0.0, length, 5, number)
    got, expected = run_out(engine), step_by_step(lengths, pace, 5)
    assert [number for _, number in got] == [number for _, number in expected]
    assert [time for time, _ in got] == pytest.approx([time for time, _ in expected], rel=1e-9)
    assert engine.busy_s == pytest.approx(got[-1][0], rel=1e-9)  # it never waited


def test_a_pause_moves_every_end_by_itself_also_within_a_prefill():
    pace = EnginePace(base_s=0.1, prefill_s=1.0)
    for begin in (0.5, 2.5):  # a prefill of 2 s, then 3 s of decoding
        engine = SimulatedEngine(pace)
        engine.submit(0.0, 30, 2, "a")
        engine.pause(begin)
        assert engine.next_end() == float("inf") and not engine.is_busy
        engine.resume(begin + 7)
        assert engine.next_end() == pytest.approx(2 + 3 + 7)
        engine.ended(engine.next_end())
        assert engine.busy_s == pytest.approx(5)


def test_what_is_planned_before_a_pause_is_void():
    engine = SimulatedEngine(EnginePace())
    engine.submit(0.0, 10, 0, "a")
    stamp = engine.stamp
    engine.pause(0.1)
    assert engine.stamp != stamp


def test_tokens_computed_again_delay_all():
    engine = SimulatedEngine(EnginePace(base_s=0.1, prefill_s=0.01))
    engine.submit(0.0, 30, 0, "a")
    engine.pause(1.0)
    engine.resume(1.0, again_tokens=50)
    assert engine.next_end() == pytest.approx(3.5)


def test_slower_from_the_middle_on():
    engine = SimulatedEngine(EnginePace(base_s=0.1))
    engine.submit(0.0, 30, 0, "a")
    engine.slow(1.0, 2.0)
    assert engine.next_end() == pytest.approx(1 + 2 * 2)
    engine.slow(3.0, 1.0)
    assert engine.next_end() == pytest.approx(4)


def test_what_is_taken_out_knows_what_it_lacks():
    engine = SimulatedEngine(EnginePace(slots=1, base_s=0.1))
    engine.submit(0.0, 30, 0, "runs")
    engine.submit(0.0, 7, 0, "waits")
    (first, lacks, ran), (second, untouched, waited) = engine.take_all(1.0)
    assert (first, ran, second, untouched, waited) == ("runs", True, "waits", 7, False)
    assert lacks == pytest.approx(20) and engine.num_requests == 0
