"""Rows of a data set, made of records: checked, rendered, tokenized."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from slime_like.config.data import DataConfig
from slime_like.errors import DataError
from slime_like.records import Prompt, SupervisedTokens
from slime_like.rollout.chat_messages import read_messages, read_tools, render
from slime_like.rollout.conversations import Conversations
from slime_like.rollout.row_files import FileRow, check_text, num_characters
from slime_like.rollout.tokenizer import encode, end_of_turn_id

#: A row's own reward type, as a key of the row or of its metadata.
RM_TYPE = "rm_type"
_BATCH_ROWS = 256  # tokenized at a time
_SHORT_TEXT = 1024**2  # characters that are tokenized without a question


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One usable row of the file, rendered and tokenized.

    Of a supervised one only what is trained is kept: text is empty, tokens is what stands before the first answer.
    """

    line: int  # in the file, from 1
    text: str
    tokens: np.ndarray  # [P] int32
    label: Any
    metadata: dict
    supervised: tuple[SupervisedTokens, ...] = ()
    messages: list[dict] | None = None  # before the chat template

    def as_prompt(self, position: int) -> Prompt:
        """The row at a position of the stream."""
        names = ("text", "tokens", "label", "metadata", "supervised", "messages")
        return Prompt(index=position, **{name: getattr(self, name) for name in names})


class RowMaker:
    """Makes rows of records, for one tokenizer and the limits of one source.

    max_prompt_tokens: what may stand before an answer. max_tokens: of a supervised sample, which is cut there: an
    answer that is cut has no end token, so that nothing wrong is learned about stopping.
    num_cut: rows that were cut so far.
    """

    def __init__(
        self, data: DataConfig, tokenizer, *, max_prompt_tokens: int, max_tokens: int, supervised: bool = False
    ):
        self.data, self.tokenizer, self.supervised = data, tokenizer, supervised
        self.max_prompt_tokens, self.max_tokens, self.num_cut = max_prompt_tokens, max_tokens, 0
        kwargs = data.chat_template_kwargs if data.apply_chat_template else None
        # raises now rather than at the first step
        self._end_id = end_of_turn_id(tokenizer, kwargs) if supervised else None
        self._conversations = (
            Conversations(tokenizer, data.loss_mask_type or "all", data.chat_template_kwargs) if supervised else None
        )

    def rows(self, records: Iterable[FileRow]) -> Iterator[Row | None]:
        """A row for each record; None for one that does not fit into the limits. Raises DataError naming the record."""
        stream = iter(records)
        while batch := list(itertools.islice(stream, _BATCH_ROWS)):
            if self.supervised:
                yield from map(self._supervised_row, batch)
            else:
                yield from self._prompts(batch)

    @functools.cached_property
    def _longest_text(self) -> int:
        """Characters beyond which no text fits into the limits, however well the tokenizer takes it: such a text is
        not tokenized. Normalizers may drop characters, so that the bound is a wide one.
        """
        longest_token = max(map(len, self.tokenizer.get_vocab()), default=1)
        return 4 * longest_token * max(self.max_prompt_tokens, self.max_tokens)

    def _fits(self, num_characters: int) -> bool:
        return num_characters <= _SHORT_TEXT or num_characters <= self._longest_text

    def _prompts(self, batch: list[FileRow]) -> Iterator[Row | None]:
        texts = [self._text(one) for one in batch]
        fitting = [self._fits(len(text)) for text, _ in texts]
        ids = encode(self.tokenizer, [text if fits else "" for (text, _), fits in zip(texts, fitting, strict=True)])
        for one, (text, extra), tokens, fits in zip(batch, texts, ids, fitting, strict=True):
            if fits and not tokens:
                raise DataError(f"{one.where}: the prompt is empty.")
            fits = fits and len(tokens) <= self.max_prompt_tokens
            row = Row(line=one.number, text=text, tokens=np.array(tokens, dtype=np.int32), **extra) if fits else None
            yield row

    def _text(self, one: FileRow) -> tuple[str, dict]:
        """(the prompt as the engine gets it, the row's other fields)."""
        data, (_, record, where) = self.data, one
        prompt = _require(record, data.input_key, "--input-key", where)
        messages, tools = _messages(prompt, data, where), read_tools(record.get(data.tool_key), data.tool_key, where)
        fields = _fields(record, data, where) | {"messages": messages}
        if tools is not None:
            fields["metadata"] = {"tools": tools} | fields["metadata"]
        check_text([prompt, tools], where)
        if messages is None:
            return prompt, fields
        kwargs = {"add_generation_prompt": True} | data.chat_template_kwargs
        return render(self.tokenizer, messages, tools, where, **kwargs), fields

    def _supervised_row(self, one: FileRow) -> Row | None:
        has_answer = self._has_answer(one)
        if not self._fits(num_characters(one.record.get(self.data.input_key))):
            return None
        samples = self._answered(one) if has_answer else self._conversation(one)
        kept = [(sample, int(np.argmax(sample.loss_mask))) for sample in samples]  # where its first answer begins
        kept = [pair for pair in kept if pair[1] <= self.max_prompt_tokens and pair[1] < self.max_tokens]
        if not kept:
            return None
        limit = self.max_tokens
        self.num_cut += len(kept) < len(samples) or any(len(sample.tokens) > limit for sample, _ in kept)
        cut = tuple(SupervisedTokens(sample.tokens[:limit], sample.loss_mask[:limit]) for sample, _ in kept)
        fields = _fields(one.record, self.data, one.where)
        return Row(line=one.number, text="", tokens=cut[0].tokens[: kept[0][1]], supervised=cut, **fields)

    def _has_answer(self, one: FileRow) -> bool:
        """Whether the row is a prompt and its answer, not a conversation. Raises DataError if it is neither."""
        data, (_, record, where) = self.data, one
        prompt = _require(record, data.input_key, "--input-key", where)
        is_chat = isinstance(prompt, list)
        if data.loss_mask_type is not None:
            if not is_chat:
                raise DataError(
                    f"{where}: the prompt {data.input_key!r} is a {type(prompt).__name__}, no list of chat messages as"
                    " --loss-mask-type wants it. Fix: --input-key; or drop the flag for rows with a --response-key."
                )
            return False
        if record.get(data.response_key) is not None:
            return True
        if is_chat and any(isinstance(m, dict) and m.get("role") == "assistant" for m in prompt):
            return False
        keys = ", ".join(map(repr, record)) or "none"
        raise DataError(
            f"{where} has no key {data.response_key!r} (--response-key), and no conversation with an assistant's"
            f" message in {data.input_key!r} (--input-key). Its keys: {keys}."
        )

    def _answered(self, one: FileRow) -> list[SupervisedTokens]:
        """Prompt, answer and end token, trained on the answer and the end token."""
        data, (_, record, where) = self.data, one
        response = record[data.response_key]
        if not isinstance(response, str):
            raise DataError(
                f"{where}: {data.response_key!r} (--response-key) is a {type(response).__name__}, not a string."
            )
        check_text(response, where)
        prompt, answer = encode(self.tokenizer, [self._text(one)[0], response[: self._longest_text]])
        if not prompt:
            raise DataError(f"{where}: the prompt is empty.")
        mask = [0] * len(prompt) + [1] * (len(answer) + 1)
        return [SupervisedTokens(np.array([*prompt, *answer, self._end_id], np.int32), np.array(mask, np.int8))]

    def _conversation(self, one: FileRow) -> list[SupervisedTokens]:
        data, (_, record, where) = self.data, one
        assert self._conversations is not None, "made for supervised rows"
        messages = read_messages(record[data.input_key], where)
        tools = read_tools(record.get(data.tool_key), data.tool_key, where)
        check_text([messages, tools], where)
        return self._conversations.samples(messages, tools, where)


