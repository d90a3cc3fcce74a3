"""Prompts from a JSONL file, in an order that is the same on every run and can be resumed at any row."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from slime_like.config.data import DataConfig, split_slice
from slime_like.config.run import RunConfig
from slime_like.errors import CheckpointError, DataError
from slime_like.records import Prompt, SampleGroup
from slime_like.rollout.agents.sources import generated_rows
from slime_like.rollout.tokenizer import encode, end_of_turn_id

#: SGLang (0.5.23) refuses a prompt that leaves less of its context length than this.
ENGINE_RESERVED_TOKENS = 7


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One usable row of the file, rendered and tokenized."""

    line: int  # in the file, from 1
    text: str
    tokens: np.ndarray  # [P] int32
    label: Any
    metadata: dict
    response: str | None = None
    messages: list[dict] | None = None  # before the chat template

    def as_prompt(self, position: int) -> Prompt:
        """The row at a position of the stream."""
        fields = {name: getattr(self, name) for name in ("text", "tokens", "label", "metadata", "response", "messages")}
        return Prompt(index=position, **fields)


class DataSource:
    """The endless stream of prompts: position p is row p % num_rows of epoch p // num_rows.

    num_filtered: rows left out because their prompt is too long. max_tokens: of prompt and answer together. Which
    prompts were drawn is for a ledger to know.
    """

    def __init__(
        self, rows: list[Row], data: DataConfig, *, path: str, tokenizer, max_tokens: int, num_filtered: int = 0
    ):
        self.rows = rows
        self.max_tokens = max_tokens
        self.data = data
        self.path = path
        self.tokenizer = tokenizer
        self.num_filtered = num_filtered
        self._order: tuple[int, np.ndarray] | None = None  # of one epoch

    def prompt_at(self, position: int) -> Prompt:
        """The prompt at a position of the stream."""
        epoch, offset = divmod(position, len(self.rows))
        return self.rows[self._epoch_order(epoch)[offset]].as_prompt(position)

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

    @functools.cached_property
    def end_id(self) -> int:
        """The token that ends an answer. Raises DataError if the tokenizer has none."""
        return end_of_turn_id(self.tokenizer, self.data.chat_template_kwargs if self.data.apply_chat_template else None)

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
        if self._order is None or self._order[0] != epoch:
            count = len(self.rows)
            # A pair, not a sum: seed 42 in epoch 1 must not repeat seed 43 in epoch 0.
            shuffled = (
                np.random.default_rng([self.data.rollout_seed, epoch]).permutation(count)
                if self.data.rollout_shuffle
                else np.arange(count)
            )
            self._order = (epoch, shuffled)
        return self._order[1]


def load_eval_data(config: RunConfig, tokenizer) -> dict[str, DataSource]:
    """Name -> prompts of each --eval-prompt-data set, in file order. Raises DataError naming file, line and key."""
    data = dataclasses.replace(
        config.data,
        input_key=config.eval.eval_input_key or config.data.input_key,
        label_key=config.eval.eval_label_key or config.data.label_key,
        tool_key=config.eval.eval_tool_key or config.data.tool_key,
        rollout_shuffle=False,
    )
    context = context_tokens(config)
    limit = context - ENGINE_RESERVED_TOKENS
    return {
        name: load_data(path, data, tokenizer, max_prompt_tokens=limit, max_tokens=context)
        for name, path in config.eval.datasets().items()
    }


def context_tokens(config: RunConfig) -> int:
    """Most tokens of prompt and response together."""
    return min(config.rollout.rollout_max_context_len or config.model.context_tokens, config.model.context_tokens)


def load_data(
    path: str, data: DataConfig, tokenizer, *, max_prompt_tokens: int, max_tokens: int, with_response: bool = False
) -> DataSource:
    """Read, render and tokenize `file.jsonl@[a:b]`. Raises DataError naming file, line and key."""
    file, rows_wanted = split_slice(path)
    generated = generated_rows(file, data)
    records = _read_objects(file, rows_wanted) if generated is None else generated[rows_wanted]
    numbered = [(line, record, f"{file} line {line}") for line, record in records]
    everything = render_rows(numbered, data, tokenizer, with_response=with_response)
    rows = [row for row in everything if len(row.tokens) <= max_prompt_tokens]
    num_filtered = len(everything) - len(rows)
    if not rows:
        fix = "Fix: --rollout-max-prompt-len, --rollout-max-context-len."
        raise DataError(f"{path}: all {num_filtered} prompts are longer than {max_prompt_tokens} tokens. {fix}")
    return DataSource(rows, data, path=path, tokenizer=tokenizer, max_tokens=max_tokens, num_filtered=num_filtered)


def render_rows(
    numbered: Sequence[tuple[int, dict, str]], data: DataConfig, tokenizer, *, with_response: bool = False
) -> list[Row]:
    """Records as rows, rendered and tokenized. numbered: (line, record, what to call it in a DataError)."""
    texts, fields = [], []
    for _, record, where in numbered:
        prompt = _require(record, data.input_key, "--input-key", where)
        messages = _messages(prompt, data, where)
        tools = _tools(record, data, where)
        texts.append(prompt if messages is None else _render(messages, tools, data, tokenizer, where))
        fields.append(_fields(record, data, where, with_response) | {"messages": messages})
        if tools is not None:
            fields[-1]["metadata"] = {"tools": tools} | fields[-1]["metadata"]
    rows = []
    for (line, _, where), text, tokens, extra in zip(numbered, texts, encode(tokenizer, texts), fields, strict=True):
        if not tokens:
            raise DataError(f"{where}: the prompt is empty.")
        rows.append(Row(line=line, text=text, tokens=np.array(tokens, dtype=np.int32), **extra))
    return rows


