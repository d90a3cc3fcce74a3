"""Mode full for thousands of engines at once, where the capacity rule begins whole batches: the same as `flow`.

With groups in the prompts' order, as many workers as capacity lets and nothing dropped, the rule gives room for exactly
one batch at each sync. By age, since each batch is due in its own step, it comes to the same after the first ones,
which begin together and of which what is done first is trained on first. So engines influence each other only at a
sync, and between two of them all are computed side by side as arrays. tests/unit holds the result against the events of
`flow`.
"""

from __future__ import annotations

import numpy as np

from slime_like.planning.simulate.draws import Draws
from slime_like.planning.simulate.outcome import Outcome
from slime_like.planning.simulate.scenario import ABORT, BY_AGE, BY_PROMPT, FULL, RETRACT, WAIT, EnginePace, Scenario


def can_do_full(scenario: Scenario) -> bool:
    """Whether batches begin whole, and all their requests have a slot."""
    work, rules = scenario.work, scenario.rules
    plain = work.turns.is_constant and work.turns.lowest == 1 and not work.filtered_share and not rules.contention
    whole = rules.num_workers is None or rules.num_workers >= (rules.max_staleness + 1) * work.batch
    in_line = rules.order == BY_PROMPT or (rules.order == BY_AGE and rules.stale_policy == WAIT)
    if not (plain and whole and rules.mode == FULL and in_line and rules.sync_interval == 1):
        return False
    most = -(-(rules.max_staleness + 1) * scenario.samples_a_step // scenario.engines.num_engines)
    return rules.pause_mode != ABORT and most <= scenario.engines.slots


class EngineArrays:
    """All engines. Each row is an engine, each column a slot; a request's `end` is on its engine's clock of tokens."""

    def __init__(self, pace: EnginePace, num_slots: int):
        shape, num_engines = (pace.num_engines, num_slots), pace.num_engines
        self._pace, self._rows = pace, np.arange(num_engines)
        self._end, self._tokens, self._reward_s = np.full(shape, np.inf), np.zeros(shape), np.zeros(shape)
        self._batch = np.full(shape, -1)
        self._clock, self._now, self._stalled_until = (np.zeros(num_engines) for _ in range(3))
        self.running = np.zeros(num_engines, dtype=int)
        self.busy_s = self.request_s = self.decoded = 0.0
        self.ready_at: dict[int, float] = {}  # batch -> when the last of its samples that has ended has its reward

    def begin(self, batch: int, tokens: np.ndarray, reward_s: np.ndarray, stall_s: float) -> None:
        """Send a batch's samples, each to the engine with the fewest requests, of equal ones to the first."""
        most = -(-(len(tokens) + int(self.running.sum())) // len(self._rows)) + 1
        free = np.maximum(0, most - self.running)
        engine = np.repeat(self._rows, free)
        level = np.concatenate([np.arange(first, most) for first in np.minimum(self.running, most)])
        engine = engine[np.lexsort((engine, level))[: len(tokens)]]
        order = np.argsort(engine, kind="stable")
        counts = np.bincount(engine, minlength=len(self._rows))
        empty = np.argsort(np.isfinite(self._end), axis=1, kind="stable")  # free slots first
        nth = np.arange(len(tokens)) - np.repeat(np.cumsum(counts) - counts, counts)
        rows = engine[order]
        slots = empty[rows, nth]
        self._end[rows, slots] = self._clock[rows] + tokens[order]
        self._tokens[rows, slots], self._reward_s[rows, slots] = tokens[order], reward_s[order]
        self._batch[rows, slots] = batch
        self.running += counts
        self._stalled_until = np.maximum(self._stalled_until, self._now) + counts * stall_s

    def finish(self, batch: int) -> float:
        """When the last sample of a batch has its reward, if nothing is sent before that."""
        times = self._end_times()  # first: it moves requests to other slots
        own = self._batch == batch
        if not own.any():
            return self.ready_at[batch]
        return max(float((times + self._reward_s)[own].max()), self.ready_at.get(batch, 0.0))

    def go_on(self, until: float) -> None:
        """Let time pass for all engines."""
        times, runs = self._end_times(), self._batch >= 0
        ended = runs & (times <= until)
        for batch in np.unique(self._batch[ended]).tolist():
            latest = float((times + self._reward_s)[ended & (self._batch == batch)].max())
            self.ready_at[batch] = max(latest, self.ready_at.get(batch, 0.0))
        spent = np.where(runs, np.minimum(times, until) - self._now[:, None], 0.0)
        self.request_s += float(spent.sum())
        self.busy_s += float(spent.max(axis=1, initial=0.0).sum())
        self.decoded += float(self._tokens[ended].sum())
        count = ended.sum(axis=1)
        last = np.maximum(count - 1, 0)  # rows are in the order of their ends: these end last
        clock = np.where(count > 0, self._end[self._rows, last], self._clock)
        begin = np.maximum(self._now, self._stalled_until)
        begin = np.where(count > 0, times[self._rows, last], begin)
        self.running = self.running - count
        moved = np.maximum(0.0, until - begin) / (self._pace.base_s + self._pace.per_request_s * self.running)
        self._clock = clock + np.where(self.running > 0, moved, 0.0)
        self._end[ended], self._batch[ended] = np.inf, -1
        self._now = np.full(len(self._rows), until)

    def pause(self, seconds: float, *, again_s: float) -> float:
        """A sync, for all engines; again_s: of one token that is prefilled again, 0 for none. Returns such tokens."""
        left = np.maximum(0.0, self._stalled_until - self._now)
        done = np.where(self._batch >= 0, self._tokens - (self._end - self._clock[:, None]), 0.0)
        again = np.where(self.running > 0, np.where(np.isfinite(done), done, 0.0).sum(axis=1), 0.0)
        self._now = self._now + seconds
        self._stalled_until = self._now + left + again * again_s
        return float(again.sum())

    def stall(self, seconds_a_request: float) -> None:
        """All that run wait for so long, for each of them."""
        self._stalled_until = np.maximum(self._stalled_until, self._now) + self.running * seconds_a_request

    def _end_times(self) -> np.ndarray:
        """[engines, slots]: when each request ends if nothing is sent; puts every row in the order of its ends."""
        order = np.argsort(self._end, axis=1, kind="stable")
        for name in ("_end", "_tokens", "_reward_s", "_batch"):
            setattr(self, name, np.take_along_axis(getattr(self, name), order, axis=1))
        left = self.running[:, None] - np.arange(self._end.shape[1])  # requests that run until this one ends
        ends = np.where(left > 0, self._end, 0.0)
        clocks = np.where(left > 0, np.diff(ends, axis=1, prepend=self._clock[:, None]), 0.0)
        seconds = np.cumsum(clocks * (self._pace.base_s + self._pace.per_request_s * left), axis=1)
        return np.where(left > 0, np.maximum(self._now, self._stalled_until)[:, None] + seconds, np.inf)


def simulate_full(scenario: Scenario) -> Outcome:
    """The outcome of mode full. can_do_full says where this holds."""
    assert can_do_full(scenario), "the caller asks can_do_full"
    work, rules, trainer, draws = scenario.work, scenario.rules, scenario.trainer, Draws(scenario)
    skipped, total = scenario.settled_after, scenario.settled_after + scenario.steps
    per_engine = -(-(rules.max_staleness + 1) * scenario.samples_a_step // scenario.engines.num_engines)
    engines = EngineArrays(scenario.engines, per_engine + 1)
    stall_s, again_s = work.prompt_tokens * scenario.engines.prefill_s, scenario.engines.prefill_s

    tokens: dict[int, float] = {}

    def begin(batch: int) -> None:
        lengths, rewards = draws.arrays(batch * work.batch, work.batch)
        tokens[batch] = float(lengths.sum())
        engines.begin(batch, lengths.ravel(), rewards.ravel(), stall_s)

    for batch in range(rules.max_staleness + 1):
        begin(batch)
    now = training = syncing = again = 0.0
    before = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    for step in range(total):
        now = max(now, engines.finish(step))
        trained = tokens[step] + work.prompt_tokens * scenario.samples_a_step
        seconds = trainer.fixed_s + trainer.per_token_s * trained + trainer.overhead_s
        now, training = now + seconds, training + seconds
        engines.go_on(now)
        if step + 1 == skipped:
            before = (now, training, syncing, engines.busy_s, engines.request_s, engines.decoded, again)
        if step + 1 == total:
            break
        seconds = draws.sync_s(step)
        engines.go_on(now + (1 - trainer.pause_share) * seconds)
        running = int(engines.running.sum())
        done = engines.pause(trainer.pause_share * seconds, again_s=again_s if rules.pause_mode == RETRACT else 0.0)
        if rules.pause_mode == RETRACT:
            again += done + work.prompt_tokens * running
            engines.stall(work.prompt_tokens * again_s)
        now, syncing = now + seconds, syncing + seconds
        begin(step + 1 + rules.max_staleness)
    return _outcome(
        scenario,
        before,
        (now, training, syncing, engines.busy_s, engines.request_s, engines.decoded, again),
        sum(tokens[step] for step in range(skipped, total)),
    )


def _outcome(scenario: Scenario, before: tuple[float, ...], after: tuple[float, ...], generated: float) -> Outcome:
    wall, training, syncing, busy, request_s, decoded, again = (b - a for a, b in zip(before, after, strict=True))
    skipped, steps, lag = scenario.settled_after, scenario.steps, scenario.rules.max_staleness
    ages = [min(step, lag) for step in range(skipped, skipped + steps)]
    num_samples = steps * scenario.samples_a_step
    return Outcome(
        mode=FULL,
        step_s=wall / steps,
        steps=steps,
        engines_busy=busy / wall / scenario.engines.num_engines,
        engines_sync=scenario.trainer.pause_share * syncing / wall,
        trainer_busy=training / wall,
        trainer_sync=syncing / wall,
        running_mean=request_s / busy if busy else 0.0,
        trained_samples=num_samples,
        trained_tokens=generated + scenario.work.prompt_tokens * num_samples,
        decoded_tokens=decoded,
        lost_tokens=0.0,
        again_tokens=again,
        staleness_mean=sum(ages) / steps,
        staleness_max=max(ages),
        ready_mean=None,
        mean_length=generated / num_samples,
    )
