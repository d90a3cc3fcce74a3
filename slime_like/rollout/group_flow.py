"""Scored groups that go on being made while others are trained on: what is old goes first, and nothing gets too old.

A group begun with weights of b rollouts, and trained on in rollout t, is t - b rollout steps stale. Never more are made
than can be trained on in time,

    begin at most min(workers - running, (max_staleness + b + 1 - t) x batch - (ready + running)),

t being the rollout that is handed out next (AReaL's rule, arXiv:2505.24298, sec. 5.1, counted from now instead of from
the beginning). Then there is a batch for every group in time. With --stale-policy wait the trainer takes what is oldest
first, and waits for an older group only where what is left would otherwise be more than the rollouts until it is due
can hold: every group is trained on in time, none is dropped, and long answers are trained on as often as short ones.
The other policies never wait for one, and count what they do instead.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Collection

from slime_like.errors import RunError
from slime_like.records import Prompt
from slime_like.rollout.group_pool import STALE, GroupPool, PoolState, Taken
from slime_like.rollout.group_stream import Choose, exhausted, in_choice
from slime_like.rollout.groups import GroupOutcome, refuse_if_all_failed
from slime_like.rollout.prompt_feed import PromptFeed


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlowLimits:
    """How much is made at a time, and how old it may get."""

    batch: int  # groups of a rollout
    workers: int  # groups in the making at most; of a flow that does not work ahead, those that wait count too
    max_staleness: int | None = None  # None: no bound
    stale_policy: str = "wait"
    max_draws: int = 10  # most prompts drawn between two hand-outs, in multiples of the batch
    works_ahead: bool = True  # whether groups are begun between two `take`s
    num_rollouts: int | None = None  # of the whole run: nothing is made for what comes after it


class GroupFlow:
    """Makes groups of a feed's prompts, inside one event loop, from the first `take` on; see GroupPool.

    choose: of more groups than are taken. Nothing is waited for then, and what would be too late for the next rollout
    is dropped.
    """

    def __init__(
        self,
        feed: PromptFeed,
        make: Callable[[Prompt], Awaitable[GroupOutcome]],
        judge: Callable[[GroupOutcome], str | None],
        limits: FlowLimits,
        choose: Choose | None = None,
    ):
        self._pool = GroupPool(feed, make, judge, on_done=self._on_done)
        self._limits, self._choose = limits, choose
        self._trained_on = self._step = 0
        self._num_drawn = 0  # since the last hand-out
        self._begun = False
        self._failure: BaseException | None = None
        self._changed = asyncio.Event()

    @property
    def num_in_flight(self) -> int:
        """Groups that are being made."""
        return len(self._pool.running)

    @property
    def num_ready(self) -> int:
        """Groups that are made and were not taken."""
        return len(self._pool.ready)

    async def take(self, count: int, step: int) -> Taken:
        """The `count` groups of rollout `step`.

        Raises RunError if the bound on draws is reached first, or if nothing can be generated any more. After a failure
        nothing is in flight, and what was is drawn again next; where only who takes gives up, all goes on.
        """
        async with self._pool.taking(count, self.stop, outlives_cancelling=True):
            self._begun = True
            return await self._take(count, step)

    def policy_changed(self, steps: int) -> None:
        """The engines serve weights that were trained on so many rollouts: more may be begun."""
        self._trained_on = steps
        if self._begun and self._limits.works_ahead:
            self._refill()

    async def stop(self) -> None:
        """Make nothing any more; prompts that were in flight or ready are put back."""
        self._begun = False
        await self._pool.stop()

    def state(self) -> PoolState:
        """For a checkpoint: what is made and was not handed out."""
        return self._pool.state()

    def load(self, state: PoolState, continued: Collection[int]) -> None:
        """Before the first `take`: go on from a state; see GroupPool.load."""
        self._pool.load(state, continued)

    async def _take(self, count: int, step: int) -> Taken:
        self._step = step
        self._weed()
        while True:
            if self._failure is not None:
                raise self._failure
            self._refill()
            order = sorted(self._pool.ready, key=lambda prompt: (self._pool.ready[prompt].begun_with, prompt))
            if len(order) >= count and not self._leaves_too_much(order[:count]):
                return self._hand_out(count, order)
            if not self._pool.running:
                if not order:
                    refuse_if_all_failed(self._pool.outcomes)
                raise RunError(exhausted(self._pool, self._num_drawn, count, self._limits.max_draws))
            self._changed.clear()
            await self._changed.wait()

    def _hand_out(self, count: int, order: list[int]) -> Taken:
        order = in_choice(self._pool, order, count, self._choose)
        self._step += 1
        for prompt in order[count:]:
            if self._choose is not None and self._is_late(self._pool.ready[prompt].begun_with):
                self._pool.drop(prompt, STALE)
        taken = self._pool.hand_out(order[:count])
        self._num_drawn = 0
        if self._limits.works_ahead:
            self._refill()
        return taken

    def _refill(self) -> None:
        """Begin what there is room for."""
        room = min(self._room(), self._limits.max_draws * self._limits.batch - self._num_drawn)
        if room > 0 and not self._all_failed():
            self._num_drawn += self._pool.begin(room, self._trained_on)

    def _all_failed(self) -> bool:
        """Whether everything that ended since the last hand-out failed: engines that are gone get no more requests."""
        return bool(self._pool.outcomes) and all(outcome.got_nothing for outcome in self._pool.outcomes)

    def _room(self) -> int:
        """How many groups may be begun now."""
        limits, pool = self._limits, self._pool
        num_made = len(pool.ready) + len(pool.running)
        free = limits.workers - (len(pool.running) if limits.works_ahead else num_made)
        if limits.num_rollouts is not None:
            free = min(free, (limits.num_rollouts - self._step) * limits.batch - num_made)
        if limits.max_staleness is None:
            return free
        in_time = (limits.max_staleness + self._trained_on + 1 - self._step) * limits.batch - num_made
        pool.lap()
        pool.is_held = in_time < free
        return min(free, in_time)

    def _is_late(self, begun_with: int) -> bool:
        """Whether a group is too old for the rollout that is handed out next."""
        bound = self._limits.max_staleness
        return bound is not None and begun_with + bound < self._step

    def _leaves_too_much(self, taken: list[int]) -> bool:
        """Whether, with these taken now, some group could not be trained on in time: of those that are due in rollout d
        or before, the rollouts from the next to d hold (d - t) batches.
        """
        bound, batch = self._limits.max_staleness, self._limits.batch
        # Who chooses leaves others behind, which are dropped when they are late: waiting would not keep them.
        if bound is None or self._limits.stale_policy != "wait" or self._choose is not None:
            return False
        taken_now = set(taken)
        left = [ready.begun_with for prompt, ready in self._pool.ready.items() if prompt not in taken_now]
        due = sorted(begun_with + bound for begun_with in (*left, *self._pool.begun_with.values()))
        return any(number > (last - self._step) * batch for number, last in enumerate(due, 1))

    def _weed(self) -> None:
        """What has become too old is dropped, or asked again."""
        if self._limits.stale_policy == "train":
            return
        pool = self._pool
        ages = pool.begun_with | {prompt: ready.begun_with for prompt, ready in pool.ready.items()}
        for prompt in [prompt for prompt, begun_with in ages.items() if self._is_late(begun_with)]:
            if self._limits.stale_policy == "requeue":
                pool.ask_again(prompt)
            else:
                pool.drop(prompt, STALE)

    def _on_done(self, task: asyncio.Task) -> None:
        """Take a group in and begin the next; what goes wrong is raised by who takes."""
        try:
            self._pool.settle(task)
            if self._begun and self._limits.works_ahead:
                self._refill()
        except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - raised by take()
            self._failure = self._failure or error
        self._changed.set()
