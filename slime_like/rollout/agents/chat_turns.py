"""Token ids of conversations: of a whole one, and of what follows an answer whose tokens are kept as they were sampled.

What follows an answer is the chat template's own text after it, taken from a short conversation of our own making, so
that the template's view of the history does not matter. Text of messages never becomes a special token.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
from collections.abc import Sequence
from typing import Any

from slime_like.utils.chat_templates import apply_template

_TOOL_CALL = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": {}}}
#: What templates put before an answer, or leave out, by their own view of thinking; an answer's own text is kept.
_THINKING = re.compile(r"(<think>\s*(</think>)?|</think>)\s*$")
#: The template-free part of a message is marked by characters of a private area that nobody writes.
_MARK = "\ue0f5"


class TemplateRefusal(Exception):
    """A chat template that raises, or hides where an answer stands."""


@dataclasses.dataclass(frozen=True)
class Following:
    """What follows an answer, from the end of its last word: up to the first word of the next answer."""

    text: str
    ids: list[int]


class ChatTurns:
    """The chat template of a tokenizer, for conversations that grow. kwargs: --apply-chat-template-kwargs."""

    def __init__(self, tokenizer, kwargs: dict | None = None):
        self._tokenizer, self._kwargs = tokenizer, kwargs or {}
        added = tokenizer.added_tokens_decoder
        special = {token.content: index for index, token in added.items() if token.special}
        self.special_ids = frozenset(special.values()) | {
            index for index in (tokenizer.eos_token_id,) if index is not None
        }
        self._names = sorted(special, key=lambda name: (-len(name), name))  # longest first: one may begin another
        self._name = re.compile("|".join(map(re.escape, self._names))) if self._names else None
        self.following = functools.lru_cache(maxsize=4096)(self._following)

    @property
    def takes_tools(self) -> bool:
        """Whether the template has a place for tools."""
        return "tools" in str(self._tokenizer.chat_template)

    def key(self, tools: Sequence[dict] | None) -> str:
        """A hash of all that is part of every render but the messages."""
        text = json.dumps([list(tools or []), self._kwargs, str(self._tokenizer.chat_template)], sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def whole(
        self, messages: Sequence[dict], tools: Sequence[dict] | None = None, *, opens_answer: bool = True
    ) -> tuple[str, list[int]]:
        """(text, ids) of a conversation, with opens_answer up to the first word of the next answer.

        Raises TemplateRefusal.
        """
        text = self._render(messages, tools, opens_answer=opens_answer)
        return text, self._encode(text)

    def after_answer(self, messages: Sequence[dict], tools: Sequence[dict] | None = None) -> Following:
        """What follows an answer when these messages come next. Raises TemplateRefusal."""
        return self.following(json.dumps(list(messages)), json.dumps(list(tools) if tools else None))

    def _following(self, messages_json: str, tools_json: str) -> Following:
        messages, tools = json.loads(messages_json), json.loads(tools_json)
        answer = _unlike(messages_json)
        ask = {"role": "user", "content": "u"}
        plain = [ask, {"role": "assistant", "content": answer}, *messages]
        calling = [ask, {"role": "assistant", "content": answer, "tool_calls": [_call_of(messages)]}, *messages]
        try:
            text = self._render(plain, tools)
        except TemplateRefusal:  # some want a call before a tool's answer
            text = self._render(calling, tools)
        parts = text.split(answer)
        if len(parts) != 2:
            raise TemplateRefusal(f"it shows an answer {len(parts) - 1} times")
        return Following(parts[1], self._encode(parts[1]))

    def around_answers(self, messages: Sequence[dict], tools: Sequence[dict] | None = None) -> list[str]:
        """The template's text before, between and behind the assistant messages, which are blanked out; with the text
        that begins the next answer at the end. Raises TemplateRefusal.
        """
        word = _unlike(json.dumps(list(messages)))
        blank = [
            {"role": "assistant", "content": word} if message["role"] == "assistant" else message
            for message in messages
        ]
        try:
            text = self._render(blank, tools)
        except TemplateRefusal:
            calling = [
                {**one, "tool_calls": message["tool_calls"]} if message.get("tool_calls") else one
                for one, message in zip(blank, messages, strict=True)
            ]
            text = self._render(calling, tools)
        parts = text.split(word)
        num_answers = sum(message["role"] == "assistant" for message in messages)
        if len(parts) != num_answers + 1:
            raise TemplateRefusal(f"it shows {len(parts) - 1} of {num_answers} answers")
        return parts

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens too."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)

    def _render(self, messages: Sequence[dict], tools: Sequence[dict] | None, *, opens_answer: bool = True) -> str:
        """The text, up to the first word of the next answer; where a message's text has the name of a special token
        stands the name's number between marks.
        """
        try:
            return apply_template(
                self._tokenizer,
                self._marked(messages),
                tools=self._marked(tools) if tools else None,
                add_generation_prompt=opens_answer,
                **self._kwargs,
            )
        except Exception as error:  # a template may raise anything: it is a program of the model's author
            raise TemplateRefusal(f"it raised {type(error).__name__}: {error}") from error

    def _marked(self, value: Any) -> Any:
        """A message or a tool, with marks in all its texts: thinking and a call's arguments too."""
        if isinstance(value, dict):
            return {key: self._marked(one) for key, one in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._marked(one) for one in value]
        if not isinstance(value, str):
            return value
        plain = value.replace(_MARK, "\ufffd")
        return self._name.sub(lambda name: self._mark(name.group()), plain) if self._name else plain

    def _mark(self, name: str) -> str:
        return f"{_MARK}{self._names.index(name)}{_MARK}"

    def _encode(self, text: str) -> list[int]:
        """Ids of a rendered text; special tokens that a message only names are spelled out."""
        ids: list[int] = []
        for place, part in enumerate(text.split(_MARK)):
            if place % 2 == 0:
                ids += self._tokenizer(part, add_special_tokens=False)["input_ids"] if part else []
                continue
            name = self._names[int(part)]
            spelled = self._tokenizer(name, add_special_tokens=False, split_special_tokens=True)["input_ids"]
            if self.special_ids & set(spelled):
                raise TemplateRefusal(f"the tokenizer cannot spell {name!r} without its special token")
            ids += spelled
        return ids


def without_thinking(text: str) -> str:
    """A piece between answers, without what the template's view of thinking puts at its end, and without white space
    there: what is left must be equal however much history there is.
    """
    return _THINKING.sub("", text.rstrip()).rstrip()


def _unlike(text: str) -> str:
    """A word that stands nowhere in the text."""
    number = 0
    while (word := f"anAnswer{number}here") in text:
        number += 1
    return word


def _call_of(messages: Sequence[dict]) -> dict:
    wanted = next((message["tool_call_id"] for message in messages if message.get("tool_call_id")), _TOOL_CALL["id"])
    return {**_TOOL_CALL, "id": wanted}
