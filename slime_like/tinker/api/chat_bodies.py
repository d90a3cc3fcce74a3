"""Bodies and answers of OpenAI's routes, over the same samplers."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import math
import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from slime_like.errors import DataError
from slime_like.rollout import chat_messages
from slime_like.rollout.serve.wire import (
    ApiError,
    read_ids,
    read_limit,
    read_messages,
    read_template_kwargs,
    read_tools,
)
from slime_like.rollout.tokenizer import encode, load_tokenizer
from slime_like.tinker.api.wire.bounds import BodyLimits
from slime_like.tinker.records import SampledSequence, SampleJob, SampleResult

_MAX_PROMPTS = 64
_MAX_TOP = 20
#: Fields that would change what is sampled, and are not done.
_NOT_DONE = ("response_format", "frequency_penalty", "presence_penalty", "logit_bias", "suffix", "best_of", "echo")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
    """What a body asks for, of each prompt. num_top: None where no log-probs are."""

    model: str
    prompts: list[np.ndarray]
    num_samples: int
    max_tokens: int | None
    temperature: float
    top_p: float
    seed: int | None
    stop: tuple[str, ...]
    num_top: int | None
    stream: bool
    include_usage: bool

    def job(self, sampler_id: str, prompt: np.ndarray) -> SampleJob:
        """One prompt's."""
        return SampleJob(
            sampler_id=sampler_id,
            prompt=prompt,
            num_samples=self.num_samples,
            max_tokens=self.max_tokens,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            stop=self.stop or None,
            topk_sample_logprobs=self.num_top or 0,
        )


