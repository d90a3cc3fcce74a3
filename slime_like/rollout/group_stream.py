"""Scored groups as a stream: asked for by number, made as many at a time as are needed, handed out in the order of
their prompts; nothing is in flight between two `take`s.

In the prompts' order, not as they finish: whoever takes what comes first prefers short answers.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence

from slime_like.errors import RunError
from slime_like.records import Prompt, SampleGroup
from slime_like.rollout.group_pool import SURPLUS, GroupPool, Taken
from slime_like.rollout.groups import GroupOutcome, refuse_if_all_failed
from slime_like.rollout.prompt_feed import PromptFeed

#: Of groups that are ready, the prompts of as many as are taken, where there are more.
Choose = Callable[[list[SampleGroup], int], Sequence[int]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamLimits:
    """How a stream draws."""

    draw_batch: int | None = None  # prompts drawn at a time; None: as many as are missing
    max_running: int | None = None  # groups made at a time: a prompt beyond them is not drawn yet, and costs nothing
    max_draws: int = 10  # most prompts drawn by one `take`, in multiples of what it was asked for


class GroupStream:
    """Makes groups of a feed's prompts, inside one event loop; see GroupPool. choose: by default the first."""

    def __init__(
        self,
        feed: PromptFeed,
        make: Callable[[Prompt], Awaitable[GroupOutcome]],
        judge: Callable[[GroupOutcome], str | None],
        limits: StreamLimits,
        choose: Choose | None = None,
    ):
        self._pool = GroupPool(feed, make, judge, on_done=self._on_end)
        self._limits, self._choose = limits, choose
        self._trained_on = 0
        self._ended: list[asyncio.Task] = []  # and not settled yet
        self._has_ended = asyncio.Event()

    @property
    def num_in_flight(self) -> int:
        """Groups that are being made."""
        return len(self._pool.running)

    @property
    def num_ready(self) -> int:
        """Groups that are made and were not taken."""
        return len(self._pool.ready)

    async def take(self, count: int, step: int = 0) -> Taken:
        """The next `count` groups.

        Raises RunError if the bound on draws is reached first, or if nothing can be generated any more.
        After a failure nothing is in flight, and what was is drawn again next.
        """
        async with self._pool.taking(count, self.stop):
            return await self._take(count)

    def policy_changed(self, steps: int) -> None:
        """The engines serve weights that were trained on so many rollouts."""
        self._trained_on = steps

    async def stop(self) -> None:
        """Make nothing any more; prompts that were in flight or ready are put back."""
        await self._pool.stop()
        self._ended = []

    async def _take(self, count: int) -> Taken:
        pool, limit, num_drawn = self._pool, count * self._limits.max_draws, 0
        while True:
            num_drawn += self._refill(count, limit - num_drawn)
            if len(pool.ready) >= count and not pool.running:
                return self._hand_out(count)
            if not pool.running:
                raise RunError(exhausted(pool, num_drawn, count, self._limits.max_draws))
            await self._has_ended.wait()
            self._has_ended.clear()
            ended, self._ended = self._ended, []
            for task in ended:
                pool.settle(task)
            if not pool.running and not pool.ready:
                refuse_if_all_failed(pool.outcomes)

    def _on_end(self, task: asyncio.Task) -> None:
        # Not asyncio.wait: it looks at every task whenever one ends.
        self._ended.append(task)
        self._has_ended.set()

    def _refill(self, count: int, allowed: int) -> int:
        """Begin what is missing; how many prompts were drawn."""
        missing = count - len(self._pool.ready) - len(self._pool.running)
        if missing <= 0 or not is_hopeful(self._pool):
            return 0
        room = allowed if self._limits.max_running is None else self._limits.max_running - len(self._pool.running)
        wanted = max(missing, self._limits.draw_batch or 0)
        return self._pool.begin(max(0, min(wanted, allowed, room)), self._trained_on)

    def _hand_out(self, count: int) -> Taken:
        order = in_choice(self._pool, sorted(self._pool.ready), count, self._choose)
        for prompt in order[count:]:
            self._pool.drop(prompt, SURPLUS)
        return self._pool.hand_out(order[:count])


def in_choice(pool: GroupPool, order: list[int], count: int, choose: Choose | None) -> list[int]:
    """The prompts in this order, but those of the `count` that are chosen first."""
    if choose is None or len(order) <= count:
        return order
    chosen = set(choose([pool.ready[prompt].outcome.group for prompt in order], count))
    return sorted(order, key=lambda prompt: prompt not in chosen)


def is_hopeful(pool: GroupPool) -> bool:
    """Whether something has gone well, or nothing has ended: a failure is not replaced before, so that engines that
    are gone get no more requests.
    """
    return not pool.running or not pool.outcomes or not all(outcome.got_nothing for outcome in pool.outcomes)


def exhausted(pool: GroupPool, num_drawn: int, count: int, max_draws: int) -> str:
    """That the bound on draws was reached, and why."""
    why = ", ".join(f"{reason} {number}" for reason, number in pool.dropped.most_common())
    errors = [sample.error for outcome in pool.outcomes for sample in outcome.failed]
    last = f" Last failure: {errors[-1]}" if errors else ""
    return (
        f"rollout: of {num_drawn} prompts only {len(pool.ready)} of {count} groups could be kept "
        f"(--dynamic-sampling-max-draws {max_draws}). Dropped: {why}.{last}"
    )