def _read_objects(file: str, rows_wanted: slice) -> list[tuple[int, dict]]:
    """(line number from 1, object) of the wanted rows; blank lines are no rows."""
    try:
        with open(file, encoding="utf-8-sig") as stream:
            lines = [(number, line) for number, line in enumerate(stream, 1) if line.strip()]
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is no UTF-8 text (byte {error.start}). Fix: give a JSONL file.") from None
    if not lines:
        raise DataError(f"{file} is empty: it has no row.")
    rows = lines[rows_wanted]
    if not rows:
        raise DataError(
            f"{file}: the slice [{rows_wanted.start}:{rows_wanted.stop}] takes none of its {len(lines)} rows."
        )
    return [(number, _parse(line, f"{file} line {number}")) for number, line in rows]


def _parse(line: str, where: str) -> dict:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where} is malformed JSON: {error}. It starts with {line.strip()[:60]!r}.") from None
    if not isinstance(record, dict):
        raise DataError(f"{where} is a JSON {type(record).__name__}, not an object with keys.")
    return record


def _require(record: dict, key: str, flag: str, where: str):
    if key not in record:
        raise DataError(f"{where} has no key {key!r} ({flag}). Its keys: {', '.join(map(repr, record)) or 'none'}.")
    return record[key]


def _fields(record: dict, data: DataConfig, where: str, with_response: bool) -> dict:
    """label, metadata and, for supervised rows, response."""
    metadata = record.get(data.metadata_key)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict):
        raise DataError(
            f"{where}: {data.metadata_key!r} (--metadata-key) is a {type(metadata).__name__}, not an object."
        )
    if record.get("rm_type") is not None:
        metadata = {"rm_type": record["rm_type"]} | metadata
    label = None if data.label_key is None else _require(record, data.label_key, "--label-key", where)
    if not with_response:
        return {"label": label, "metadata": metadata}
    response = _require(record, data.response_key, "--response-key", where)
    if not isinstance(response, str):
        raise DataError(
            f"{where}: {data.response_key!r} (--response-key) is a {type(response).__name__}, not a string."
        )
    return {"label": label, "metadata": metadata, "response": response}


def _messages(prompt, data: DataConfig, where: str) -> list[dict] | None:
    """The prompt as chat messages for --apply-chat-template; None for a string that stays as it is."""
    if not isinstance(prompt, (str, list)):
        raise DataError(
            f"{where}: the prompt {data.input_key!r} is a {type(prompt).__name__}, neither a string nor a list of chat"
            " messages."
        )
    if not data.apply_chat_template:
        if isinstance(prompt, list):
            raise DataError(
                f"{where}: the prompt {data.input_key!r} is a list of chat messages. Fix: add --apply-chat-template."
            )
        return None
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    for message in messages:
        calls_tools = isinstance(message, dict) and message.get("role") == "assistant" and message.get("tool_calls")
        if not isinstance(message, dict) or "role" not in message or not ("content" in message or calls_tools):
            raise DataError(
                f"{where}: a chat message needs 'role' and 'content' (an assistant's 'tool_calls' will do), but is"
                f" {str(message)[:80]!r}."
            )
    if not messages:
        raise DataError(f"{where}: the list of chat messages is empty.")
    return messages


def _tools(record: dict, data: DataConfig, where: str) -> list[dict] | None:
    """The row's tools; None without any.

    Many data sets keep them as JSON text, since their rows must be of one type.
    """
    value = record.get(data.tool_key)
    tools = value
    if isinstance(value, str) and value.strip():
        try:
            tools = json.loads(value)
        except ValueError as error:
            raise DataError(
                f"{where}: {data.tool_key!r} (--tool-key) is malformed JSON: {error}. It starts with"
                f" {value.strip()[:60]!r}."
            ) from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"{where}: {data.tool_key!r} (--tool-key) is no list of objects, but {str(tools)[:80]!r}.")
    return tools


def _render(messages: list[dict], tools: list[dict] | None, data: DataConfig, tokenizer, where: str) -> str:
    """The messages and tools as text, through the chat template."""
    if not tokenizer.chat_template:
        raise DataError(
            "--apply-chat-template: the tokenizer of --hf-checkpoint has no chat template. Fix: another checkpoint, or"
            " prompts as plain strings."
        )
    if tools is not None and "tools" not in str(tokenizer.chat_template):
        fix = "another checkpoint; or --tool-key with a key that no row has, which leaves them out"
        raise DataError(
            f"{where}: has tools in {data.tool_key!r} (--tool-key), and the chat template of --hf-checkpoint has no"
            f" place for them. Fix: {fix}."
        )
    try:
        return tokenizer.apply_chat_template(
            messages, tools=tools, tokenize=False, add_generation_prompt=True, **data.chat_template_kwargs
        )
    except Exception as error:  # a template may raise anything: it is a program of the model's author
        raise DataError(f"{where}: the chat template refuses the messages: {type(error).__name__}: {error}") from error
