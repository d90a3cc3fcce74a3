"""What a run does about engines that die while it generates or syncs: out of the router at once, another in the same
place, and back with the weights of the fleet, proven, as any that joins. And about a router that ends: another at the
same address, with the same engines.
"""

from __future__ import annotations

import dataclasses
import logging
import time

from slime_like.cluster.engine_fleet import EngineFleet
from slime_like.cluster.engine_guests import EngineGuests
from slime_like.cluster.fleet_router import ended_for_good
from slime_like.cluster.members import MemberState
from slime_like.config.engine import EngineConfig
from slime_like.errors import EngineError, RunError, WaitTimeout
from slime_like.utils.net import wait_until
from slime_like.weight_sync.session import Publishes

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Tended:
    """What has changed. notes: a line each, for the console. enough: whether --min-engines serve, by way of a router
    that runs. num_coming: engines that start, and the router if it does; num_waiting: engines that are up, and wait for
    weights.
    """

    serving_changed: bool = False
    enough: bool = True
    num_coming: int = 0
    num_waiting: int = 0
    notes: tuple[str, ...] = ()


def take_place(fleet: EngineFleet, index: int, timeout_s: float) -> int:
    """Put an engine in the place of a dead one of a fleet that was never sent weights; its number once it serves.

    Raises what ended its start, or WaitTimeout.
    """
    successor = fleet.begin_replacement(index)
    wait_until(
        lambda: None if fleet.started(successor) else "it does not answer",
        deadline_s=timeout_s,
        who="the server",
        whom=f"engine {successor}, in the place of engine {index}",
        phase="start",
    )
    fleet.bring_up(successor, None)
    return successor


class EngineCare:
    """Asked about once a second while engines generate; a dead engine has one successor at a time. With
    --max-engine-restarts 0 it raises what a dead engine has died of.
    """

    def __init__(self, fleet: EngineFleet, config: EngineConfig, guests: EngineGuests | None = None):
        """guests: engines that join and leave by a file; None: none do."""
        self._guests = guests
        self._fleet, self._min, self._replaces = fleet, config.min_engines, config.max_engine_restarts > 0
        self._router_failure: RunError | None = None  # requests wait until another runs
        self._restarts_left, self._deadline_s = config.max_engine_restarts, config.engine_start_timeout_s
        self._coming: dict[int, tuple[int, float]] = {}  # member that starts -> (the dead one, when it was begun)
        self._given_up: set[int] = set()  # dead members that have no successor
        self._joining: set[int] = set()  # members that answer, and wait for weights

    def tend(self, trainer: Publishes | None) -> Tended:
        """Notice the dead, begin their successors, and take in those that are up.

        trainer: holds what the fleet does, and may send it now; None: a successor waits for the next sync. Raises
        EngineError for a dead engine that nobody may replace, if fewer than --min-engines
        are left.
        """
        self._fleet.note_deaths()
        router_notes = self._tend_router()
        dead = [one for one in self._fleet.membership.in_state(MemberState.DEAD) if one.index not in self._given_up]
        notes = router_notes + [self._after(member.index, EngineError(member.why)) for member in dead]
        serving_changed = bool(notes)
        for index in list(self._coming):
            notes += self._look_at(index)
        if self._guests is not None:
            guests = self._guests.look()
            notes += guests.notes
            self._joining.update(guests.joined)
            serving_changed = serving_changed or guests.serving_changed
        starting = {member.index for member in self._fleet.membership.in_state(MemberState.STARTING)}
        self._joining &= starting  # a sync takes them in, too
        if trainer is not None or self._fleet.membership.present is None:
            for index in sorted(self._joining):
                self._joining.discard(index)
                notes.append(self._bring_up(index, trainer))
                serving_changed = True
        router_comes = self._router_failure is not None
        enough = self._fleet.num_members >= self._min and not router_comes
        return Tended(serving_changed, enough, len(self._coming) + router_comes, len(self._joining), tuple(notes))

    def _bring_up(self, index: int, trainer: Publishes | None) -> str:
        """One gets its weights and serves; of those that came by the file, a failure ends only its own part."""
        started = time.monotonic()
        try:
            self._fleet.bring_up(index, trainer)
        except RunError as error:
            if self._guests is None or not self._guests.is_guest(index):
                raise
            self._guests.forget(index)
            self._fleet.mark_dead(index, str(error))
            self._fleet.remove(index)
            return f"engine {index} cannot join: {error}"
        return f"engine {index} has its weights after {time.monotonic() - started:.1f} s, and serves"

    def _tend_router(self) -> list[str]:
        """Requests wait from the look that notices its end; the next one starts another, which takes seconds."""
        router, failure = self._fleet.router, self._fleet.router.failure()
        if failure is None:
            waited, self._router_failure = self._router_failure, None
            return [] if waited is None else ["the router runs again"]  # whoever joined has found it dead, too
        if not router.can_restart:
            raise ended_for_good(failure)
        if self._router_failure is None:
            self._router_failure = failure
            logger.error("%s", failure)
            return [f"{failure}\nit is started again at its address; requests wait"]
        try:
            seconds = router.restart()
        except RunError as error:
            logger.error("the router could not be started again: %s", error)
            return [f"the router could not be started again: {error}"]
        self._router_failure = None
        return [f"the router runs again after {seconds:.1f} s, with {self._fleet.num_members} engines"]

    def _after(self, index: int, error: RunError) -> str:
        """One has died."""
        self._joining.discard(index)
        if not self._replaces:
            raise error
        logger.error("engine %d died: %s", index, error)
        left = self._fleet.num_members
        if self._restarts_left < 1:
            if left < self._min and not (self._coming or self._joining):
                raise error
            self._given_up.add(index)
            return f"{error}\nengine {index} is not replaced (--max-engine-restarts is used up); {left} serve"
        self._restarts_left -= 1
        successor = self._fleet.begin_replacement(index)
        self._coming[successor] = (index, time.monotonic())
        return f"{error}\nengine {index} is being replaced by engine {successor}; {left} serve meanwhile"

    def _look_at(self, index: int) -> list[str]:
        """Whether a successor is up."""
        dead, since = self._coming[index]
        try:
            if not self._fleet.started(index):
                if time.monotonic() - since <= self._deadline_s:
                    return []
                raise WaitTimeout(
                    who="train.py",
                    whom=f"engine {index}, in the place of engine {dead}",
                    phase="start",
                    seconds=self._deadline_s,
                    last="it does not answer",
                )
        except RunError as error:
            del self._coming[index]
            self._fleet.mark_dead(index, f"it could not take the place of engine {dead}: {error}")
            return []  # the next look finds it dead
        del self._coming[index]
        self._joining.add(index)
        return [f"engine {index} is up after {time.monotonic() - since:.1f} s, and waits for its weights"]
