"""A scenario's outcome, by the fastest way that is as good."""

from __future__ import annotations

import dataclasses

from slime_like.planning.simulate.batches import can_do, simulate_batches
from slime_like.planning.simulate.flow import Flow
from slime_like.planning.simulate.outcome import Outcome
from slime_like.planning.simulate.scenario import FULL, Scenario

#: Samples above which a run is not simulated one event at a time: about 25 us of processor each.
EXACT_SAMPLES = 40_000
#: Engines, and groups of a batch, that a smaller copy keeps at least.
_LEAST = 16


def simulate(scenario: Scenario, *, exact_samples: int = EXACT_SAMPLES) -> Outcome:
    """Simulate as much as is needed.

    Large runs: off and one-step as arrays, which changes nothing; the rest by a copy with engines, batch and workers
    divided by one number (Outcome.scaled_by), in which every engine has the same work as before. What such a copy
    loses is the slowest of many, where somebody waits for it.
    Raises ConfigError for impossible numbers.
    """
    scenario.check()
    num_samples = (scenario.settled_after + scenario.steps) * scenario.samples_a_step
    if num_samples <= exact_samples and scenario.engines.num_engines <= exact_samples // 10:
        return Flow(scenario).run()
    if can_do(scenario):
        return simulate_batches(scenario)
    factor = min(-(-num_samples // exact_samples), scenario.engines.num_engines // _LEAST, scenario.work.batch // _LEAST)
    if factor <= 1:
        return Flow(scenario).run()
    outcome = Flow(smaller(scenario, factor)).run()
    return dataclasses.replace(
        outcome,
        scaled_by=factor,
        **{
            name: getattr(outcome, name) * factor
            for name in ("trained_samples", "trained_tokens", "decoded_tokens", "lost_tokens", "again_tokens",
                         "ready_mean", "requeued")
        },
        dropped={reason: count * factor for reason, count in outcome.dropped.items()},
    )  # fmt: skip


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


def modes_of(scenario: Scenario) -> dict[str, Scenario]:
    """The scenario in every mode; what only one mode has is left out of the others."""
    off = scenario.with_rules(mode="off")
    plain = dataclasses.replace(scenario, colocated=False).with_rules(over_sampling=None, partial=False)
    return {"off": off, "one-step": plain.with_rules(mode="one-step"), FULL: plain.with_rules(mode=FULL)}
