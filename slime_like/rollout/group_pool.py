"""Groups in the making and groups that wait, as the ledger has them; who draws and who takes decide when."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence

from slime_like.errors import RunError
from slime_like.records import Prompt, SampleGroup
from slime_like.rollout.groups import GroupOutcome
from slime_like.rollout.ledger import IN_FLIGHT, READY, TAKEN
from slime_like.rollout.prompt_feed import PromptFeed
from slime_like.rollout.put_aside import PUT_ASIDE

#: Reasons in the ledger for groups that are not trained on; those of a filter stand behind "filter/".
FAILED_GROUP, SURPLUS, STALE = "failed", "surplus", "stale"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Taken:
    """What one `take` gave, and what came of every prompt that ended since the one before."""

    groups: tuple[SampleGroup, ...]
    outcomes: tuple[GroupOutcome, ...]
    dropped: collections.Counter[str]  # reason -> groups
    requeued: int = 0  # prompts that were too late and are asked again
    thrown_tokens: int = 0  # response tokens of groups that were made and not handed out
    idle_s: float = 0.0  # in which nothing was being made
    held_s: float = 0.0  # in which less was being made than could be, as it would have become too old
    begun_with: tuple[int, ...] = ()  # of each group: rollouts that the weights of its beginning were trained on
    num_ready: int = 0  # groups that wait after this `take`
    num_running: int = 0  # groups that are being made after it
    busy: tuple[tuple[float, float], ...] = ()  # time.monotonic() from and to which something was being made


@dataclasses.dataclass(frozen=True, kw_only=True)
class PoolState:
    """For a checkpoint: what a pool holds between two hand-outs."""

    groups: tuple[SampleGroup, ...]  # those that wait, and those that ended since the last hand-out
    record: dict  # JSON: what is known of each of them, of those in the making, and the account


@dataclasses.dataclass(frozen=True)
class ReadyGroup:
    """A group that is made."""

    outcome: GroupOutcome
    begun_with: int


class GroupPool:
    """Use it inside one event loop. The feed's ledger knows where each prompt stands.

    make: a prompt's scored group; raises only what must end the run. judge: why a group is not to be trained on, None
    to keep it. on_done: called when one is made; it settles it.
    """

    def __init__(
        self,
        feed: PromptFeed,
        make: Callable[[Prompt], Awaitable[GroupOutcome]],
        judge: Callable[[GroupOutcome], str | None],
        *,
        on_done: Callable[[asyncio.Task], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._feed, self._make, self._judge, self._on_done = feed, make, judge, on_done
        self._clock, self._clocked = clock, clock()
        self.is_held = False  # whether age alone keeps more from being made
        self.running: dict[int, asyncio.Task] = {}  # prompt -> its task
        self.begun_with: dict[int, int] = {}  # prompt that is being made -> rollouts its first weights were trained on
        self.begun_before: dict[int, int] = {}  # of prompts that wait and have begun before a resume: as begun_with
        self.ready: dict[int, ReadyGroup] = {}
        self.outcomes: list[GroupOutcome] = []
        self.dropped: collections.Counter[str] = collections.Counter()
        self._prompts: dict[asyncio.Task, int] = {}
        self._ending: set[asyncio.Task] = set()  # cancelled ones, until they have ended
        self._requeued = self._thrown_tokens = 0
        self._idle_s = self._held_s = 0.0
        self._busy: list[tuple[float, float]] = []
        self._is_taking = False

    @contextlib.asynccontextmanager
    async def taking(
        self, count: int, stop: Callable[[], Awaitable[None]], *, outlives_cancelling: bool = False
    ) -> AsyncIterator[None]:
        """While somebody takes `count` groups; whatever goes wrong then, `stop` comes first.

        outlives_cancelling: who takes gave up, and what is made stays. Raises RunError if somebody takes already.
        """
        if self._is_taking:
            raise RunError(f"{count} groups were asked for while others are still being taken")
        self._is_taking = True
        try:
            yield
        except BaseException as error:
            if not (outlives_cancelling and isinstance(error, asyncio.CancelledError)):
                await stop()
            raise
        finally:
            self._is_taking = False

    def begin(self, count: int, begun_with: int) -> int:
        """Draw prompts and begin their groups; how many."""
        self.lap()
        prompts = self._feed.draw(count)
        for prompt in prompts:
            self._feed.ledger.move(prompt.index, IN_FLIGHT)
            task = asyncio.ensure_future(self._make(prompt))
            self.running[prompt.index] = task
            self.begun_with[prompt.index] = self.begun_before.pop(prompt.index, begun_with)
            self._prompts[task] = prompt.index
            if self._on_done is not None:
                task.add_done_callback(self._on_done)
        return len(prompts)

    def settle(self, task: asyncio.Task) -> None:
        """Take in a group that is made, or was cancelled by `end`. Raises what making it raised."""
        if task in self._ending:
            self._ending.discard(task)
            return
        if task not in self._prompts:
            return  # stopped
        self.lap()
        prompt = self._prompts.pop(task)
        del self.running[prompt]
        begun_with = self.begun_with.pop(prompt)
        if task.cancelled() or task.exception() is not None:
            self._feed.ledger.put_back([prompt])
        outcome = task.result()
        self.outcomes.append(outcome)
        self._feed.ledger.move(prompt, READY)
        self.ready[prompt] = ReadyGroup(outcome, begun_with)
        if self._feed.keeps_asking(prompt, outcome.user_error):
            self.ask_again(prompt)
            return
        why = PUT_ASIDE if self._feed.is_put_aside(prompt) else None
        why = why or (FAILED_GROUP if outcome.failed else self._judge(outcome))
        if why is not None:
            self.drop(prompt, why)

    def drop(self, prompt: int, why: str) -> None:
        """A group that is ready, or being made, will not be trained on."""
        self._forget(prompt)
        self._feed.ledger.drop(prompt, why)
        self.dropped[why] += 1

    def ask_again(self, prompt: int) -> None:
        """A group that is ready, or being made, is thrown away; its prompt is drawn again next."""
        self._forget(prompt)
        self._feed.ledger.put_back([prompt])
        self._requeued += 1

    def hand_out(self, prompts: Sequence[int]) -> Taken:
        """These groups, which are ready, and the account of everything since the one before."""
        self.lap()
        taken = [self.ready.pop(prompt) for prompt in prompts]
        for prompt in prompts:
            self._feed.ledger.move(prompt, TAKEN)
        account = Taken(
            groups=tuple(ready.outcome.group for ready in taken),
            outcomes=tuple(self.outcomes),
            dropped=self.dropped,
            requeued=self._requeued,
            thrown_tokens=self._thrown_tokens,
            idle_s=self._idle_s,
            held_s=self._held_s,
            busy=tuple(self._busy),
            begun_with=tuple(ready.begun_with for ready in taken),
            num_ready=len(self.ready),
            num_running=len(self.running),
        )
        self.outcomes, self.dropped = [], collections.Counter()
        self._requeued = self._thrown_tokens = 0
        self._idle_s = self._held_s = 0.0
        self._busy = []
        return account

    async def stop(self) -> None:
        """Make nothing any more; prompts that were in flight or ready are put back."""
        tasks, prompts = [*self._prompts, *self._ending], [*self.running, *self.ready]
        self._prompts, self._ending, self.running, self.begun_with, self.ready = {}, set(), {}, {}, {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._feed.ledger.put_back(prompts)

    def state(self) -> PoolState:
        """What is made and was not handed out, and the account since the last time that something was."""
        self.lap()
        ready = {id(one.outcome): one.begun_with for one in self.ready.values()}
        counted = set(map(id, self.outcomes))
        those = {id(outcome): outcome for outcome in (*self.outcomes, *(one.outcome for one in self.ready.values()))}
        groups = [
            {
                "begun_with": ready.get(key),
                "is_counted": key in counted,
                "num_failures": outcome.num_failures,
                "num_interrupted": outcome.num_interrupted,
            }
            for key, outcome in those.items()
        ]
        begun = self.begun_before | self.begun_with
        return PoolState(
            groups=tuple(outcome.group for outcome in those.values()),
            record={
                "groups": groups,
                "begun_with": {str(prompt): begun_with for prompt, begun_with in begun.items()},
                "dropped": dict(self.dropped),
                "requeued": self._requeued,
                "thrown_tokens": self._thrown_tokens,
                "idle_s": self._idle_s,
                "held_s": self._held_s,
            },
        )

    def load(self, state: PoolState, continued: Collection[int]) -> None:
        """Go on from a state, after the ledger has. continued: prompts of which answers are kept, whose groups are as
        old as these.

        Raises CheckpointError if they are not those of the ledger.
        """
        for group, one in zip(state.groups, state.record["groups"], strict=True):
            outcome = GroupOutcome(
                group=group, num_failures=one["num_failures"], num_interrupted=one["num_interrupted"]
            )
            if one["is_counted"]:
                self.outcomes.append(outcome)
            if one["begun_with"] is not None:
                self._feed.ledger.take_again([group.prompt.index], READY)
                self.ready[group.prompt.index] = ReadyGroup(outcome, one["begun_with"])
        begun = {int(prompt): begun_with for prompt, begun_with in state.record["begun_with"].items()}
        self.begun_before = {prompt: begun_with for prompt, begun_with in begun.items() if prompt in continued}
        self.dropped = collections.Counter(state.record["dropped"])
        self._requeued, self._thrown_tokens = state.record["requeued"], state.record["thrown_tokens"]
        self._idle_s, self._held_s = state.record["idle_s"], state.record["held_s"]

    def lap(self) -> None:
        """Count the time since the last call as what it was: call it before anything changes."""
        now = self._clock()
        if not self.running:
            self._idle_s += now - self._clocked
        elif self._busy and self._busy[-1][1] == self._clocked:
            self._busy[-1] = (self._busy[-1][0], now)
        else:
            self._busy.append((self._clocked, now))
        if self.is_held:
            self._held_s += now - self._clocked
        self._clocked = now

    def _forget(self, prompt: int) -> None:
        self.lap()
        ready = self.ready.pop(prompt, None)
        if ready is not None:
            self._thrown_tokens += sum(sample.num_response_tokens for sample in ready.outcome.group.samples)
            return
        task = self.running.pop(prompt)
        del self.begun_with[prompt], self._prompts[task]
        if self._on_done is not None:
            self._ending.add(task)
        task.cancel()
