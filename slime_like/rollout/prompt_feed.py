"""Prompts as a run uses them up: the rows of a data source, and the ledger that knows which of them were drawn."""

from __future__ import annotations

import logging
from pathlib import Path

from slime_like.errors import RewardError
from slime_like.records import Prompt
from slime_like.rollout.data_source import DataSource
from slime_like.rollout.drop_log import DropLog
from slime_like.rollout.ledger import IN_FLIGHT, READY, TAKEN, Ledger
from slime_like.rollout.put_aside import PUT_ASIDE, PutAside

logger = logging.getLogger(__name__)


class PromptFeed:
    """Draws from `source`, as `ledger` says what is next. One object for everyone who draws.

    dropped_path: where prompts that are dropped are named (DropLog). put_aside: of rows that fail again and again, with
    --on-reward-error drop.
    """

    def __init__(self, source: DataSource, dropped_path: Path | None = None, put_aside: PutAside | None = None):
        self.source = source
        self._put_aside = put_aside
        self._drop_log = DropLog(dropped_path)
        self.ledger = Ledger(on_drop=self._drop_log)

    def draw(self, count: int) -> list[Prompt]:
        """The next `count` prompts; the stream goes on into the next epoch, without the rows that were put aside.

        Raises RewardError if all rows were.
        """
        if self._put_aside is None or not self._put_aside.rows:
            return [self.source.prompt_at(position) for position in self.ledger.draw(count)]
        if self.source.num_rows is not None and len(self._put_aside.rows) >= self.source.num_rows:
            raise RewardError(f"no prompt is left. {self._put_aside.summary()}")
        prompts: list[Prompt] = []
        while len(prompts) < count:
            for position in self.ledger.draw(count - len(prompts)):
                if self.is_put_aside(position):
                    self.ledger.drop(position, PUT_ASIDE)
                else:
                    prompts.append(self.source.prompt_at(position))
        return prompts

    def keeps_asking(self, position: int, error: str | None) -> bool:
        """Whether a prompt whose group ended with this error of the user's own part is to be asked again.

        Raises RewardError if too many have one.
        """
        if self._put_aside is None:
            return False
        row = self.source.row_at(position)
        if self._put_aside.ended(row, error):
            self._drop_log.put_aside(row, self._put_aside.rows[row])
        return error is not None and row not in self._put_aside.rows

    def is_put_aside(self, position: int) -> bool:
        """Whether the row that stands there failed too often."""
        return self._put_aside is not None and self.source.row_at(position) in self._put_aside.rows

    @property
    def put_aside_rows(self) -> int:
        """How many rows were put aside."""
        return len(self._put_aside.rows) if self._put_aside else 0

    def log_put_aside(self) -> None:
        """Say at the end which rows were put aside, if any."""
        if self._put_aside is not None and (summary := self._put_aside.summary()):
            logger.warning("%s", summary)

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
        aside = {"put_aside": self._put_aside.state_dict()} if self._put_aside else {}
        return self.ledger.state_dict() | self.source.state_dict() | aside

    def load_state_dict(self, state: dict) -> None:
        """Go on where the state was saved.

        Raises CheckpointError if the rows or their order are not the same any more.
        """
        self.source.load_state_dict(state)
        self.ledger.load_state_dict(state)
        if self._put_aside is not None:
            self._put_aside.load_state_dict(state.get("put_aside", {}))
        rows = self._put_aside.rows if self._put_aside is not None else ()
        self._drop_log.resumed(self.ledger.dropped, self.ledger.position, rows)
