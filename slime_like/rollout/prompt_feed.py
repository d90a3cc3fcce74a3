"""Prompts as a run uses them up: the rows of a data source, and the ledger that knows which of them were drawn."""

from __future__ import annotations

from pathlib import Path

from slime_like.records import Prompt
from slime_like.rollout.data_source import DataSource
from slime_like.rollout.drop_log import DropLog
from slime_like.rollout.ledger import IN_FLIGHT, READY, TAKEN, Ledger


class PromptFeed:
    """Draws from `source`, as `ledger` says what is next. One object for everyone who draws.

    dropped_path: where prompts that are dropped are named (DropLog).
    """

    def __init__(self, source: DataSource, dropped_path: Path | None = None):
        self.source = source
        self._drop_log = DropLog(dropped_path)
        self.ledger = Ledger(on_drop=self._drop_log)

    def draw(self, count: int) -> list[Prompt]:
        """The next `count` prompts; the stream goes on into the next epoch."""
        return [self.source.prompt_at(position) for position in self.ledger.draw(count)]

    def take_answered(self, count: int) -> list[Prompt]:
        """The next `count` prompts, for who trains on the answers that stand in the file: nothing is generated for
        them.
        """
        prompts = self.draw(count)
        for prompt in prompts:
            for state in (IN_FLIGHT, READY, TAKEN):
                self.ledger.move(prompt.index, state)
        return prompts

    @property
    def epoch(self) -> float | None:
        """Passes over the data so far, with their fraction; None for data without end."""
        return self.ledger.position / self.source.num_rows if self.source.num_rows else None

    def state_dict(self) -> dict:
        """What resuming needs, as JSON: the ledger, and which rows in which order it counts."""
        return self.ledger.state_dict() | self.source.state_dict()

    def load_state_dict(self, state: dict) -> None:
        """Go on where the state was saved.

        Raises CheckpointError if the rows or their order are not the same any more.
        """
        self.source.load_state_dict(state)
        self.ledger.load_state_dict(state)
        self._drop_log.resumed(self.ledger.dropped, self.ledger.position)
