"""Age, order and accounting of groups that are made while others are trained on: scripted groups on a simulated clock.

Each group takes as long as its answer is; the trainer takes, trains, and syncs, as the loop does.
"""

# Covers slime_like.rollout.group_pool too, which it does not import itself.

from __future__ import annotations

import asyncio
import dataclasses
import random

import numpy as np
import pytest

from slime_like.errors import RunError
from slime_like.records import FAILED, Prompt, Sample, SampleGroup
from slime_like.rollout.group_flow import FlowLimits, GroupFlow
from slime_like.rollout.groups import GroupOutcome
from slime_like.rollout.ledger import Ledger
from slime_like.rollout.prompt_feed import PromptFeed
from tests.unit.rollout.virtual_time import run_virtual


class Source:
    """Endless prompts."""

    rows = [None]

    def prompt_at(self, position: int) -> Prompt:
        return Prompt(index=position, text="", tokens=np.array([1], dtype=np.int32))


def outcome_of(prompt: Prompt, seconds: float, *, failed: bool = False) -> GroupOutcome:
    """A group with one answer, of as many tokens as it took seconds."""
    count = max(1, round(seconds))
    mask = np.array([0] + [1] * count, np.int8)
    sample = Sample(
        prompt_index=prompt.index,
        sample_index=0,
        tokens=np.zeros(count + 1, np.int32),
        loss_mask=mask,
        engine_logprobs=np.zeros(count + 1, np.float32),
        weight_versions=np.where(mask, 1, -1).astype(np.int32),
        response="",
        reward=0.0,
        status=FAILED if failed else "completed",
        error="gone" if failed else None,
    )
    return GroupOutcome(group=SampleGroup(prompt=prompt, samples=(sample,)), num_failures=int(failed))


def check_balance(ledger: Ledger) -> None:
    """drawn = trained + dropped + in flight (and what waits to be drawn again)."""
    counts = ledger.counts()
    assert sum(counts.values()) == ledger.position, counts


@dataclasses.dataclass
class Schedule:
    """How long everything takes, and what the flow may do."""

    limits: FlowLimits
    seconds_of: dict[int, float]  # prompt -> seconds of its group
    train_s: float
    sync_s: float = 0.0
    interval: int = 1
    filtered: frozenset[int] = frozenset()  # prompts whose groups a filter rejects
    chooses: bool = False  # whether a buffer filter takes the last groups instead of the first


@dataclasses.dataclass
class Run:
    """What a schedule gave."""

    trained: list[list[int]]  # prompts of each rollout
    ages: list[list[int]]  # of their groups, in rollout steps
    begun: list[int]
    dropped: dict[str, int]
    requeued: int
    most_made: int
    seconds: float
    idle_s: float
    held_s: float
    busy: list[tuple[float, float]]


async def played(schedule: Schedule) -> Run:
    """The run of a schedule, with the ledger checked after every event."""
    limits, feed, begun = schedule.limits, PromptFeed(Source()), []
    assert limits.num_rollouts is not None
    loop = asyncio.get_running_loop()
    started = loop.time()

    async def make(prompt: Prompt) -> GroupOutcome:
        begun.append(prompt.index)
        seconds = schedule.seconds_of.get(prompt.index, 1.0)
        check_balance(feed.ledger)
        await asyncio.sleep(seconds)
        check_balance(feed.ledger)
        return outcome_of(prompt, seconds)

    def judge(outcome: GroupOutcome) -> str | None:
        return "filter/x" if outcome.group.prompt.index in schedule.filtered else None

    def choose_last(groups: list[SampleGroup], count: int) -> list[int]:
        return [group.prompt.index for group in groups[-count:]]

    flow = GroupFlow(feed, make, judge, limits, choose=choose_last if schedule.chooses else None)
    flow._pool._clock, flow._pool._clocked = loop.time, loop.time()
    run = Run([], [], begun, {}, 0, 0, 0.0, 0.0, 0.0, [])
    for step in range(limits.num_rollouts):
        taken = await flow.take(limits.batch, step)
        check_balance(feed.ledger)
        run.trained.append([group.prompt.index for group in taken.groups])
        run.ages.append([step - begun_with for begun_with in taken.begun_with])
        run.requeued += taken.requeued
        for start, end in taken.busy:
            if run.busy and run.busy[-1][1] == start:
                start = run.busy.pop()[0]
            run.busy.append((start, end))
        run.idle_s, run.held_s = run.idle_s + taken.idle_s, run.held_s + taken.held_s
        run.most_made = max(run.most_made, flow.num_in_flight + flow.num_ready)
        await asyncio.sleep(schedule.train_s)
        feed.ledger.trained(run.trained[-1])
        check_balance(feed.ledger)
        if (step + 1) % schedule.interval == 0:
            await asyncio.sleep(schedule.sync_s)
            flow.policy_changed(step + 1)
    run.seconds = loop.time() - started
    await flow.stop()
    check_balance(feed.ledger)
    run.dropped = dict(feed.ledger.dropped)
    assert feed.ledger.num_trained == limits.num_rollouts * limits.batch
    return run


