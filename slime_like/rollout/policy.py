"""Which weights the engines serve, as the rollout side is told: before they change, and after."""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import Iterator

from slime_like.errors import WaitTimeout
from slime_like.records import WeightsRef

#: train.py looks each second which engines have died; how long a request that failed waits for what it says.
_NOTICED_S, _LOOK_S = 3.0, 0.1


class Policy:
    """Use it inside one event loop.

    A request that is aborted while weights change, or changed since it began, did not fail.
    """

    def __init__(self, weights: WeightsRef | None = None):
        self.weights = weights or WeightsRef()
        self.num_changes = 0  # begun or ended
        self._in_use: collections.Counter[WeightsRef] = collections.Counter()
        self.num_engine_changes = 0
        self._settled, self._going_on, self._served = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._served.set()
        self._settled.set()
        self._going_on.set()

    @property
    def in_use(self) -> frozenset[WeightsRef]:
        """Weights that requests under way have named: engines must serve these, too."""
        return frozenset(self._in_use)

    @contextlib.contextmanager
    def request(self) -> Iterator[WeightsRef]:
        """The weights that a request names which begins now; they are in use until it has ended."""
        weights = self.weights
        self._in_use[weights] += 1
        try:
            yield weights
        finally:
            self._in_use[weights] -= 1
            if not self._in_use[weights]:
                del self._in_use[weights]

    def engines_changed(self, *, enough: bool) -> None:
        """Other engines serve from now on. enough: whether requests may be sent; else they wait."""
        self.num_engine_changes += 1
        (self._served.set if enough else self._served.clear)()

    async def served(self, timeout_s: float) -> None:
        """Wait until enough engines serve. Raises WaitTimeout."""
        if self._served.is_set():
            return
        try:
            await asyncio.wait_for(self._served.wait(), timeout_s)
        except TimeoutError:
            raise WaitTimeout(
                who="the rollout",
                whom="engines",
                phase="their replacement",
                seconds=timeout_s,
                last="fewer than --min-engines serve",
            ) from None

    async def changes_after(self, before: int) -> bool:
        """Whether other engines serve than when `num_engine_changes` had this value, or will within the time that it
        takes to notice that one has died.
        """
        for _ in range(round(_NOTICED_S / _LOOK_S)):
            if self.num_engine_changes != before:
                return True
            await asyncio.sleep(_LOOK_S)
        return self.num_engine_changes != before

    def changing(self) -> None:
        """Engines are about to get other weights: what runs may be aborted."""
        self.num_changes += 1
        self._settled.clear()

    def changed(self, weights: WeightsRef) -> None:
        """They serve these from now on."""
        self.num_changes += 1
        self.weights = weights
        self._settled.set()

    def hold(self) -> None:
        """What runs is ended, to be gone on with after `go_on`: no fault of a request's."""
        self.num_changes += 1
        self._going_on.clear()

    def go_on(self) -> None:
        """Requests may be sent again."""
        self._going_on.set()

    def explains_abort(self, num_changes_before: int) -> bool:
        """Whether a request that began when `num_changes` had this value can have been aborted by a change of weights
        or by `hold`.
        """
        ended = not (self._settled.is_set() and self._going_on.is_set())
        return ended or self.num_changes != num_changes_before

    async def gone_on(self) -> None:
        """Until requests may be sent: as long as a whole train step, whose phases have their deadlines."""
        await self._going_on.wait()

    async def settled(self, timeout_s: float) -> None:
        """Until no change is under way. Raises WaitTimeout."""
        try:
            await asyncio.wait_for(self._settled.wait(), timeout_s)
        except TimeoutError:
            last = f"engines serve {self.weights}, the next sync has begun"
            raise WaitTimeout(
                who="the rollout", whom="a weight sync", phase="generate", seconds=timeout_s, last=last
            ) from None