def _require(record: dict, key: str, flag: str, where: str):
    if key not in record:
        raise DataError(f"{where} has no key {key!r} ({flag}). Its keys: {', '.join(map(repr, record)) or 'none'}.")
    return record[key]


def _fields(record: dict, data: DataConfig, where: str) -> dict:
    """label and metadata."""
    metadata = record.get(data.metadata_key)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict):
        raise DataError(
            f"{where}: {data.metadata_key!r} (--metadata-key) is a {type(metadata).__name__}, not an object."
        )
    if record.get(RM_TYPE) is not None:
        metadata = {RM_TYPE: record[RM_TYPE]} | metadata
    label = None if data.label_key is None else _require(record, data.label_key, "--label-key", where)
    return {"label": label, "metadata": metadata}


def _messages(prompt: Any, data: DataConfig, where: str) -> list[dict] | None:
    """The prompt as chat messages for --apply-chat-template; None for a string that stays as it is."""
    if not isinstance(prompt, (str, list)):
        raise DataError(
            f"{where}: the prompt {data.input_key!r} is a {type(prompt).__name__}, neither a string nor a list of chat"
            " messages."
        )
    if data.apply_chat_template:
        return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else read_messages(prompt, where)
    if isinstance(prompt, list):
        raise DataError(
            f"{where}: the prompt {data.input_key!r} is a list of chat messages. Fix: add --apply-chat-template."
        )
    return None
