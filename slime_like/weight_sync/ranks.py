"""The trainer's ranks in a weight sync: who gathers, who sends, who leads, and how a failure of one becomes known to
all.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from slime_like.errors import SlimeLikeError, WeightSyncError
from slime_like.weight_sync.together import run_together

#: What the lead tells the others while it is busy, so that no collective of theirs waits longer than a moment.
_BUSY = "busy"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RankPlace:
    """Where a rank stands: for which source it gathers, and its number among those that could.

    There is a source for each pipeline stage, or one for each rank (session.PublishOrder.cards). The first
    `num_gatherers` of a source's ranks gather what it sends.
    """

    source: int
    num_sources: int
    rank_in_source: int
    num_gatherers: int

    @property
    def gathers(self) -> bool:
        """Whether this rank takes part in gathering its source's weights."""
        return self.rank_in_source < self.num_gatherers

    @property
    def is_source(self) -> bool:
        """Whether it sends what was gathered."""
        return self.rank_in_source == 0

    @property
    def is_lead(self) -> bool:
        """Whether it steers the engines for all sources: the first of them."""
        return self.is_source and self.source == 0


class RankGroup:
    """All ranks of the trainer, over torch's default process group.

    Each method is collective, and raises on every rank if one fails.
    """

    def __init__(self, place: RankPlace, transport: str):
        self.place, self._transport = place, transport
        self._lead: int | None = None

    def on_gatherers(self, what: str, act: Callable[[], Any], *, in_turn: bool = False) -> list:
        """Run `act` on the gathering ranks of all sources at the same time, or of one source after another; what it
        gave on all ranks, without Nones.

        No rank returns before all have done it.
        """
        error: BaseException | None = None
        result, mine = None, self.place.source
        for source in range(self.place.num_sources) if in_turn else (mine,):
            if self.place.gathers and mine == source:
                try:
                    result = act()
                except Exception as raised:  # noqa: BLE001 - raised below, once every rank was told
                    error = raised
            if in_turn:
                torch.distributed.barrier()
        outcomes: list = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(outcomes, (result, _portable(error)))
        self._raise(what, error, {rank: failure for rank, (_, failure) in enumerate(outcomes) if failure is not None})
        return [outcome for outcome, _ in outcomes if outcome is not None]

    def on_lead(self, what: str, act: Callable[[], None], *, longest_s: float) -> None:
        """Run `act` on the lead.

        Others hear each second that it is busy: a step may last longer than the group's deadline for a collective.
        """
        lead = self._lead_rank()
        error: BaseException | None = None
        word: Any = None
        if self.place.is_lead:
            try:
                run_together(
                    {what: act},
                    timeout_s=longest_s,
                    who="trainer source 0",
                    phase=what,
                    watch=lambda: self._tell(_BUSY),
                )
            except Exception as raised:  # noqa: BLE001 - raised below, once every rank was told
                error = raised
            word = self._tell(_portable(error))
        else:
            while (word := self._tell(None)) == _BUSY:
                pass
        self._raise(what, error, {} if word is None else {lead: word})

    def _tell(self, what: Any) -> Any:
        """The lead's word, on every rank."""
        shared = [what]
        torch.distributed.broadcast_object_list(shared, src=self._lead_rank())
        return shared[0]

    def _lead_rank(self) -> int:
        if self._lead is None:
            leads: list = [None] * torch.distributed.get_world_size()
            torch.distributed.all_gather_object(leads, self.place.is_lead)
            self._lead = leads.index(True)
        return self._lead

    def _raise(self, what: str, error: BaseException | None, failures: dict[int, Any]) -> None:
        """Our own error; of others' the one that says most: where only one failed, what it raised itself."""
        if error is not None:
            raise error
        if not failures:
            return
        first = next(iter(failures.values()))
        if len(failures) == 1 and isinstance(first, SlimeLikeError):
            raise first
        text = "; ".join(f"trainer rank {rank}: {_said(failure)}" for rank, failure in failures.items())
        raise WeightSyncError(f"weight sync ({self._transport}, {what}) failed on {text}")


def _portable(error: BaseException | None) -> SlimeLikeError | str | None:
    """An error as other ranks can be told: ours survive pickling, of others their text."""
    if error is None or isinstance(error, SlimeLikeError):
        return error
    return _said(error)


def _said(failure: BaseException | str) -> str:
    return failure if isinstance(failure, str) else f"{type(failure).__name__}: {failure}"
