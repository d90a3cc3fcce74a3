"""One simulated engine: continuous batching as a clock of tokens that runs slower the more requests run."""

from __future__ import annotations

import collections
import heapq
import math
from typing import Any

from slime_like.planning.simulate.scenario import EnginePace


class SimulatedEngine:
    """Requests that run get a token each in every decode step, so one clock serves them all.

    The clock counts tokens: a request that is admitted at clock c and wants n tokens ends at clock c + n, whatever
    comes and goes meanwhile. Only the clock's pace changes. So an event costs a heap's logarithm, not a batch.
    What is in seconds is busy_s (it decodes or prefills), and request_s (the same, times the requests that run).
    """

    __slots__ = (
        "_at",
        "_clock",
        "_pace",
        "_prefill_s",
        "_running",
        "_serial",
        "_slots",
        "_slowness",
        "_stall_left",
        "_stalled_until",
        "_step",
        "_waiting",
        "busy_s",
        "paused",
        "request_s",
        "stamp",
    )

    def __init__(self, pace: EnginePace):
        self._pace, self._slots, self._prefill_s = pace, pace.slots, pace.prefill_s
        self._at = self._clock = self._stalled_until = self._stall_left = 0.0
        self._slowness, self._serial = 1.0, 0
        self._running: list[tuple[float, int, Any]] = []  # (clock at which it ends, serial number, request)
        self._waiting: collections.deque[tuple[float, float, Any]] = collections.deque()  # (tokens, prefill, request)
        self.paused = False
        self.busy_s = self.request_s = 0.0
        self.stamp = 0  # counts changes of the next end: events of an older one are void
        self._step = pace.base_s

    @property
    def num_requests(self) -> int:
        """Running and waiting."""
        return len(self._running) + len(self._waiting)

    @property
    def is_busy(self) -> bool:
        """Whether it has something to do, and may."""
        return bool(self._running) and not self.paused

    def next_end(self) -> float:
        """When the next request ends if nothing changes; infinity if none runs."""
        if self.paused or not self._running:
            return math.inf
        begin = self._at if self._at > self._stalled_until else self._stalled_until
        return begin + (self._running[0][0] - self._clock) * self._step

    def submit(self, now: float, tokens: float, prefill_tokens: float, request: Any) -> None:
        """Take a request in; it waits if all slots are taken."""
        self.advance(now)
        self._waiting.append((tokens, prefill_tokens, request))
        self._fill()

    def ended(self, now: float) -> list[Any]:
        """The requests that end now, at `next_end`."""
        self.advance(now)
        end, requests = self._running[0][0], []
        self._clock = end  # exactly, whatever rounding the seconds had
        while self._running and self._running[0][0] == end:
            requests.append(heapq.heappop(self._running)[2])
        self._fill()
        return requests

    def slow(self, now: float, slowness: float) -> None:
        """Everything takes `slowness` times as long from now on."""
        self.advance(now)
        left = max(0.0, self._stalled_until - now) * slowness / self._slowness
        self._stalled_until, self._slowness = now + left, slowness
        self._change_pace()

    def pause(self, now: float) -> None:
        """Nothing goes on until `resume`."""
        self.advance(now)
        self._stall_left = max(0.0, self._stalled_until - now)
        self.paused = True
        self.stamp += 1

    def resume(self, now: float, *, again_tokens: float = 0.0) -> None:
        """Go on; again_tokens are prefilled before."""
        self.advance(now)
        self.paused = False
        self._stalled_until = now + self._stall_left + again_tokens * self._prefill_s * self._slowness
        self._fill()

    def progress(self, now: float) -> list[tuple[Any, float]]:
        """(request, tokens that it lacks) of all that run."""
        self.advance(now)
        return [(request, end - self._clock) for end, _, request in self._running]

    def take_all(self, now: float) -> list[tuple[Any, float, bool]]:
        """(request, tokens that it lacks, whether it has run) of all that run or wait; afterwards there is none."""
        taken = [(request, lacks, True) for request, lacks in self.progress(now)]
        taken += [(request, tokens, False) for tokens, _, request in self._waiting]
        self._running.clear()
        self._waiting.clear()
        self._stalled_until, self._stall_left = now, 0.0
        self._change_pace()
        return taken

    def advance(self, now: float) -> None:
        """Let time pass until now."""
        if now <= self._at:
            return
        if self._running and not self.paused:
            self.busy_s += now - self._at
            self.request_s += (now - self._at) * len(self._running)
            begin = self._at if self._at > self._stalled_until else self._stalled_until
            if now > begin:
                self._clock += (now - begin) / self._step
        self._at = now

    def _fill(self) -> None:
        while self._waiting and len(self._running) < self._slots:
            tokens, prefill, request = self._waiting.popleft()
            self._serial += 1
            heapq.heappush(self._running, (self._clock + tokens, self._serial, request))
            stall = prefill * self._prefill_s * self._slowness
            if self.paused:
                self._stall_left += stall
            else:
                self._stalled_until = max(self._stalled_until, self._at) + stall
        self._change_pace()

    def _change_pace(self) -> None:
        self._step = (self._pace.base_s + self._pace.per_request_s * len(self._running)) * self._slowness
        self.stamp += 1
