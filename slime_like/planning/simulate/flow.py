"""One simulated run: who begins what and when, in each mode, with the fate of every prompt."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable

from slime_like.errors import RunError
from slime_like.planning.simulate.draws import Draws
from slime_like.planning.simulate.generation import EventQueue, SimulatedGeneration, SimulatedGroup
from slime_like.planning.simulate.outcome import Outcome
from slime_like.planning.simulate.scenario import (
    ABORT,
    BY_AGE,
    BY_PROMPT,
    DROP,
    FULL,
    ONE_STEP,
    REQUEUE,
    TRAIN,
    WAIT,
    Scenario,
)
from slime_like.planning.simulate.trainer import SimulatedTrainer

#: Why a group is not trained on.
FILTERED, STALE, SURPLUS = "filtered", "stale", "surplus"

#: A prompt that is made anew draws other answers: those of a prompt that the run never reaches.
_ANEW = 10_000_019


@dataclasses.dataclass(frozen=True)
class _TrainStep:
    staleness: list[int]
    num_ready: int  # groups that waited when the batch was taken, the batch included
    tokens: float
    response_tokens: float


@dataclasses.dataclass(frozen=True)
class _Counts:
    """Running sums, of which an outcome is the difference between two moments."""

    now: float
    busy_s: float
    request_s: float
    training_s: float
    syncing_s: float
    paused_s: float
    decoded: float
    again: float
    lost: float
    dropped: collections.Counter[str]
    requeued: int

    @classmethod
    def of(cls, flow: Flow) -> _Counts:
        """As they stand."""
        generation = flow.generation
        generation.advance()
        return cls(
            now=flow.events.now,
            busy_s=sum(engine.busy_s for engine in generation.engines),
            request_s=sum(engine.request_s for engine in generation.engines),
            training_s=flow.trainer.busy_s,
            syncing_s=flow.syncing_s,
            paused_s=flow.paused_s,
            decoded=generation.decoded_tokens,
            again=generation.again_tokens,
            lost=generation.lost_tokens,
            dropped=flow.dropped.copy(),
            requeued=flow.num_requeued,
        )


class Flow:
    """A run of `scenario`. watch: called with this after every event, for those who check invariants or draw.

    `fates` says where every prompt that was drawn stands. Raises RunError if nothing can go on.
    """

    def __init__(self, scenario: Scenario, watch: Callable[[Flow], None] | None = None):
        scenario.check()
        self.scenario, self._watch = scenario, watch
        self._rules, self._batch = scenario.rules, scenario.work.batch
        self._draws, self.events = Draws(scenario), EventQueue()
        self.generation = SimulatedGeneration(scenario, self._draws, self.events, self._group_done)
        in_line = self._rules.order == BY_PROMPT and self._rules.over_sampling is None
        self._line: collections.deque[SimulatedGroup] | None = collections.deque() if in_line else None
        self.running: dict[int, SimulatedGroup] = {}  # by prompt
        self.ready: list[SimulatedGroup] = []  # in the order in which they are trained on
        self._done_early: dict[int, SimulatedGroup] = {}  # done, but a prompt before them is not
        self._again: collections.deque[int] = collections.deque()  # prompts to make anew
        self._num_drawn = self._num_begun = self.num_requeued = 0
        self.dropped: collections.Counter[str] = collections.Counter()
        self._training: list[SimulatedGroup] = []
        self._num_judged = 0  # groups of `ready` that are young enough for the next train step
        self.trainer = SimulatedTrainer(self.events, self._train_ended)
        self.is_syncing, self._sync_due, self.syncing_s, self.paused_s = False, False, 0.0, 0.0
        self.steps: list[_TrainStep] = []  # begun or trained
        self._begin = _Counts.of(self)  # where the steps that count begin

    @property
    def num_trained(self) -> int:
        """Train steps that have ended."""
        return len(self.steps) - self.trainer.is_busy

    def fates(self) -> dict[str, int]:
        """Where the prompts stand; "drawn" is counted by itself, so that the others can be held against it."""
        return {
            "drawn": self._num_drawn,
            "waiting": len(self._again),
            "running": len(self.running),
            "ready": len(self.ready) + len(self._done_early),
            "training": len(self._training),
            "trained": self.num_trained * self._batch,
            "dropped": self.dropped.total(),
        }

    def run(self) -> Outcome:
        """Simulate until enough steps are trained; what happened between the first and the last that count."""
        skipped, total = self.scenario.settled_after, self.scenario.settled_after + self.scenario.steps
        self._go_on()
        while self.num_trained < total:
            if not self.events.step():
                raise RunError(f"the simulated run stands still at {self.events.now:g} s: {self.fates()}")
            if self.num_trained < total:
                self._go_on()
        return self._outcome(self._begin, _Counts.of(self), self.steps[skipped:])

    def _go_on(self) -> None:
        """After every event: train, sync and begin what can be."""
        if not self.trainer.is_busy and not self.is_syncing:
            if self._sync_due and self._may_sync():
                self._begin_sync()
            if not self._sync_due and self._may_train():
                self._begin_training()
        for _ in range(self._room()):
            self._begin_group()
        self.generation.plan_ends()
        if self._rules.contention:
            share = self.generation.num_busy / len(self.generation.engines)
            self.trainer.slow(1 + self._rules.contention * share)
        if self._watch is not None:
            self._watch(self)

    def _may_sync(self) -> bool:
        """In one-step mode a sync waits for the batch that is being made."""
        return self._rules.mode != ONE_STEP or len(self.ready) >= self._batch and not self.running

    def _may_train(self) -> bool:
        if self._rules.mode == FULL:
            self._judge_age()
            return len(self.ready) >= self._batch and not self._leaves_too_much()
        if self._rules.over_sampling is None and self.running:
            return False
        return len(self.ready) >= self._batch

    def _leaves_too_much(self) -> bool:
        """Whether, with the oldest trained on now, some group could not be in time: of those that are due in step d or
        before, the steps from the next to d hold (d - now) batches.
        """
        if self._rules.stale_policy != WAIT or self._line is not None:
            return False
        step, bound = self.num_trained, self._rules.max_staleness
        self.ready.sort(key=lambda group: (group.version, group.prompt))
        left = [*self.ready[self._batch :], *self.running.values()]
        due = sorted(group.version + bound for group in left)
        return any(number > (last - step) * self._batch for number, last in enumerate(due, 1))

    def _judge_age(self) -> None:
        """What is too old for the next train step is dropped, made anew, or left."""
        if self._rules.stale_policy in (TRAIN, WAIT) or self._num_judged == len(self.ready):
            return
        oldest = self.num_trained - self._rules.max_staleness
        young, unjudged = self.ready[: self._num_judged], self.ready[self._num_judged :]
        stale = [group for group in unjudged if group.version < oldest]
        if stale:
            self.ready = young + [group for group in unjudged if group.version >= oldest]
        self._num_judged = len(self.ready)
        for group in stale:
            self.generation.drop(group)
            if self._rules.stale_policy == REQUEUE:
                self._again.append(group.prompt)
                self.num_requeued += 1
            else:
                assert self._rules.stale_policy == DROP, self._rules.stale_policy
                self.dropped[STALE] += 1

    def _room(self) -> int:
        """Groups that may be begun now."""
        rules, num_running, ready = self._rules, len(self.running), len(self.ready) + len(self._done_early)
        if not self.generation.is_open:
            return 0
        if rules.mode == FULL:
            # The capacity rule. What is trained on counts as accepted; steps count from 1, and are those of the served
            # weights, so that no group in the prompts' order can be older than max_staleness when it is trained on.
            accepted = len(self.steps) * self._batch + ready
            room = (rules.max_staleness + self.generation.version + 1) * self._batch - (accepted + num_running)
            return room if rules.num_workers is None else min(rules.num_workers - num_running, room)
        if rules.mode == ONE_STEP:
            return self._batch - num_running - ready
        if self.trainer.is_busy:
            return 0
        return (rules.over_sampling or self._batch) - num_running - ready

    def _begin_group(self) -> None:
        if self._again:
            prompt, draw_as = self._again.popleft(), _ANEW + self._num_begun
        else:
            prompt = draw_as = self._num_drawn
            self._num_drawn += 1
        self._num_begun += 1
        # Before it is sent: groups may be done at once, where nothing takes time.
        group = self.generation.begin(prompt, draw_as)
        self.running[prompt] = group
        if self._line is not None:
            self._line.append(group)

    def _group_done(self, group: SimulatedGroup) -> None:
        del self.running[group.prompt]
        if group.draw.filtered:
            self.generation.drop(group)
            self.dropped[FILTERED] += 1
        elif self._line is None:
            self.ready.append(group)
        else:
            self._done_early[group.prompt] = group
        if self._line is None:
            return
        while self._line and self._line[0].num_left == 0:
            first = self._line.popleft()
            if not first.is_gone:
                self.ready.append(self._done_early.pop(first.prompt))

    def _begin_training(self) -> None:
        if self._rules.order == BY_AGE and self._rules.mode == FULL:
            self.ready.sort(key=lambda group: (group.version, group.prompt))
        batch, self.ready = self.ready[: self._batch], self.ready[self._batch :]
        work, pace = self.scenario.work, self.scenario.trainer
        num_turns = sum(sum(group.draw.turns) - len(group.draw.turns) for group in batch)
        generated = sum(group.tokens for group in batch)
        tokens = generated + work.observation_tokens * num_turns + work.prompt_tokens * work.group_size * len(batch)
        self._training, self._num_judged = batch, 0
        staleness = [self.num_trained - group.version for group in batch]
        self.steps.append(_TrainStep(staleness, len(batch) + len(self.ready), tokens, generated))
        if self._rules.over_sampling is not None:
            self._cut_off()
        if self._rules.contention:
            self.generation.slow(1 + self._rules.contention)
        self.trainer.begin(pace.fixed_s + pace.per_token_s * tokens + pace.overhead_s)

    def _cut_off(self) -> None:
        """The batch is full: what is unfinished is kept for the next, or thrown away."""
        if not self._rules.partial:
            for group in [*self.running.values(), *self.ready]:
                self.generation.drop(group)
                self.dropped[SURPLUS] += 1
            self.running.clear()
            self.ready.clear()
        self.generation.close(keep=False)

    def _train_ended(self) -> None:
        self._training, self._num_judged = [], 0
        if self.num_trained == self.scenario.settled_after:
            self._begin = _Counts.of(self)
        if self._rules.contention:
            self.generation.slow(1.0)
        self._sync_due = self.num_trained % self._rules.sync_interval == 0
        if not self._sync_due and not self.generation.is_open:
            self.generation.open(self.generation.version)

    def _begin_sync(self) -> None:
        self.is_syncing = True
        seconds = self._draws.sync_s(self.num_trained // self._rules.sync_interval - 1)
        if self._rules.mode == FULL and self._rules.pause_mode == ABORT:
            seconds += self.scenario.trainer.abort_s
        share = self.scenario.trainer.pause_share if self._rules.mode == FULL else 1.0
        self.paused_s += share * seconds
        if share == 1:
            self.generation.close(keep=True)
        else:
            self.events.at(self.events.now + (1 - share) * seconds, self._pause)
        self.events.at(self.events.now + seconds, self._synced, seconds)

    def _pause(self) -> None:
        self.generation.close(keep=True)

    def _synced(self, seconds: float) -> None:
        self.syncing_s += seconds
        self.is_syncing, self._sync_due = False, False
        self.generation.open(self.num_trained)

    def _outcome(self, begin: _Counts, end: _Counts, steps: list[_TrainStep]) -> Outcome:
        wall, num_engines = end.now - begin.now, len(self.generation.engines)
        assert wall > 0, "a decode step takes time: check() refuses another"
        staleness = [age for step in steps for age in step.staleness]
        num_samples = len(staleness) * self.scenario.work.group_size
        busy_s, syncing = end.busy_s - begin.busy_s, (end.syncing_s - begin.syncing_s) / wall
        return Outcome(
            mode=self._rules.mode,
            step_s=wall / len(steps),
            steps=len(steps),
            engines_busy=busy_s / wall / num_engines,
            engines_sync=(end.paused_s - begin.paused_s) / wall,
            trainer_busy=(end.training_s - begin.training_s) / wall,
            trainer_sync=syncing,
            running_mean=(end.request_s - begin.request_s) / busy_s if busy_s else 0.0,
            trained_samples=num_samples,
            trained_tokens=sum(step.tokens for step in steps),
            decoded_tokens=end.decoded - begin.decoded,
            lost_tokens=end.lost - begin.lost,
            again_tokens=end.again - begin.again,
            staleness_mean=sum(staleness) / len(staleness),
            staleness_max=max(staleness),
            ready_mean=sum(step.num_ready for step in steps) / len(steps),
            dropped=dict(end.dropped - begin.dropped),
            requeued=end.requeued - begin.requeued,
            mean_length=sum(step.response_tokens for step in steps) / num_samples,
        )
