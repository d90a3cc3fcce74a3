"""Closed forms, the balance of fates after every event, the staleness bound, and what a mode may not change."""

from __future__ import annotations

import dataclasses
import random

import pytest

from slime_like.planning.simulate.draws import Draws
from slime_like.planning.simulate.flow import Flow
from slime_like.planning.simulate.generation import EventQueue, SimulatedGeneration
from slime_like.planning.simulate.scenario import (
    MODES,
    ORDERS,
    PAUSE_MODES,
    STALE_POLICIES,
    AsyncRules,
    EnginePace,
    Scenario,
    TrainerPace,
    Workload,
)
from slime_like.planning.simulate.spread import Spread

TIGHT = 1e-9


def constant(generate_s: float, train_s: float, sync_s: float, **rules) -> Scenario:
    """Every answer takes generate_s, whatever runs beside it; a batch is in flight at a time."""
    return Scenario(
        work=Workload(batch=4, group_size=2, response_tokens=Spread.constant(100)),
        engines=EnginePace(num_engines=2, base_s=generate_s / 100),
        trainer=TrainerPace(fixed_s=train_s, sync_s=Spread.constant(sync_s)),
        rules=AsyncRules(num_workers=4 if rules.get("mode") == "full" else None, **rules),
    )


def random_scenario(seed: int) -> Scenario:
    """A small run with everything in it."""
    chance = random.Random(seed)
    mode = chance.choice(MODES)
    over = chance.choice([None, None, 9]) if mode == "off" else None
    interval = chance.choice([1, 1, 2])
    return Scenario(
        work=Workload(
            batch=chance.randint(1, 8), group_size=chance.randint(1, 3), response_tokens=Spread.parse("60~160"),
            prompt_tokens=chance.choice([0, 30]), turns=Spread.parse(chance.choice(["1", "1-4"])),
            environment_s=Spread.parse("0-3"), observation_tokens=chance.choice([0, 10]),
            reward_s=Spread.parse(chance.choice(["0", "0-2"])), filtered_share=chance.choice([0.0, 0.3]),
        ),
        engines=EnginePace(
            num_engines=chance.randint(1, 5), slots=chance.choice([2, 8, 256]), base_s=0.01,
            per_request_s=chance.choice([0, 0.001]), prefill_s=chance.choice([0, 1e-4]),
        ),
        trainer=TrainerPace(fixed_s=chance.choice([0.1, 2.0]), per_token_s=1e-5, sync_s=Spread.parse("0-0.5"),
                            pause_share=chance.choice([1.0, 0.4, 0.0])),
        rules=AsyncRules(
            mode=mode, max_staleness=chance.randint(interval - 1, 4), stale_policy=chance.choice(STALE_POLICIES),
            num_workers=chance.choice([None, 3, 20]), order="age",
            pause_mode=chance.choice(PAUSE_MODES), sync_interval=interval, over_sampling=over,
            partial=over is not None and chance.random() < 0.5, contention=chance.choice([0.0, 0.7]),
        ),
        steps=6, seed=seed,
    )  # fmt: skip


@pytest.mark.parametrize(("generate_s", "train_s"), [(1.0, 0.7), (1.0, 3.0), (2.5, 2.5)])
@pytest.mark.parametrize("sync_s", [0.0, 0.1])
def test_step_times_of_constant_lengths_are_the_closed_forms(generate_s: float, train_s: float, sync_s: float):
    step = {mode: Flow(constant(generate_s, train_s, sync_s, mode=mode)).run().step_s for mode in MODES}
    assert step["off"] == pytest.approx(generate_s + train_s + sync_s, rel=TIGHT)
    assert step["one-step"] == pytest.approx(max(generate_s, train_s) + sync_s, rel=TIGHT)
    assert step["full"] == pytest.approx(max(generate_s, train_s) + sync_s, rel=TIGHT)


