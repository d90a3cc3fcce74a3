"""Supervised conversations: which tokens of the assistant's turns are trained, each in the context that it was said in.

What the assistant wrote in turn k is what the chat template puts behind `messages[:k]` with the beginning of an answer,
up to the token that ends a turn. A turn is trained behind exactly the text that an engine would be sent for it. Turns
share one sample as long as each one's context begins with all of the sample so far; where a template rewrites what was
said before (Qwen3 and GLM leave old thinking out), the next turn begins a sample of its own.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from slime_like.errors import DataError
from slime_like.records import SupervisedTokens
from slime_like.rollout.agents.chat_turns import ChatTurns, TemplateRefusal
from slime_like.rollout.chat_messages import STEP_LOSS_MASK, is_trained, render
from slime_like.rollout.tokenizer import encode

_OPEN, _CLOSE = "<think>", "</think>"


@dataclasses.dataclass(frozen=True)
class AnswerTurn:
    """One answer: the text that an engine would be sent, and what the assistant wrote, the end of the turn included."""

    context: str
    wrote: str


@dataclasses.dataclass
class _Sample:
    """Pieces of text in turns: not trained, trained, not trained, …"""

    pieces: list[str]

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class Conversations:
    """Conversations as samples. kind: --loss-mask-type; kwargs: --apply-chat-template-kwargs."""

    def __init__(self, tokenizer, kind: str, kwargs: dict[str, Any]):
        self._tokenizer, self._kind, self._kwargs = tokenizer, kind, kwargs
        self._chat = ChatTurns(tokenizer, kwargs)
        added = tokenizer.added_tokens_decoder.values()
        special = {token.content for token in added if token.special} | {tokenizer.eos_token or ""}
        self._special = tuple(sorted(special - {""}, key=lambda name: (-len(name), name)))

    def samples(self, messages: list[dict], tools: list[dict] | None, where: str) -> list[SupervisedTokens]:
        """One sample, or several where the template rewrites what was said before; [] if no message is to be trained.

        Raises DataError naming the row where the template does not say what the assistant wrote.
        """
        parts: list[_Sample] = []
        for turn in self.turns(messages, tools, where):
            if parts and turn.context.startswith(parts[-1].text):
                parts[-1].pieces += [turn.context[len(parts[-1].text) :], turn.wrote]
            else:
                parts.append(_Sample([turn.context, turn.wrote]))
        return [self._tokens(part) for part in parts]

    def turns(self, messages: list[dict], tools: list[dict] | None, where: str) -> list[AnswerTurn]:
        """The turns that are trained. Raises DataError naming the row."""
        places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        if not places:
            raise DataError(f"{where}: none of its {len(messages)} messages is the assistant's, so nothing is trained.")
        plain = [{key: value for key, value in m.items() if key != STEP_LOSS_MASK} for m in messages]
        trained = [is_trained(messages[place], where) for place in places]
        if self._kind == "last":
            trained[:-1] = [False] * (len(places) - 1)
        return [
            self._turn(plain, place, tools, f"{where}, message {place + 1}")
            for place, wanted in zip(places, trained, strict=True)
            if wanted
        ]

    def _turn(self, messages: list[dict], place: int, tools: list[dict] | None, where: str) -> AnswerTurn:
        if place == 0:
            raise DataError(f"{where}: the assistant's, and the first: there is nothing that it answers.")
        context = self._render(messages[:place], tools, where, add_generation_prompt=True)
        whole = self._render(messages[: place + 1], tools, where, add_generation_prompt=False)
        message = messages[place]
        tail = whole.removeprefix(context) if whole.startswith(context) else None
        lost = None if tail is None else _lost(message, tail)
        if tail is not None and lost is None and not _names_calls(message, tail):
            # Kimi's calls are shown by their ids.
            without = {key: value for key, value in message.items() if key != "tool_calls"}
            silent = self._render([*messages[:place], without], tools, where, add_generation_prompt=False)
            lost = "tool_calls" if silent == whole else None
        if tail is None or lost is not None:
            tail = _plain_text(message, context, lost, where)
        after = messages[place + 1] if place + 1 < len(messages) else None
        return AnswerTurn(context, self._ended(tail, message, after, tools, where))

    def _render(self, messages: list[dict], tools: list[dict] | None, where: str, **kwargs: Any) -> str:
        return render(self._tokenizer, messages, tools, where, **(self._kwargs | kwargs))

    def _ended(self, tail: str, message: dict, after: dict | None, tools: list[dict] | None, where: str) -> str:
        """What was written, with the special token that ends the turn and without what the template puts behind."""
        text = tail.rstrip()
        if text.endswith(self._special):
            return text
        # GLM's turns end with the token that begins the next message.
        role = "tool" if message.get("tool_calls") else "user"
        if after is not None and after["role"] in ("tool", "user"):
            role = after["role"]
        try:
            follows = self._chat.after_answer([{"role": role, "content": "next"}], tools).text.lstrip()
        except TemplateRefusal:
            follows = ""
        name = next((name for name in self._special if follows.startswith(name)), None)
        if name is not None:
            return tail + name
        if self._tokenizer.eos_token is None:
            raise DataError(
                f"{where}: neither the chat template nor the tokenizer has a token that ends an answer. Fix: set"
                " eos_token in tokenizer_config.json."
            )
        return text + self._tokenizer.eos_token

    def _tokens(self, part: _Sample) -> SupervisedTokens:
        """Each piece by itself: no token is half context and half answer, as none is when an engine answers."""
        ids = encode(self._tokenizer, part.pieces)
        mask = np.repeat(np.arange(len(ids)) % 2, [len(piece) for piece in ids])
        return SupervisedTokens(np.array([i for piece in ids for i in piece], np.int32), mask.astype(np.int8))


def _lost(message: dict, tail: str) -> str | None:
    """What the assistant said and the template does not show; None if it shows all of it. Blanks do not count."""
    shown = _without_blanks(tail)
    texts = ((key, message.get(key) or "") for key in ("reasoning_content", "content"))
    return next((key for key, text in texts if _without_blanks(str(text)) not in shown), None)


def _names_calls(message: dict, tail: str) -> bool:
    shown = _without_blanks(tail)
    names = (str(call.get("function", call).get("name", "")) for call in message.get("tool_calls") or ())
    return all(name and _without_blanks(name) in shown for name in names)


def _without_blanks(text: str) -> str:
    return "".join(text.split())


def _plain_text(message: dict, context: str, lost: str | None, where: str) -> str:
    """The message's own text, where the template does not show it: DeepSeek-R1's distilled models begin an answer with
    <think>, and their template leaves thinking out of every message. Raises DataError where that text does not go on
    from the beginning of the answer.
    """
    begins, content = context.rstrip(), message["content"]
    if not message.get("reasoning_content") and not message.get("tool_calls"):
        if begins.endswith(_OPEN) and _CLOSE in content:
            return content.lstrip().removeprefix(_OPEN).lstrip("\n")
        if not begins.endswith((_OPEN, _CLOSE)) or (begins.endswith(_CLOSE) and _CLOSE not in content):
            return content
    what = f"begins an answer with {begins[-60:]!r}, which is not how it shows this message"
    if lost is not None:
        what = f"leaves out its {lost!r}"
    raise DataError(
        f"{where}: the chat template {what}. What the assistant wrote is unknown. Fix: --apply-chat-template-kwargs"
        " (enable_thinking), another chat template, or thinking in 'content' as the model writes it; step_loss_mask 0"
        " leaves a message untrained."
    )
