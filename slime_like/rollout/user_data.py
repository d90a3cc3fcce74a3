"""Prompts by a class of the user's own (--data-source-path): docs/hooks.md has its protocol."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from slime_like.config.data import DataConfig
from slime_like.errors import CheckpointError, DataError, PluginError
from slime_like.records import Prompt, SampleGroup
from slime_like.rollout.data_source import DataSource
from slime_like.rollout.row_files import FileRow
from slime_like.rollout.rows import RowMaker
from slime_like.utils.user_functions import Hook

_FLAG = "--data-source-path"


class UserDataSource(DataSource):
    """A stream of prompts from `row_at(position)` of the user's object, whose rows are as the lines of a file.

    The object may have num_rows, observe(groups), and state_dict() with load_state_dict(state), which go into
    checkpoints. A row is asked for again when its prompt is drawn again: it must be the same while the object's state
    is.
    """

    def __init__(
        self, user: Any, data: DataConfig, tokenizer, *, max_prompt_tokens: int, max_tokens: int, supervised: bool
    ):
        super().__init__([], data, path=f"{_FLAG} {data.data_source_path}", tokenizer=tokenizer, max_tokens=max_tokens)
        self._user = user
        self._maker = RowMaker(
            data, tokenizer, max_prompt_tokens=max_prompt_tokens, max_tokens=max_tokens, supervised=supervised
        )

    @classmethod
    def load(cls, data: DataConfig, args: Any, tokenizer, **limits: Any) -> UserDataSource:
        """Make the user's object. Raises PluginError if it is no data source, RunError if making it fails."""
        path = str(data.data_source_path)
        make = Hook.load(path, 2, _FLAG)
        assert make is not None, "the caller has a path"
        user = make(args, tokenizer)
        if not callable(getattr(user, "row_at", None)):
            raise PluginError(f"{_FLAG} {path}: gave a {type(user).__name__} without row_at(position).")
        if callable(getattr(user, "state_dict", None)) != callable(getattr(user, "load_state_dict", None)):
            raise PluginError(f"{_FLAG} {path}: has one of state_dict and load_state_dict. Fix: both, or neither.")
        return cls(user, data, tokenizer, **limits)

    @property
    def num_rows(self) -> int | None:
        """The object's num_rows; None for a source without end."""
        count = getattr(self._user, "num_rows", None)
        if count is not None and (not isinstance(count, int) or count < 1):
            raise DataError(f"{self.path}: num_rows is {count!r}; it must be a number from 1 on, or None.")
        return count

    def row_at(self, position: int) -> int:
        """Rows of the object are known by their position."""
        return position

    def prompt_at(self, position: int) -> Prompt:
        """The object's row at a position, rendered. Raises DataError naming the position."""
        where = f"{self.path}, row {position}"
        record = self._call("row_at", position)
        if not isinstance(record, dict):
            raise DataError(f"{where}: is a {type(record).__name__}, not a dict as a line of --prompt-data has it.")
        (row,) = self._maker.rows([FileRow(position, record, where)])
        if row is None:
            what = "has no message to train, or its prompt" if self._maker.supervised else "its prompt"
            raise DataError(
                f"{where}: {what} has more than {self._maker.max_prompt_tokens} tokens. Fix: leave such rows out; or"
                " --rollout-max-prompt-len, --rollout-max-context-len."
            )
        return row.as_prompt(position)

    def observe(self, groups: Sequence[SampleGroup]) -> None:
        """The object hears what became of its rows in a rollout, if it listens."""
        if hasattr(self._user, "observe"):
            self._call("observe", list(groups))

    def state_dict(self) -> dict:
        """The object's own state."""
        state = self._call("state_dict") if hasattr(self._user, "state_dict") else None
        try:
            json.dumps(state, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise DataError(f"{self.path}: its state_dict is no JSON: {error}.") from error
        return {"data_source": self.data.data_source_path, "data_source_state": state}

    def load_state_dict(self, state: dict) -> None:
        """Give the object its state back. Raises CheckpointError if it was another's."""
        if state.get("data_source") != self.data.data_source_path:
            before = state.get("data_source") or "--prompt-data"
            raise CheckpointError(
                f"the data position cannot be resumed: data came from {before} and comes from {self.path}. Fix: the"
                " same data flags, or --finetune."
            )
        if hasattr(self._user, "load_state_dict"):
            self._call("load_state_dict", state.get("data_source_state"))

    def _call(self, method: str, *arguments: Any) -> Any:
        return Hook(getattr(self._user, method), _FLAG, f"{self.data.data_source_path}.{method}")(*arguments)
