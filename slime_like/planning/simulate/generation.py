"""Groups being made: every sample's turns through engines, environment and reward, as events on a simulated clock."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from slime_like.planning.simulate.draws import Draws, PromptDraw
from slime_like.planning.simulate.engine import SimulatedEngine
from slime_like.planning.simulate.scenario import ABORT, KEEP, RETRACT, Scenario


class EventQueue:
    """What happens next. `now` is the time of the event that was taken last."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable, tuple]] = []
        self._serial = itertools.count()

    def at(self, time: float, act: Callable, *arguments) -> None:
        """Call act(*arguments) at `time`; of equal times the first that was asked for comes first."""
        heapq.heappush(self._events, (max(time, self.now), next(self._serial), act, arguments))

    def step(self) -> bool:
        """Do the next event; False if there is none."""
        if not self._events:
            return False
        self.now, _, act, arguments = heapq.heappop(self._events)
        act(*arguments)
        return True


class SimulatedGroup:
    """A prompt's samples while they are made, and until they are trained on."""

    __slots__ = ("draw", "is_gone", "num_left", "prompt", "tokens", "version")

    def __init__(self, prompt: int, version: int, draw: PromptDraw):
        self.prompt, self.version, self.draw = prompt, version, draw
        self.num_left = len(draw.tokens)  # samples that have no reward yet
        self.tokens = 0.0  # generated so far, in whole turns
        self.is_gone = False  # dropped: events of its samples are void


#: Of a request whose context no engine holds: never yet, or not any more.
_NEVER, _LOST = -1, -2


class _Request:
    """One sample on its way.

    context: tokens before those that it lacks. cached: version of the weights with which an engine holds them.
    """

    __slots__ = ("begun_s", "cached", "context", "engine", "group", "index", "lacks", "turn", "turn_tokens")

    def __init__(self, group: SimulatedGroup, index: int, context: float, now: float):
        self.group, self.index, self.context, self.begun_s = group, index, context, now
        self.turn, self.engine, self.cached = 0, -1, _NEVER
        self.turn_tokens = self.lacks = group.draw.tokens[index] / group.draw.turns[index]


