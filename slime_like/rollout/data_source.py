"""Prompts from a file, in an order that is the same on every run and can be resumed at any row."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from slime_like.config.data import DataConfig, split_slice
from slime_like.config.evaluation import EvalSet
from slime_like.config.run import RunConfig
from slime_like.errors import CheckpointError, DataError
from slime_like.records import Prompt, SampleGroup
from slime_like.rollout.agents.sources import generated_rows
from slime_like.rollout.row_files import FileRow, read_rows, row_name
from slime_like.rollout.rows import RM_TYPE, Row, RowMaker

#: SGLang (0.5.23) refuses a prompt that leaves less of its context length than this.
ENGINE_RESERVED_TOKENS = 7


class DataSource:
    """The endless stream of prompts: position p is row p % num_rows of epoch p // num_rows.

    num_filtered: rows left out because their prompt is too long. num_cut: supervised rows whose end is. max_tokens: of
    prompt and answer together. Which prompts were drawn is for a ledger to know.
    """

    def __init__(
        self,
        rows: list[Row],
        data: DataConfig,
        *,
        path: str,
        tokenizer,
        max_tokens: int,
        num_filtered: int = 0,
        num_cut: int = 0,
    ):
        self.rows = rows
        self.max_tokens = max_tokens
        self.data = data
        self.path = path
        self.tokenizer = tokenizer
        self.num_filtered, self.num_cut = num_filtered, num_cut
        self._orders: dict[int, np.ndarray] = {}  # epoch -> its order; of two, since prompts of both may be open

    def prompt_at(self, position: int) -> Prompt:
        """The prompt at a position of the stream."""
        return self.rows[self.row_at(position)].as_prompt(position)

    def row_at(self, position: int) -> int:
        """Number of the row in the file's order, from 0, that stands at a position of the stream."""
        epoch, offset = divmod(position, len(self.rows))
        return int(self._epoch_order(epoch)[offset])

    def num_rollouts(self, rollout_batch_size: int) -> int:
        """Rollout steps of the whole run, from --num-rollout or --num-epoch."""
        if self.data.num_rollout is not None:
            return self.data.num_rollout
        return (self.data.num_epoch or 0) * (self.num_rows or 0) // rollout_batch_size

    @property
    def num_rows(self) -> int | None:
        """Prompts of one epoch; None for a source without end."""
        return len(self.rows)

    def observe(self, groups: Sequence[SampleGroup]) -> None:
        """What became of the prompts of a rollout: nothing to learn from for rows of a file."""

    def state_dict(self) -> dict:
        """What resuming needs beside the position, as JSON."""
        return self.identity()

    def load_state_dict(self, state: dict) -> None:
        """Go on where the state was saved. Raises CheckpointError if the data is not the same any more."""
        self.check_identity(state)

    def identity(self) -> dict:
        """What makes a position in this stream mean the same prompt, as JSON."""
        return {"num_rows": len(self.rows), "shuffle": self.data.rollout_shuffle, "seed": self.data.rollout_seed}

    def check_identity(self, state: dict) -> None:
        """Raises CheckpointError if the rows or their order are not those of a saved `identity` any more."""
        for name, now in self.identity().items():
            if state.get(name) != now:
                change = f"{name} was {state.get(name)} and is {now}"
                raise CheckpointError(
                    f"the data position in {self.path} cannot be resumed: {change}. Fix: the same data flags, or"
                    " --finetune."
                )

    def _epoch_order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            count = len(self.rows)
            # A pair, not a sum: seed 42 in epoch 1 must not repeat seed 43 in epoch 0.
            shuffled = (
                np.random.default_rng([self.data.rollout_seed, epoch]).permutation(count)
                if self.data.rollout_shuffle
                else np.arange(count)
            )
            self._orders = dict([*self._orders.items(), (epoch, shuffled)][-2:])
        return self._orders[epoch]


def load_eval_data(config: RunConfig, tokenizer) -> dict[str, DataSource]:
    """Name -> prompts of each evaluation set, in file order. Raises DataError naming file, line and key."""
    return {name: _eval_source(config, one, tokenizer) for name, one in config.eval.sets().items()}


def _eval_source(config: RunConfig, one: EvalSet, tokenizer) -> DataSource:
    """One set, with the keys that it, or the --eval-* flags, or the training's say."""
    keys = {
        name: config.eval.setting(one.name, name) or getattr(config.data, name)
        for name in ("input_key", "label_key", "tool_key", "metadata_key")
    }
    data = dataclasses.replace(config.data, **keys, rollout_shuffle=False)
    context = min(
        config.eval.setting(one.name, "max_context_len") or context_tokens(config), config.model.context_tokens
    )
    limit = min(config.eval.setting(one.name, "max_prompt_len") or context, context - ENGINE_RESERVED_TOKENS)
    source = load_data(one.path, data, tokenizer, max_prompt_tokens=limit, max_tokens=context)
    own = {"rm_type": one.rm_type} if one.rm_type else {}
    if own or one.metadata_overrides:
        source.rows = [
            dataclasses.replace(row, metadata=own | row.metadata | one.metadata_overrides) for row in source.rows
        ]
    return source


def context_tokens(config: RunConfig) -> int:
    """Most tokens of prompt and response together."""
    return min(config.rollout.rollout_max_context_len or config.model.context_tokens, config.model.context_tokens)


def load_data(
    path: str, data: DataConfig, tokenizer, *, max_prompt_tokens: int, max_tokens: int, supervised: bool = False
) -> DataSource:
    """Read, render and tokenize `file.jsonl@[a:b]` or `file.parquet@[a:b]`. Raises DataError naming file, line and
    key.
    """
    file, rows_wanted = split_slice(path)
    generated = generated_rows(file, data)
    if generated is None:
        needed = {data.input_key: "--input-key"} | ({data.label_key: "--label-key"} if data.label_key else {})
        optional = [data.metadata_key, data.tool_key, RM_TYPE] + ([data.response_key] if supervised else [])
        records = read_rows(file, rows_wanted, needed, optional)
    else:
        records = (FileRow(number, row, row_name(file, number)) for number, row in generated[rows_wanted])
    maker = RowMaker(data, tokenizer, max_prompt_tokens=max_prompt_tokens, max_tokens=max_tokens, supervised=supervised)
    rows, num_filtered = [], 0
    for row in maker.rows(records):
        if row is None:
            num_filtered += 1
        else:
            rows.append(row)
    if not rows:
        fix = "Fix: --rollout-max-prompt-len, --rollout-max-context-len."
        what = " have no message to train, or" if supervised else ""
        raise DataError(f"{path}: all {num_filtered} prompts{what} are longer than {max_prompt_tokens} tokens. {fix}")
    return DataSource(
        rows,
        data,
        path=path,
        tokenizer=tokenizer,
        max_tokens=max_tokens,
        num_filtered=num_filtered,
        num_cut=maker.num_cut,
    )
