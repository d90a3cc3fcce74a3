"""Which weights the engines serve, as the rollout side is told: before they change, and after."""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import Iterator

from slime_like.errors import WaitTimeout
from slime_like.records import WeightsRef

#: What train.py needs at least to notice that an engine has died: its server may go on for a moment without it.
_NOTICED_S, _LOOK_S = 3.0, 0.1
#: Looks that a request which failed waits for: one may have begun before it did.
_LOOKS = 2


class Policy:
    """Use it inside one event loop.

    A request that is aborted while weights change, or changed since it began, did not fail.
    """

    def __init__(self, weights: WeightsRef | None = None):
        self.weights = weights or WeightsRef()
        self.num_changes = 0  # begun or ended
        self._in_use: collections.Counter[WeightsRef] = collections.Counter()
        self.num_engine_changes = 0
        self.num_looks = 0  # of train.py, each second but in a train step or a save, at which engines have died
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

    def engines_looked_at(self) -> None:
        """Whoever has died until a moment ago is known, or will be at the next look."""
        self.num_looks += 1

    async def changes_after(self, before: int, timeout_s: float) -> bool:
        """Whether other engines serve than when `num_engine_changes` had this value, or will when somebody has looked
        which have died: within seconds, but in a train step beside generation. Never after timeout_s.
        """
        clock, looks = asyncio.get_running_loop().time, self.num_looks
        begin = clock()
        while self.num_engine_changes == before:
            waited = clock() - begin
            known = self.num_looks >= looks + _LOOKS or not self.num_looks  # where nobody ever looks nothing comes
            if waited >= timeout_s or (known and waited >= _NOTICED_S):
                return False
            await asyncio.sleep(_LOOK_S)
        return True

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
