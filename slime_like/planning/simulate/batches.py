"""Whole batches at once: the same as `flow` where engines do not influence each other, for thousands of them.

In modes off and one-step all samples of a batch are sent at one moment, so each engine's part is known then, and all
engines can be computed side by side as arrays. tests/unit holds the result against the events of `flow`.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from slime_like.planning.simulate.draws import Draws
from slime_like.planning.simulate.outcome import Outcome
from slime_like.planning.simulate.scenario import FULL, ONE_STEP, EnginePace, Scenario


def can_do(scenario: Scenario) -> bool:
    """Whether a batch is decided when it is sent: no turns, nothing refilled or cut off, no shared processor."""
    work, rules = scenario.work, scenario.rules
    plain = work.turns.is_constant and work.turns.lowest == 1 and not work.filtered_share
    return plain and rules.mode != FULL and rules.over_sampling is None and not rules.contention


@dataclasses.dataclass(frozen=True)
class BatchTimes:
    """One batch: seconds until the last sample has its reward; the engines' busy seconds, and those times requests."""

    seconds: float
    busy_s: float
    request_s: float


def batch_times(tokens: np.ndarray, reward_s: np.ndarray, prompt_tokens: float, pace: EnginePace) -> BatchTimes:
    """A batch that is sent at time 0. tokens, reward_s: [samples], in the order in which they are sent.

    Sample i goes to engine i mod E, as the router that prefers the least loaded does when all are idle.
    """
    num_engines = min(pace.num_engines, len(tokens))
    depth = -(-len(tokens) // num_engines)
    queue, rewards = (
        np.pad(numbers, (0, depth * num_engines - len(tokens)), constant_values=np.nan).reshape(depth, num_engines).T
        for numbers in (tokens, reward_s)
    )
    stall = prompt_tokens * pace.prefill_s
    if depth <= pace.slots:
        return _all_at_once(queue, rewards, stall, pace)
    return _in_turn(queue, rewards, stall, pace)


def _all_at_once(queue: np.ndarray, rewards: np.ndarray, stall: float, pace: EnginePace) -> BatchTimes:
    """Every request has a slot: in the order of their lengths, all but those that have ended share each stretch."""
    order = np.argsort(queue, axis=1)  # what is not there comes last
    lengths = np.take_along_axis(queue, order, axis=1)
    counts = np.isfinite(queue).sum(axis=1, keepdims=True)
    left = counts - np.arange(queue.shape[1])
    steps = np.diff(np.where(left > 0, lengths, 0.0), axis=1, prepend=0.0)
    steps = np.where(left > 0, steps * (pace.base_s + pace.per_request_s * left), 0.0)
    times = counts * stall + np.cumsum(steps, axis=1)
    request_s = float((np.where(left > 0, times, 0.0)).sum())
    last = float(np.max(np.where(left > 0, times + np.take_along_axis(rewards, order, axis=1), 0.0)))
    return BatchTimes(last, float(times[:, -1].sum()), request_s)


def _in_turn(queue: np.ndarray, rewards: np.ndarray, stall: float, pace: EnginePace) -> BatchTimes:
    """Requests wait for slots: the next end of every engine, as often as the longest queue is long."""
    num_engines, depth = queue.shape
    counts = np.isfinite(queue).sum(axis=1)
    slots, rows = min(pace.slots, depth), np.arange(num_engines)
    ends = np.where(np.isfinite(queue[:, :slots]), queue[:, :slots], np.inf)  # by the engine's clock of tokens
    delay = np.where(np.isfinite(queue[:, :slots]), rewards[:, :slots], 0.0)
    running = np.minimum(counts, slots)
    now, clock, following = running * stall, np.zeros(num_engines), running.copy()
    busy_until, request_s, last = now.copy(), now * running, 0.0
    for _ in range(depth):
        place = ends.argmin(axis=1)
        end = ends[rows, place]
        alive = np.isfinite(end)
        took = np.where(alive, (np.where(alive, end, 0) - clock) * (pace.base_s + pace.per_request_s * running), 0.0)
        now, clock = now + took, np.where(alive, end, clock)
        request_s = request_s + took * running
        last = max(last, float(np.max(np.where(alive, now + delay[rows, place], 0.0))))
        busy_until = np.where(alive, now, busy_until)
        more = alive & (following < counts)
        index = np.minimum(following, depth - 1)
        ends[rows, place] = np.where(more, clock + np.where(more, queue[rows, index], 0.0), np.inf)
        delay[rows, place] = np.where(more, rewards[rows, index], 0.0)
        running = running - (alive & ~more)
        request_s = request_s + more * stall * running
        now, following = now + more * stall, following + more
    return BatchTimes(last, float(busy_until.sum()), float(request_s.sum()))


def simulate_batches(scenario: Scenario) -> Outcome:
    """The outcome of mode off or one-step. can_do says where this holds."""
    work, rules, pace = scenario.work, scenario.rules, scenario.trainer
    assert can_do(scenario), "the caller asks can_do"
    draws, skipped = Draws(scenario), scenario.settled_after
    total = skipped + scenario.steps + 1  # in one-step mode the batch after the last is made beside it
    ahead = rules.mode == ONE_STEP
    times, train_s, tokens = [], [], []
    for step in range(total):
        lengths, rewards = draws.arrays(step * work.batch, work.batch)
        times.append(batch_times(lengths.ravel(), rewards.ravel(), work.prompt_tokens, scenario.engines))
        tokens.append((float(lengths.sum()), float(lengths.sum()) + work.prompt_tokens * lengths.size))
        train_s.append(pace.fixed_s + pace.per_token_s * tokens[-1][1] + pace.overhead_s)
    wall = busy = request_s = training = syncing = 0.0
    # A step counts from the end of the train step before it to its own: sync, then generate, then train.
    for step in range(skipped, skipped + scenario.steps):
        is_synced = step > 0 and step % rules.sync_interval == 0
        sync_s = draws.sync_s(step // rules.sync_interval - 1) if is_synced else 0.0
        generated_batch = step + 1 if ahead else step
        if not ahead:
            wall += sync_s + times[step].seconds + train_s[step]
        else:
            # Of the batch that is trained here, what was left when the train step before it ended.
            left = max(0.0, times[step].seconds - (train_s[step - 1] if step else 0.0))
            wall += left + sync_s + train_s[step]
        busy += times[generated_batch].busy_s
        request_s += times[generated_batch].request_s
        training, syncing = training + train_s[step], syncing + sync_s
    generated = sum(part[0] for part in tokens[skipped:-1])
    num_engines, lag = scenario.engines.num_engines, _lag(scenario)
    return Outcome(
        mode=rules.mode,
        step_s=wall / scenario.steps,
        steps=scenario.steps,
        engines_busy=busy / wall / num_engines,
        engines_sync=syncing / wall,
        trainer_busy=training / wall,
        trainer_sync=syncing / wall,
        running_mean=request_s / busy if busy else 0.0,
        trained_samples=scenario.steps * scenario.samples_a_step,
        trained_tokens=sum(part[1] for part in tokens[skipped:-1]),
        decoded_tokens=generated,
        lost_tokens=0.0,
        again_tokens=0.0,
        staleness_mean=sum(lag) / len(lag),
        staleness_max=max(lag),
        ready_mean=float(work.batch),
        mean_length=generated / (scenario.steps * scenario.samples_a_step),
    )


def _lag(scenario: Scenario) -> list[int]:
    """Train steps between the weights that made each batch that counts and those that it trains."""
    interval, ahead = scenario.rules.sync_interval, scenario.rules.mode == ONE_STEP
    ages = []
    for step in range(scenario.settled_after, scenario.settled_after + scenario.steps):
        begun = max(0, step - 1) if ahead else step  # batch n+1 is begun when batch n's training is, before its sync
        ages.append(step - begun // interval * interval)
    return ages