def test_shares_of_the_time_are_the_closed_forms():
    outcome = Flow(constant(1.0, 3.0, 0.5, mode="one-step")).run()
    assert outcome.engines_busy == pytest.approx(1 / 3.5) and outcome.trainer_busy == pytest.approx(3 / 3.5)
    assert outcome.engines_sync == outcome.trainer_sync == pytest.approx(0.5 / 3.5)
    assert outcome.engines_idle == pytest.approx(2 / 3.5) and outcome.bottleneck == "trainer"
    assert outcome.samples_per_s == pytest.approx(8 / 3.5) and outcome.running_mean == pytest.approx(4)


def test_what_a_sync_costs_requests_in_flight():
    """Training sets the pace but for engines: one request, which meets one sync: its KV again, or a second more."""
    scenario = constant(10.0, 1.0, 0.5, mode="full").with_engines(prefill_s=0.01)
    scenario = scenario.with_work(batch=1, group_size=1).with_rules(max_staleness=1, num_workers=1)
    scenario = scenario.with_engines(num_engines=1)
    # A group begins with the train step of the one before; after 1 s the sync finds 10 of its 100 tokens.
    assert Flow(scenario.with_rules(pause_mode="keep")).run().step_s == pytest.approx(10.5, rel=TIGHT)
    retract = Flow(scenario.with_rules(pause_mode="retract")).run()
    assert retract.step_s == pytest.approx(10.5 + 10 * 0.01, rel=TIGHT)
    assert retract.again_tokens == pytest.approx(10 * retract.steps)
    abort = Flow(scenario.with_rules(pause_mode="abort").with_trainer(abort_s=1.0)).run()
    assert abort.step_s == pytest.approx(11.5 + 10 * 0.01, rel=TIGHT) and abort.lost_tokens == 0


def test_engines_that_go_on_through_most_of_a_sync():
    """Training takes 1 s, a sync 2 s, generating 10 s: only the pause at its end is felt."""
    scenario = constant(10.0, 1.0, 2.0, mode="full", pause_mode="keep")
    outcome = Flow(scenario.with_trainer(pause_share=0.25)).run()
    assert outcome.step_s == pytest.approx(10.5, rel=TIGHT)
    assert outcome.engines_sync == pytest.approx(0.5 / 10.5) and outcome.trainer_sync == pytest.approx(2 / 10.5)
    assert Flow(scenario.with_trainer(pause_share=0.0)).run().step_s == pytest.approx(10.0, rel=TIGHT)


def test_both_on_one_processor_gain_nothing_from_overlap():
    apart, shared = (constant(2.0, 2.0, 0.0, mode="one-step", contention=share) for share in (0.0, 1.0))
    assert Flow(apart).run().step_s == pytest.approx(2.0, rel=TIGHT)
    assert Flow(shared).run().step_s == pytest.approx(4.0, rel=TIGHT)  # as off
    uneven = constant(1.0, 3.0, 0.0, mode="one-step", contention=1.0)
    assert Flow(uneven).run().step_s == pytest.approx(4.0, rel=TIGHT)  # 2 s of both, then 2 s of training alone


def test_no_staleness_is_the_synchronous_loop():
    base = random_scenario(3).with_work(filtered_share=0.0)
    base = base.with_rules(contention=0.0, over_sampling=None, partial=False, sync_interval=1, num_workers=None)
    off = Flow(base.with_rules(mode="off")).run()
    full = Flow(base.with_rules(mode="full", max_staleness=0, order="prompt", pause_mode="keep")).run()
    assert full.step_s == pytest.approx(off.step_s, rel=TIGHT) and full.staleness_max == 0


@pytest.mark.parametrize("seed", range(120))
def test_every_prompt_is_somewhere_after_every_event(seed: int):
    scenario = random_scenario(seed)
    if scenario.rules.stale_policy != "wait":
        scenario = scenario.with_rules(order=ORDERS[seed % 3])

    def balanced(flow: Flow) -> None:
        fates = flow.fates()
        assert fates["drawn"] == sum(count for fate, count in fates.items() if fate != "drawn"), fates

    flow = Flow(scenario, balanced)
    outcome = flow.run()
    assert outcome.trained_samples == scenario.steps * scenario.samples_a_step
    rules = scenario.rules
    if rules.mode == "full" and (rules.stale_policy != "train" or rules.order == "prompt"):
        assert outcome.staleness_max <= rules.max_staleness
    elif rules.mode != "full" and not rules.partial:
        assert outcome.staleness_max <= rules.sync_interval - (rules.mode == "off")