def random_schedule(draw: random.Random) -> Schedule:
    bound, batch, num_rollouts = draw.randrange(4), draw.randrange(1, 4), draw.randrange(1, 6)
    policy = draw.choice(("wait", "wait", "drop", "requeue", "train"))
    limits = FlowLimits(
        batch=batch,
        workers=draw.randrange(1, 9),
        max_staleness=bound,
        stale_policy=policy,
        num_rollouts=num_rollouts,
        max_draws=50,
    )
    # Long tails: most take a second, some a hundred; several at the same moment, too.
    seconds_of = {prompt: draw.choice((0.0, 1.0, 1.0, 2.0, draw.random(), 20 * draw.random())) for prompt in range(60)}
    filtered = frozenset(prompt for prompt in range(60) if draw.random() < draw.choice((0.0, 0.3)))
    return Schedule(
        limits,
        seconds_of,
        train_s=draw.choice((0.0, 0.5, 3.0)),
        sync_s=draw.choice((0.0, 1.0)),
        interval=draw.randrange(1, bound + 2),
        filtered=filtered,
        chooses=draw.random() < 0.1,
    )


def test_the_bound_holds_in_ten_thousand_schedules_and_the_ledger_balances_after_every_event():
    async def test():
        draw, seen = random.Random(0), {"dropped": 0, "requeued": 0, "late": 0, "aged": 0}
        for _ in range(10_000):
            schedule = random_schedule(draw)
            run, limits = await played(schedule), schedule.limits
            oldest = max(age for ages in run.ages for age in ages)
            assert oldest <= limits.max_staleness or limits.stale_policy == "train", schedule
            assert run.most_made <= (limits.max_staleness + 1) * limits.batch, schedule
            stale = run.dropped.get("stale", 0)
            if limits.stale_policy == "wait" and not schedule.chooses:
                assert stale == run.requeued == 0, schedule
                if not schedule.filtered:
                    assert sorted(sum(run.trained, [])) == list(range(limits.num_rollouts * limits.batch)), schedule
            assert stale == 0 or limits.stale_policy == "drop" or schedule.chooses
            assert run.requeued == 0 or limits.stale_policy == "requeue"
            seen["dropped"] += stale
            seen["requeued"] += run.requeued
            seen["late"] += oldest > limits.max_staleness
            seen["aged"] += oldest > 0
        assert all(count > 100 for count in seen.values()), f"schedules that try nothing: {seen}"

    run_virtual(test())


def long_tailed(policy: str, num_rollouts: int = 40) -> tuple[Schedule, Run]:
    """Batches of four answers, one of eight of which is twenty times as long as the others."""
    draw = random.Random(1)
    seconds_of = {prompt: 40.0 if draw.random() < 0.125 else 2.0 for prompt in range(4 * num_rollouts + 400)}
    limits = FlowLimits(batch=4, workers=8, max_staleness=2, stale_policy=policy, num_rollouts=num_rollouts)
    schedule = Schedule(limits, seconds_of, train_s=2.0)
    return schedule, run_virtual(played(schedule))


def test_lengths_that_are_trained_on_are_those_of_a_synchronous_run_unless_something_is_dropped():
    """A synchronous run trains on the first prompts, whatever their lengths."""
    schedule, run = long_tailed("wait")
    lengths = sorted(schedule.seconds_of[prompt] for prompt in sum(run.trained, []))
    synchronous = sorted(schedule.seconds_of[prompt] for prompt in range(160))
    assert lengths == synchronous and synchronous.count(40.0) > 10
    _, dropping = long_tailed("drop")
    kept = [schedule.seconds_of[prompt] for prompt in sum(dropping.trained, [])]
    assert kept.count(40.0) < synchronous.count(40.0) / 2 and dropping.dropped["stale"] > 10  # the price, counted
    assert dropping.seconds < run.seconds  # and what it buys