class Tokenizers:
    """Tokenizers by folder, each read once."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}
        self._lock = asyncio.Lock()

    async def get(self, folder: str) -> Any:
        """Raises ApiError where it cannot be read."""
        async with self._lock:
            if folder not in self._loaded:
                try:
                    self._loaded[folder] = await asyncio.to_thread(load_tokenizer, folder)
                except DataError as error:
                    message = f"this server has no tokenizer for that model: {error}"
                    raise ApiError(message, status=503, kind="server_error") from None
            return self._loaded[folder]


def read_chat(body: dict, tokenizer: Any, limits: BodyLimits) -> Wanted:
    """Of /v1/chat/completions. Raises ApiError."""
    messages, tools = read_messages(body.get("messages")), read_tools(body.get("tools"))
    if body.get("tool_choice") not in (None, "auto", "none"):
        raise ApiError("tool_choice: only auto and none are done", param="tool_choice")
    try:
        text = chat_messages.render(
            tokenizer,
            list(messages),
            list(tools) or None,
            "messages",
            add_generation_prompt=True,
            **read_template_kwargs(body),
        )
    except DataError as error:
        raise ApiError(str(error), param="messages") from None
    top = _number(body, "top_logprobs", 0, least=0, most=_MAX_TOP, whole=True)
    return _wanted(body, [encode(tokenizer, [text])[0]], top if body.get("logprobs") else None, limits)


def read_completion(body: dict, tokenizer: Any, limits: BodyLimits) -> Wanted:
    """Of /v1/completions: a text or token ids, or a list of either. Raises ApiError."""
    prompt = body.get("prompt")
    parts = prompt if isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int)) else [prompt]
    if not 1 <= len(parts) <= _MAX_PROMPTS:
        raise ApiError(f"prompt: 1 to {_MAX_PROMPTS} are taken at once", param="prompt")
    ids = [tokenizer(part)["input_ids"] if isinstance(part, str) else read_ids(part, "prompt") for part in parts]
    top = None if body.get("logprobs") is None else _number(body, "logprobs", 0, least=0, most=_MAX_TOP, whole=True)
    return _wanted(body, ids, top, limits)


def _wanted(body: dict, prompts: list[Any], num_top: int | None, limits: BodyLimits) -> Wanted:
    for name in _NOT_DONE:
        if body.get(name) not in (None, 0, 0.0, False, {}, {"type": "text"}):
            raise ApiError(f"{name} is not done here", param=name)
    if any(not 1 <= len(prompt) <= limits.prompt_tokens for prompt in prompts):
        raise ApiError(f"a prompt has 1 to {limits.prompt_tokens} tokens", param="prompt")
    stop = body.get("stop")
    stops = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(stops, list) or len(stops) > 16 or not all(isinstance(one, str) and one for one in stops):
        raise ApiError("stop: text, or a list of at most 16 texts", param="stop")
    options = body.get("stream_options")
    return Wanted(
        model=body["model"],
        prompts=[np.array(prompt, np.int32) for prompt in prompts],
        num_samples=_number(body, "n", 1, least=1, most=limits.num_samples, whole=True),
        max_tokens=read_limit(body, "max_completion_tokens", "max_tokens"),
        temperature=_number(body, "temperature", 1.0, least=0, most=100),
        top_p=_number(body, "top_p", 1.0, least=1e-6, most=1),
        seed=None if body.get("seed") is None else _number(body, "seed", 0, least=0, most=2**63 - 1, whole=True),
        stop=tuple(stops),
        num_top=num_top,
        stream=body.get("stream") is True,
        include_usage=isinstance(options, dict) and options.get("include_usage") is True,
    )


def _number(body: Mapping[str, Any], name: str, otherwise: Any, *, least: float, most: float, whole: bool = False):
    value = body.get(name)
    if value is None:
        return otherwise
    kinds = (int,) if whole else (int, float)
    if type(value) not in kinds or not math.isfinite(value) or not least <= value <= most:
        raise ApiError(f"{name}: a {'whole ' if whole else ''}number from {least} to {most}", param=name)
    return value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answers:
    """What was sampled, as OpenAI's routes say it. results: of each prompt."""

    wanted: Wanted
    results: list[SampleResult]
    tokenizer: Any
    is_chat: bool

    @functools.cached_property
    def head(self) -> dict[str, Any]:
        """What an answer and its chunks begin with."""
        prefix = "chatcmpl" if self.is_chat else "cmpl"
        return {"id": f"{prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.wanted.model}

    def whole(self) -> dict[str, Any]:
        """A chat.completion or text_completion."""
        kind = "chat.completion" if self.is_chat else "text_completion"
        choices = []
        for choice, text in self._choices():
            body = {"message": {"role": "assistant", "content": text, "refusal": None}}
            choices.append({**choice, **(body if self.is_chat else {"text": text})})
        return {**self.head, "object": kind, "choices": choices, "usage": self._usage()}

    def chunks(self) -> Iterator[tuple[None, dict[str, Any]]]:
        """The same as the events of a stream: of each choice its role, all of its text, and its end."""
        head = {**self.head, "object": "chat.completion.chunk" if self.is_chat else "text_completion"}
        for choice, text in self._choices():
            if not self.is_chat:
                yield None, {**head, "choices": [{**choice, "text": text}]}
                continue
            open_end = {"finish_reason": None, "logprobs": None}
            for delta in ({"role": "assistant", "content": ""}, {"content": text}):
                yield None, {**head, "choices": [{"index": choice["index"], "delta": delta, **open_end}]}
            yield None, {**head, "choices": [{**choice, "delta": {}}]}
        if self.wanted.include_usage:
            yield None, {**head, "choices": [], "usage": self._usage()}

    def _choices(self) -> Iterator[tuple[dict[str, Any], str]]:
        index = 0
        for result in self.results:
            for sequence in result.sequences:
                text = self.tokenizer.decode(sequence.tokens.tolist(), skip_special_tokens=True)
                # What an answer was stopped by is not part of it.
                text = text[: min((at for stop in self.wanted.stop if (at := text.find(stop)) >= 0), default=len(text))]
                yield (
                    {"index": index, "finish_reason": sequence.stop_reason, "logprobs": self._logprobs(sequence)},
                    text,
                )
                index += 1

    def _logprobs(self, sequence: SampledSequence) -> dict[str, Any] | None:
        if self.wanted.num_top is None:
            return None
        tokens = [self._token(token) for token in sequence.tokens.tolist()]
        values = sequence.logprobs.tolist()
        tops: list[list[tuple[str, float]]] = [[] for _ in tokens]
        if sequence.topk is not None:
            pairs = zip(sequence.topk.token_ids.tolist(), sequence.topk.logprobs.tolist(), strict=True)
            tops = [[(self._token(i), v) for i, v in zip(ids, ours, strict=True)] for ids, ours in pairs]
        if not self.is_chat:
            return {"tokens": tokens, "token_logprobs": values, "top_logprobs": [dict(top) for top in tops]}
        return {
            "content": [
                {**_entry(token, value), "top_logprobs": [_entry(*pair) for pair in top]}
                for token, value, top in zip(tokens, values, tops, strict=True)
            ],
            "refusal": None,
        }

    def _token(self, token: int) -> str:
        return self.tokenizer.decode([token])

    def _usage(self) -> dict[str, int]:
        prompts = sum(len(prompt) for prompt in self.wanted.prompts)
        answers = sum(len(sequence.tokens) for result in self.results for sequence in result.sequences)
        return {"prompt_tokens": prompts, "completion_tokens": answers, "total_tokens": prompts + answers}


def _entry(token: str, value: float) -> dict[str, Any]:
    return {"token": token, "logprob": value, "bytes": list(token.encode())}