@pytest.mark.parametrize("seed", range(40))
def test_every_token_is_trained_on_lost_or_in_flight(seed: int):
    flow = Flow(random_scenario(seed))
    flow.run()
    flow.generation.close(keep=False)  # counts what is in engines
    trained = sum(step.response_tokens for step in flow.steps)
    waits = [*flow.running.values(), *flow.ready, *flow._done_early.values()]
    held = sum(group.tokens for group in waits)
    assert flow.generation.decoded_tokens == pytest.approx(trained + flow.generation.lost_tokens + held)


@pytest.mark.parametrize("seed", range(30))
def test_the_capacity_rule_is_never_exceeded(seed: int):
    scenario = random_scenario(seed).with_rules(over_sampling=None, partial=False).with_rules(mode="full")
    rules = scenario.rules

    def within(flow: Flow) -> None:
        fates = flow.fates()
        kept = fates["trained"] + fates["training"] + fates["ready"] + fates["running"]
        assert kept <= (rules.max_staleness + flow.generation.version + 1) * scenario.work.batch
        assert rules.num_workers is None or fates["running"] <= rules.num_workers

    Flow(scenario, within).run()


def test_littles_law():
    """Samples in the system = rate x time in it, over a run that is long against that time."""
    base = random_scenario(1).with_rules(mode="full", max_staleness=2, contention=0.0, order="prompt", num_workers=None)
    scenario = dataclasses.replace(base.with_rules(over_sampling=None, partial=False), steps=400)
    area = last = 0.0
    inside = 0

    def watch(flow: Flow) -> None:
        nonlocal area, last, inside
        area += inside * (flow.events.now - last)
        last, inside = flow.events.now, sum(group.num_left for group in flow.running.values())

    flow = Flow(scenario, watch)
    flow.run()
    generation = flow.generation
    rate, sojourn = generation.num_samples / last, generation.sample_s / generation.num_samples
    assert area / last == pytest.approx(rate * sojourn, rel=0.02)


@pytest.mark.parametrize("mode", ["off", "one-step"])
@pytest.mark.parametrize("seed", range(15))
def test_twice_the_engines_are_never_slower(mode: str, seed: int):
    """Twice the engines split every engine's part of a batch in two, with the same draws."""
    base = random_scenario(seed).with_work(turns=Spread.constant(1), filtered_share=0.0)
    base = base.with_engines(slots=256).with_rules(mode=mode, over_sampling=None, partial=False, contention=0.0)
    steps = [Flow(base.with_engines(num_engines=count)).run().step_s for count in (1, 2, 4, 8)]
    assert all(more <= fewer * (1 + TIGHT) for fewer, more in zip(steps, steps[1:], strict=False)), steps


@pytest.mark.parametrize("seed", range(10))
def test_more_engines_keep_an_async_run_no_slower_where_engines_do_not_batch(seed: int):
    base = random_scenario(seed).with_engines(per_request_s=0.0, prefill_s=0.0, slots=10_000)
    base = base.with_rules(mode="full", over_sampling=None, partial=False, contention=0.0, pause_mode="keep")
    one, many = (Flow(base.with_engines(num_engines=count)).run().step_s for count in (1, 7))
    assert many == pytest.approx(one, rel=TIGHT)  # every answer takes its own time


def test_training_by_finish_prefers_short_answers_and_by_prompt_does_not():
    base = Scenario(
        work=Workload(batch=8, group_size=1, response_tokens=Spread.parse("100~350")),
        trainer=TrainerPace(fixed_s=0.5),
        rules=AsyncRules(mode="full", max_staleness=4, pause_mode="keep", stale_policy="drop"),
        steps=60,
    )
    by_prompt, by_finish = (Flow(base.with_rules(order=order)).run() for order in ("prompt", "finish"))
    assert by_prompt.mean_length == pytest.approx(100, rel=0.08) and not by_prompt.dropped
    assert by_finish.dropped["stale"] > 0 and by_finish.mean_length < 0.9 * by_prompt.mean_length
    assert by_finish.step_s < by_prompt.step_s