class SimulatedGeneration:
    """All engines and what runs on them.

    group_done: called with a group whose last sample has its reward. Counts, over everything so far: `decoded_tokens`,
    `again_tokens` (prefilled once more because of a sync or an abort), `lost_tokens` (of groups that were dropped),
    `sample_s` (seconds of samples between begin and reward, added when they end), and `num_samples` that ended so.
    """

    def __init__(self, scenario: Scenario, draws: Draws, events: EventQueue, group_done: Callable):
        self._work, self._pause_mode, self._draws = scenario.work, scenario.rules.pause_mode, draws
        self._events, self._group_done = events, group_done
        self.engines = [SimulatedEngine(scenario.engines) for _ in range(scenario.engines.num_engines)]
        self._loads = [(0, index) for index in range(len(self.engines))]  # a heap; entries that are not true are void
        self._changed: set[int] = set()  # engines whose next end may be another
        self._held: list[_Request] = []  # what would be sent while nothing is served
        self.is_open, self.version = True, 0
        self.num_busy = 0  # engines that have something to do
        self._was_busy = [False] * len(self.engines)
        self.decoded_tokens = self.again_tokens = self.lost_tokens = self.sample_s = 0.0
        self.num_samples = 0

    def begin(self, prompt: int, draw_as: int) -> SimulatedGroup:
        """Send all samples of a prompt; what chance decides is that of prompt `draw_as`."""
        group = SimulatedGroup(prompt, self.version, self._draws[draw_as])
        for index in range(group.num_left):
            self._send(_Request(group, index, self._work.prompt_tokens, self._events.now))
        return group

    def close(self, *, keep: bool) -> None:
        """Serve nothing until `open`; keep: what runs stays in its engine, else it is taken out and sent again then."""
        self.is_open = False
        for index, engine in enumerate(self.engines):
            if not keep:
                self._take_out(engine)
            engine.pause(self._events.now)
            self._changed.add(index)

    def open(self, version: int) -> None:
        """Serve again, with weights of this version."""
        is_new, self.version, self.is_open = version != self.version, version, True
        if is_new and self._pause_mode == ABORT:
            for engine in self.engines:
                self._take_out(engine)
        for index, engine in enumerate(self.engines):
            again = self._contexts(engine) if is_new and self._pause_mode == RETRACT else 0.0
            self.again_tokens += again
            engine.resume(self._events.now, again_tokens=again)
            self._changed.add(index)
        self._loads = [(engine.num_requests, index) for index, engine in enumerate(self.engines)]
        heapq.heapify(self._loads)
        held, self._held = self._held, []
        for request in held:
            if not request.group.is_gone:
                self._send(request)

    def drop(self, group: SimulatedGroup) -> None:
        """Throw a group away; what still runs of it is taken out by the `close` that follows, or is ignored."""
        group.is_gone = True
        self.lost_tokens += group.tokens

    def slow(self, slowness: float) -> None:
        """Engines take that many times as long from now on."""
        for index, engine in enumerate(self.engines):
            engine.slow(self._events.now, slowness)
            self._changed.add(index)

    def advance(self) -> None:
        """Bring every engine's counts to now."""
        for engine in self.engines:
            engine.advance(self._events.now)

    def plan_ends(self) -> None:
        """After an event: when each engine that changed ends its next request."""
        for index in self._changed:
            engine = self.engines[index]
            self.num_busy += engine.is_busy - self._was_busy[index]
            self._was_busy[index] = engine.is_busy
            if engine.is_busy:
                self._events.at(engine.next_end(), self._ended, index, engine.stamp)
        self._changed.clear()

    def _send(self, request: _Request) -> None:
        if not self.is_open:
            self._held.append(request)
            return
        index = request.engine if request.engine >= 0 else self._least_loaded()
        request.engine, engine = index, self.engines[index]
        # Its context is computed where it is not cached: at its first turn, after it was taken out, after new weights.
        is_cached = request.cached == self.version or (request.cached >= 0 and self._pause_mode == KEEP)
        prefill = self._work.observation_tokens if is_cached else request.context
        if request.cached != _NEVER and not is_cached:
            self.again_tokens += request.context
        request.cached = self.version
        engine.submit(self._events.now, request.lacks, prefill, request)
        heapq.heappush(self._loads, (engine.num_requests, index))
        self._changed.add(index)

    def _least_loaded(self) -> int:
        while True:
            load, index = self._loads[0]
            if load == self.engines[index].num_requests:
                return index
            heapq.heappop(self._loads)

    def _ended(self, index: int, stamp: int) -> None:
        engine = self.engines[index]
        if stamp != engine.stamp:
            return
        for request in engine.ended(self._events.now):
            self._turn_ended(request)
        heapq.heappush(self._loads, (engine.num_requests, index))
        self._changed.add(index)

    def _turn_ended(self, request: _Request) -> None:
        group, draw = request.group, request.group.draw
        self.decoded_tokens += request.lacks
        if group.is_gone:
            self.lost_tokens += request.lacks
            return
        group.tokens += request.lacks
        request.context += request.lacks
        request.turn += 1
        if request.turn < draw.turns[request.index]:
            request.context += self._work.observation_tokens
            request.lacks = request.turn_tokens
            self._after(draw.environment_s[request.index][request.turn - 1], self._next_turn, request)
        else:
            self._after(draw.reward_s[request.index], self._scored, request)

    def _after(self, seconds: float, act: Callable, request: _Request) -> None:
        if seconds > 0:
            self._events.at(self._events.now + seconds, act, request)
        else:
            act(request)

    def _next_turn(self, request: _Request) -> None:
        if not request.group.is_gone:
            self._send(request)

    def _scored(self, request: _Request) -> None:
        group = request.group
        if group.is_gone:
            return
        self.sample_s += self._events.now - request.begun_s
        self.num_samples += 1
        group.num_left -= 1
        if group.num_left == 0:
            self._group_done(group)

    def _take_out(self, engine: SimulatedEngine) -> None:
        """Everything leaves the engine with the tokens that it has; it is sent again, to any engine, when it may be."""
        for request, lacks, has_run in engine.take_all(self._events.now):
            done = request.lacks - lacks
            self.decoded_tokens += done
            request.group.tokens += done
            if request.group.is_gone:
                self.lost_tokens += done
                continue
            request.context += done
            request.lacks, request.engine = lacks, -1
            request.cached = _LOST if has_run or request.turn else _NEVER
            self._held.append(request)

    def _contexts(self, engine: SimulatedEngine) -> float:
        """Tokens whose KV is computed anew if its requests go on with new weights."""
        total = 0.0
        for request, lacks in engine.progress(self._events.now):
            request.cached = self.version
            total += request.context + request.lacks - lacks
        return total
