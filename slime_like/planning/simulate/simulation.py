"""A scenario's outcome, by the fastest way that is as good."""

from __future__ import annotations

import dataclasses

from slime_like.planning.simulate.batches import can_do, simulate_batches
from slime_like.planning.simulate.flow import Flow
from slime_like.planning.simulate.outcome import Outcome
from slime_like.planning.simulate.pipeline import can_do_full, simulate_full
from slime_like.planning.simulate.scenario import FULL, Scenario

#: Samples above which a run is not simulated one event at a time: 25 to 50 us of processor each.
EXACT_SAMPLES = 10_000
#: Samples of a train step, at most, where whole batches are computed as arrays.
ARRAY_SAMPLES = 200_000
#: Engines, and groups of a batch, that a smaller copy keeps at least.
_LEAST = 16


def simulate(scenario: Scenario, *, exact_samples: int = EXACT_SAMPLES) -> Outcome:
    """Simulate as much as is needed.

    Large runs go as arrays where that changes nothing (batches.py, pipeline.py), fewer steps of them the more samples a
    step has. What is larger still, or has other rules, is simulated as a smaller copy: engines, batch and workers
    divided by one number (Outcome.scaled_by), so that every engine has the same work as before. What such a copy loses
    is the slowest of many, where somebody waits for it. Raises ConfigError for impossible numbers.
    """
    scenario.check()
    scenario = _in_whole_rounds(scenario, scenario.steps)
    size, engines = scenario.samples_a_step, scenario.engines.num_engines
    total = (scenario.settled_after + scenario.steps) * size
    if total <= exact_samples and engines <= exact_samples // 4:
        return Flow(scenario).run()
    arrays = simulate_batches if can_do(scenario) else simulate_full if can_do_full(scenario) else None
    most = exact_samples if arrays is None else ARRAY_SAMPLES
    if arrays is not None:
        steps = min(scenario.steps, max(4, ARRAY_SAMPLES // size))
        scenario = _in_whole_rounds(dataclasses.replace(scenario, warm_up=min(scenario.warm_up, steps)), steps)
    factor = min(-(-(total if arrays is None else size) // most), engines // _LEAST, scenario.work.batch // _LEAST)
    if factor <= 1:
        return Flow(scenario).run() if arrays is None else arrays(scenario)
    copy = smaller(scenario, factor)
    outcome = Flow(copy).run() if arrays is None else arrays(copy)
    return dataclasses.replace(
        outcome,
        scaled_by=factor,
        trained_samples=outcome.trained_samples * factor,
        trained_tokens=outcome.trained_tokens * factor,
        decoded_tokens=outcome.decoded_tokens * factor,
        lost_tokens=outcome.lost_tokens * factor,
        again_tokens=outcome.again_tokens * factor,
        ready_mean=None if outcome.ready_mean is None else outcome.ready_mean * factor,
        requeued=outcome.requeued * factor,
        dropped={reason: count * factor for reason, count in outcome.dropped.items()},
    )


def _in_whole_rounds(scenario: Scenario, steps: int) -> Scenario:
    """With at least so many steps. In mode full the batches in flight come around in turns, and not all are alike."""
    turns = scenario.rules.max_staleness + 1 if scenario.rules.mode == FULL else 1
    return dataclasses.replace(scenario, steps=-(-steps // turns) * turns)


def smaller(scenario: Scenario, factor: int) -> Scenario:
    """The same run with a factor-th of the engines, the batch and the workers; a token trains that many times longer.

    Engines and batch are rounded to the same ratio, so that an engine's share of the work stays what it was.
    """
    engines = max(1, round(scenario.engines.num_engines / factor))
    ratio = scenario.engines.num_engines / engines
    batch = max(1, round(scenario.work.batch / ratio))
    rules, trainer = scenario.rules, scenario.trainer
    workers = None if rules.num_workers is None else max(1, round(rules.num_workers / ratio))
    over = None if rules.over_sampling is None else max(batch, round(rules.over_sampling / ratio))
    return (
        scenario.with_engines(num_engines=engines)
        .with_work(batch=batch)
        .with_trainer(per_token_s=trainer.per_token_s * scenario.work.batch / batch)
        .with_rules(num_workers=workers, over_sampling=over)
    )
