"""Which engines a run has, in which state, and which weights each has proven. Pure: engine_fleet.py does what these
states mean.

    starting --admit--> serving --drain--> draining --leave--> (gone)
    serving --set_aside--> evaluating --take_back--> starting
    starting --leave--> (gone)      any --die--> dead --leave--> (gone)

An engine is what it has proven: one that starts, or starts again, holds nothing until a sync to it has ended well,
and is admitted only with the weights that the fleet has.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterable, Sequence

from slime_like.errors import EngineError
from slime_like.records import EngineEndpoint, WeightsRef


class MemberState(enum.StrEnum):
    """Where a member is in its life."""

    STARTING = "starting"  # not in the router: it comes up, or waits for its weights
    SERVING = "serving"  # takes requests
    EVALUATING = "evaluating"  # out of the router: keeps its weights, through syncs of others, for one evaluation
    DRAINING = "draining"  # out of the router; what it has begun may end
    DEAD = "dead"  # ended, and why is known


#: Those that somebody sends requests to.
IN_USE = (MemberState.SERVING, MemberState.EVALUATING)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Member:
    """One engine. endpoint: None until it has started.

    proven: whose version it reported, and whose digests it had, at the end of a sync.
    """

    index: int
    state: MemberState = MemberState.STARTING
    endpoint: EngineEndpoint | None = None
    proven: WeightsRef | None = None
    why: str = ""  # of a dead one: its exit status and the end of its log

    @property
    def name(self) -> str:
        """For messages."""
        return f"engine {self.index}" + (f" at {self.endpoint.url}" if self.endpoint is not None else "")


@dataclasses.dataclass(frozen=True)
class Membership:
    """All members of a fleet; every change gives a new one. `present`: the weights of the last sync; None before the
    first.

    next_index: for a new member; none is used twice, so that logs and errors tell two engines apart.
    Example: Membership().start(0).healthy(endpoint).admit(0).serving == (member 0,)
    """

    members: tuple[Member, ...] = ()
    present: WeightsRef | None = None
    next_index: int = 0

    @staticmethod
    def of_serving(endpoints: Iterable[EngineEndpoint]) -> Membership:
        """A fleet whose engines all serve their first weights."""
        members = tuple(Member(index=e.index, state=MemberState.SERVING, endpoint=e) for e in endpoints)
        return Membership(members, next_index=max((member.index for member in members), default=-1) + 1)

    def __getitem__(self, index: int) -> Member:
        for member in self.members:
            if member.index == index:
                return member
        raise EngineError(
            f"there is no engine {index}. The fleet has {', '.join(str(m.index) for m in self.members) or 'none'}."
        )

    def in_state(self, *states: MemberState) -> tuple[Member, ...]:
        """Those members, by their index."""
        return tuple(
            sorted((member for member in self.members if member.state in states), key=lambda member: member.index)
        )

    @property
    def serving(self) -> tuple[Member, ...]:
        """Members that take requests."""
        return self.in_state(MemberState.SERVING)

    @property
    def endpoints(self) -> tuple[EngineEndpoint, ...]:
        """Of the serving members."""
        return tuple(member.endpoint for member in self.serving if member.endpoint is not None)

    # ------------------------------------------------------------------ changes

    def start(self, index: int) -> Membership:
        """A new member, which is starting."""
        if any(member.index == index for member in self.members):
            raise EngineError(f"engine {index} is in the fleet already: {self[index].state}.")
        return dataclasses.replace(
            self, members=(*self.members, Member(index=index)), next_index=max(self.next_index, index + 1)
        )

    def healthy(self, endpoint: EngineEndpoint) -> Membership:
        """A starting member answers at this endpoint, where no other lives. It holds nothing that is proven."""
        others = [
            member for member in self.members if member.index != endpoint.index and member.state is not MemberState.DEAD
        ]
        same = [member for member in others if member.endpoint is not None and member.endpoint.url == endpoint.url]
        if same:
            raise EngineError(
                f"engine {endpoint.index} cannot join at {endpoint.url}: engine {same[0].index} is {same[0].state}"
                " there."
            )
        return self._with(
            self._in(endpoint.index, "become healthy", MemberState.STARTING), endpoint=endpoint, proven=None
        )

    def prove(self, indices: Iterable[int], weights: WeightsRef) -> Membership:
        """A sync of these weights to these members has ended well.

        They become the fleet's when no serving member is left out.
        """
        proven = set(indices)
        changed = self
        for index in proven:
            member = changed._in(index, f"prove {weights}", MemberState.STARTING, MemberState.SERVING)
            changed = changed._with(member, proven=weights)
        if proven >= {member.index for member in self.serving} and proven:
            changed = dataclasses.replace(changed, present=weights)
        return changed

    def admit(self, index: int) -> Membership:
        """A starting member takes requests from now on.

        Raises EngineError if it does not answer yet or holds other weights than the fleet.
        """
        member = self._in(index, "serve", MemberState.STARTING)
        if member.endpoint is None:
            raise EngineError(f"{member.name} cannot serve: it has not started.")
        if self.present is not None and member.proven != self.present:
            held = "nothing" if member.proven is None else str(member.proven)
            raise EngineError(f"{member.name} cannot serve: it has proven {held}, the fleet holds {self.present}.")
        return self._with(member, state=MemberState.SERVING)

    def drain(self, index: int) -> Membership:
        """A serving member takes no more requests."""
        return self._with(self._in(index, "drain", MemberState.SERVING), state=MemberState.DRAINING)

    def set_aside(self, indices: Sequence[int]) -> Membership:
        """Serving members take requests of an evaluation only, and keep the fleet's weights for it.

        Raises EngineError if no other would be left to serve.
        """
        if not 0 < len(indices) < len(self.serving):
            raise EngineError(
                f"{len(indices)} engines cannot be set aside for an evaluation: {len(self.serving)} serve, and at least"
                " one must go on. Fix: a smaller --eval-num-engines."
            )
        changed = self
        for index in indices:
            changed = changed._with(changed._in(index, "evaluate", MemberState.SERVING), state=MemberState.EVALUATING)
        return changed

    def take_back(self, index: int) -> Membership:
        """Its evaluation is over; it is admitted when it holds what the fleet does by then."""
        return self._with(self._in(index, "be taken back", MemberState.EVALUATING), state=MemberState.STARTING)

    def die(self, index: int, why: str) -> Membership:
        """A member has ended: what it held is gone. The first reason stays."""
        member = self[index]
        if member.state is MemberState.DEAD:
            return self
        return self._with(member, state=MemberState.DEAD, proven=None, why=why)

    def leave(self, index: int) -> Membership:
        """A member that serves nobody is forgotten."""
        member = self._in(index, "leave", MemberState.STARTING, MemberState.DRAINING, MemberState.DEAD)
        return dataclasses.replace(self, members=tuple(other for other in self.members if other is not member))

    def _in(self, index: int, what: str, *states: MemberState) -> Member:
        member = self[index]
        if member.state not in states:
            allowed = " or ".join(states)
            raise EngineError(
                f"{member.name} is {member.state}; only one that is {allowed} can {what}."
                + (f" {member.why}" if member.why else "")
            )
        return member

    def _with(self, member: Member, **changes) -> Membership:
        changed = dataclasses.replace(member, **changes)
        members: Sequence[Member] = [changed if other is member else other for other in self.members]
        return dataclasses.replace(self, members=tuple(members))