def test_waiting_by_age_drops_nothing_and_prefers_nobody():
    base = Scenario(
        work=Workload(batch=8, group_size=1, response_tokens=Spread.parse("100~350")),
        trainer=TrainerPace(fixed_s=0.5),
        rules=AsyncRules(mode="full", max_staleness=4, pause_mode="keep", num_workers=24),
        steps=200,
    )
    by_age, by_prompt = (Flow(base.with_rules(order=order)).run() for order in ("age", "prompt"))
    assert by_age.staleness_max <= 4 and not by_age.dropped and by_age.lost_tokens == 0
    assert by_age.mean_length == pytest.approx(100, rel=0.05)
    assert by_age.step_s <= by_prompt.step_s * 1.001


def test_what_is_stale_is_made_anew_or_trained_on():
    base = Scenario(
        work=Workload(batch=8, group_size=1, response_tokens=Spread.parse("100~350")),
        trainer=TrainerPace(fixed_s=0.5),
        rules=AsyncRules(mode="full", max_staleness=4, order="finish", stale_policy="requeue"),
        steps=60,
    )
    again = Flow(base).run()
    assert again.requeued > 0 and not again.dropped and again.lost_tokens > 0 and again.staleness_max <= 4
    trained = Flow(base.with_rules(stale_policy="train")).run()
    assert trained.staleness_max > 4 and trained.requeued == 0 and trained.lost_tokens == 0


def test_partial_rollouts_lose_nothing_and_beat_waiting_for_the_slowest():
    base = Scenario(
        work=Workload(batch=16, group_size=2, response_tokens=Spread.parse("100~350")),
        trainer=TrainerPace(fixed_s=0.5), steps=40,
    )  # fmt: skip
    plain = Flow(base).run()
    dropped = Flow(base.with_rules(over_sampling=24)).run()
    kept = Flow(base.with_rules(over_sampling=24, partial=True)).run()
    assert dropped.lost_tokens > 0 and dropped.dropped["surplus"] == 8 * 40
    assert kept.lost_tokens == 0 and not kept.dropped and kept.staleness_max >= 1
    # Everything that was taken out has its tokens so far prefilled again: less than was generated, and not nothing.
    assert 0 < kept.again_tokens < kept.decoded_tokens and plain.again_tokens == 0
    assert max(kept.step_s, dropped.step_s) < plain.step_s
    assert dropped.mean_length < kept.mean_length


def test_a_filter_costs_what_it_drops():
    base = constant(1.0, 0.5, 0.0, mode="off").with_work(batch=32)
    half = Flow(base.with_work(filtered_share=0.5)).run()
    assert half.lost_tokens / half.decoded_tokens == pytest.approx(0.5, abs=0.06)
    assert half.dropped["filtered"] == half.lost_tokens / 200


def test_the_environment_delays_but_takes_no_slot():
    base = constant(1.0, 0.5, 0.0, mode="off").with_work(turns=Spread.constant(4), environment_s=Spread.constant(2))
    outcome = Flow(base).run()
    assert outcome.step_s == pytest.approx(1 + 3 * 2 + 0.5, rel=TIGHT)
    assert outcome.engines_busy == pytest.approx(1 / 7.5, rel=TIGHT)


def test_generation_sends_to_the_least_loaded():
    scenario = constant(1.0, 0.0, 0.0).with_engines(num_engines=3).with_work(group_size=1)
    generation = SimulatedGeneration(scenario, Draws(scenario), EventQueue(), lambda group: None)
    for prompt in range(7):
        generation.begin(prompt, prompt)
    assert [engine.num_requests for engine in generation.engines] == [3, 2, 2]