def test_generation_does_not_wait_for_training():
    """Groups of 3 s in batches of two, trained on for 3 s: one after the other 6 s a step, beside each other 3 s."""

    def seconds(bound: int) -> Run:
        limits = FlowLimits(batch=2, workers=2, max_staleness=bound, num_rollouts=10)
        return run_virtual(played(Schedule(limits, dict.fromkeys(range(99), 3.0), train_s=3.0)))

    turns, beside = seconds(0), seconds(1)
    assert turns.trained == beside.trained == [[2 * step, 2 * step + 1] for step in range(10)]
    assert turns.seconds == 60 and turns.idle_s == 27 and turns.held_s >= 27  # its ninth sync ends the idling
    assert beside.seconds == 33 and beside.idle_s == 0
    assert beside.busy == [(0, 30)] and turns.busy == [(6 * step, 6 * step + 3) for step in range(10)]


def test_without_staleness_it_is_the_synchronous_order():
    limits = FlowLimits(batch=3, workers=9, max_staleness=0, num_rollouts=4)
    run = run_virtual(played(Schedule(limits, {0: 9.0, 4: 7.0}, train_s=1.0)))
    assert run.trained == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]] and {*sum(run.ages, [])} == {0}


def test_of_what_is_kept_for_the_next_rollout_the_oldest_goes_first():
    """--partial-rollout: a rollout is full when enough are done; nothing is begun between two."""
    limits = FlowLimits(batch=2, workers=4, works_ahead=False, num_rollouts=3)
    run = run_virtual(played(Schedule(limits, {0: 10.0, 1: 1.0, 2: 1.0, 3: 4.0}, train_s=5.0)))
    assert run.trained[:2] == [[1, 2], [3, 4]] and run.begun[:6] == [0, 1, 2, 3, 4, 5]
    assert run.trained[2] == [0, 5]  # begun first, done last
    assert run.ages == [[0, 0], [1, 0], [2, 1]]


def test_a_prompt_that_is_too_late_is_asked_again_before_new_ones():
    limits = FlowLimits(batch=1, workers=2, max_staleness=1, stale_policy="requeue", num_rollouts=6)
    run = run_virtual(played(Schedule(limits, {0: 30.0}, train_s=1.0)))
    assert run.requeued == 2 and run.begun == [0, 1, 2, 3, 0, 4, 5, 0] and run.dropped == {}
    assert max(sum(run.ages, [])) <= 1


def failing_flow(failed: range, **limits) -> GroupFlow:
    async def make(prompt: Prompt) -> GroupOutcome:
        await asyncio.sleep(1.0)
        return outcome_of(prompt, 1.0, failed=prompt.index in failed)

    return GroupFlow(PromptFeed(Source()), make, lambda outcome: None, FlowLimits(batch=2, workers=2, **limits))


def test_engines_that_answer_nothing_end_the_run_and_get_no_more_requests():
    async def test():
        flow = failing_flow(range(99), max_staleness=1)
        with pytest.raises(RunError, match="all 2 samples failed. Last error: gone"):
            await flow.take(2, 0)
        assert flow.num_in_flight == 0 and flow._pool._feed.ledger.position == 2

    run_virtual(test())


def test_a_failure_between_two_rollouts_is_raised_by_the_next():
    async def test():
        flow = failing_flow(range(2, 99), max_staleness=3)
        taken = await flow.take(2, 0)
        assert len(taken.groups) == 2 and flow.num_in_flight == 2
        await asyncio.sleep(10)
        with pytest.raises(RunError, match="samples failed"):
            await flow.take(2, 1)

    run_virtual(test())


def test_a_filter_that_keeps_nothing_reaches_the_bound_on_draws():
    async def test():
        flow = failing_flow(range(0), max_staleness=1, max_draws=3)
        flow._pool._judge = lambda outcome: "filter/all"
        with pytest.raises(RunError, match=r"of 6 prompts only 0 of 2 groups could be kept .*Dropped: filter/all 6"):
            await flow.take(2, 0)

    run_virtual(test())


def test_what_a_users_function_raises_ends_the_run_and_puts_the_prompts_back():
    async def test():
        async def make(prompt: Prompt) -> GroupOutcome:
            await asyncio.sleep(prompt.index)
            if prompt.index == 1:
                raise RunError("the filter's own fault")
            return outcome_of(prompt, 1.0)

        feed = PromptFeed(Source())
        limits = FlowLimits(batch=2, workers=4, max_staleness=1)
        flow = GroupFlow(feed, make, lambda outcome: None, limits)
        with pytest.raises(RunError, match="the filter's own fault"):
            await flow.take(2, 0)
        counts = feed.ledger.counts()
        assert flow.num_in_flight == flow.num_ready == 0 and counts["waiting"] == feed.ledger.position == 4

    run_virtual(test())
