"""Scored groups as a stream: asked for by number, made as many at a time as are needed, handed out in the order of
their prompts.

In the prompts' order, not as they finish: whoever takes what comes first prefers short answers.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Awaitable, Callable, Sequence

from slime_like.errors import RunError
from slime_like.records import Prompt, SampleGroup, WeightsRef
from slime_like.rollout.groups import GroupOutcome, refuse_if_all_failed
from slime_like.rollout.ledger import IN_FLIGHT, READY, TAKEN
from slime_like.rollout.prompt_feed import PromptFeed

#: Reasons in the ledger for groups that are not trained on; those of a filter stand behind "filter/".
FAILED_GROUP, SURPLUS, STALE = "failed", "surplus", "stale"


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamLimits:
    """How a stream draws."""

    draw_batch: int | None = None  # prompts drawn at a time; None: as many as are missing
    max_running: int | None = None  # groups made at a time: a prompt beyond them is not drawn yet, and costs nothing
    max_draws: int = 10  # most prompts drawn by one `take`, in multiples of what it was asked for
    keep_ahead: int = 0  # groups that are made beyond what was asked for; 0: nothing is in flight between two `take`s
    max_lag_versions: int | None = None  # a group that waits is dropped when it is older than this; None: never


@dataclasses.dataclass(frozen=True, kw_only=True)
class Taken:
    """What one `take` gave, and what came of every prompt that ended since the one before."""

    groups: tuple[SampleGroup, ...]
    outcomes: tuple[GroupOutcome, ...]
    dropped: collections.Counter[str]  # reason -> groups


@dataclasses.dataclass(frozen=True)
class _Ready:
    outcome: GroupOutcome
    made_with: int  # version of the weights that were served when it was begun


class GroupStream:
    """Makes groups of a feed's prompts, inside one event loop. The feed's ledger knows where each prompt stands.

    make: a prompt's scored group; raises only what must end the run. judge: why a group is not to be trained on, None
    to keep it. choose: of groups that are ready, the prompts of as many as are taken, where there are more; by default
    the first.
    """

    def __init__(
        self,
        feed: PromptFeed,
        make: Callable[[Prompt], Awaitable[GroupOutcome]],
        judge: Callable[[GroupOutcome], str | None],
        limits: StreamLimits,
        weights: WeightsRef | None = None,
        choose: Callable[[list[SampleGroup], int], Sequence[int]] | None = None,
    ):
        self._feed, self._make, self._judge, self._limits = feed, make, judge, limits
        self._weights = weights or WeightsRef()
        self._choose = choose
        self._tasks: dict[asyncio.Task, tuple[int, int]] = {}  # -> (prompt, version of the weights when it began)
        self._ready: dict[int, _Ready] = {}
        self._outcomes: list[GroupOutcome] = []
        self._dropped: collections.Counter[str] = collections.Counter()
        self._taking = False
        self._ended: list[asyncio.Task] = []  # and not settled yet
        self._has_ended = asyncio.Event()

    @property
    def num_in_flight(self) -> int:
        """Groups that are being made."""
        return len(self._tasks)

    @property
    def num_ready(self) -> int:
        """Groups that are made and were not taken."""
        return len(self._ready)

    async def take(self, count: int) -> Taken:
        """The next `count` groups.

        Raises RunError if the bound on draws is reached first, or if nothing can be generated any more.
        After a failure nothing is in flight, and what was is drawn again next.
        """
        if self._taking:
            raise RunError(f"{count} groups were asked for while others are still being taken")
        self._taking = True
        try:
            return await self._take(count)
        except BaseException:
            await self.stop()
            raise
        finally:
            self._taking = False

    def policy_changed(self, weights: WeightsRef) -> None:
        """The engines serve these from now on; what waits and is too old is dropped."""
        self._weights = weights
        for task in [task for task in self._tasks if task.done() and not task.cancelled() and task.exception() is None]:
            self._settle(task)
        lag = self._limits.max_lag_versions
        for prompt, ready in list(self._ready.items()):
            if lag is not None and weights.version - ready.made_with > lag:
                self._drop(prompt, STALE)

    async def stop(self) -> None:
        """Make nothing any more; prompts that were in flight or ready are put back."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._feed.ledger.put_back([*(prompt for prompt, _ in self._tasks.values()), *self._ready])
        self._tasks, self._ready, self._ended = {}, {}, []

    async def _take(self, count: int) -> Taken:
        limit, num_drawn = count * self._limits.max_draws, 0
        while True:
            num_drawn += self._refill(count, limit - num_drawn)
            if self._is_served(count):
                return self._hand_out(count)
            if not self._tasks:
                raise RunError(self._exhausted(num_drawn, count))
            await self._has_ended.wait()
            self._has_ended.clear()
            ended, self._ended = self._ended, []
            for task in ended:
                if task in self._tasks:
                    self._settle(task)
            if not self._tasks and not self._ready:
                refuse_if_all_failed(self._outcomes)

    def _refill(self, count: int, allowed: int) -> int:
        """Begin what is missing; how many prompts were drawn."""
        missing = count + self._limits.keep_ahead - len(self._ready) - len(self._tasks)
        # A failure is not replaced before something has gone well: engines that are gone get no more requests.
        hopeful = not self._tasks or not self._outcomes or any(map(_has_good_sample, self._outcomes))
        if missing <= 0 or not hopeful:
            return 0
        room = allowed if self._limits.max_running is None else self._limits.max_running - len(self._tasks)
        prompts = self._feed.draw(max(0, min(max(missing, self._limits.draw_batch or 0), allowed, room)))
        for prompt in prompts:
            self._feed.ledger.move(prompt.index, IN_FLIGHT)
            task = asyncio.ensure_future(self._make(prompt))
            self._tasks[task] = (prompt.index, self._weights.version)
            task.add_done_callback(self._on_end)
        return len(prompts)

    def _on_end(self, task: asyncio.Task) -> None:
        # Not asyncio.wait: it looks at every task whenever one ends.
        self._ended.append(task)
        self._has_ended.set()

    def _is_served(self, count: int) -> bool:
        """Whether the next groups in the prompts' order are all there.

        Where nothing is kept ahead, whether nothing runs either.
        """
        if len(self._ready) < count:
            return False
        if self._limits.keep_ahead == 0:
            return not self._tasks
        first_running = min((prompt for prompt, _ in self._tasks.values()), default=None)
        return first_running is None or sorted(self._ready)[count - 1] < first_running

    def _settle(self, task: asyncio.Task) -> None:
        """Take in a group that is made. Raises what making it raised."""
        prompt, made_with = self._tasks.pop(task)
        if task.cancelled() or task.exception() is not None:
            self._feed.ledger.put_back([prompt])
        outcome = task.result()
        self._outcomes.append(outcome)
        self._feed.ledger.move(prompt, READY)
        self._ready[prompt] = _Ready(outcome, made_with)
        why = FAILED_GROUP if outcome.failed else self._judge(outcome)
        if why is not None:
            self._drop(prompt, why)

    def _hand_out(self, count: int) -> Taken:
        order = sorted(self._ready)
        if self._choose is not None and len(order) > count:
            chosen = set(self._choose([self._ready[prompt].outcome.group for prompt in order], count))
            order.sort(key=lambda prompt: (prompt not in chosen, prompt))
        groups = tuple(self._ready.pop(prompt).outcome.group for prompt in order[:count])
        for prompt in order[:count]:
            self._feed.ledger.move(prompt, TAKEN)
        if self._limits.keep_ahead == 0:
            for prompt in order[count:]:
                self._drop(prompt, SURPLUS)
        taken = Taken(groups=groups, outcomes=tuple(self._outcomes), dropped=self._dropped)
        self._outcomes, self._dropped = [], collections.Counter()
        return taken

    def _drop(self, prompt: int, why: str) -> None:
        self._ready.pop(prompt)
        self._feed.ledger.drop(prompt, why)
        self._dropped[why] += 1

    def _exhausted(self, num_drawn: int, count: int) -> str:
        why = ", ".join(f"{reason} {number}" for reason, number in self._dropped.most_common())
        errors = [sample.error for outcome in self._outcomes for sample in outcome.failed]
        last = f" Last failure: {errors[-1]}" if errors else ""
        return (
            f"rollout: of {num_drawn} prompts only {len(self._ready)} of {count} groups could be kept "
            f"(--dynamic-sampling-max-draws {self._limits.max_draws}). Dropped: {why}.{last}"
        )


def _has_good_sample(outcome: GroupOutcome) -> bool:
    return len(outcome.failed) < len(outcome.group.samples)
