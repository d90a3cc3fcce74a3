"""A client whose answers outlive being ended by us: what an engine had said is kept, and it goes on from there.

An answer is ended by a weight sync (--update-weight-pause-mode abort), or because a rollout is full
(--partial-rollout). Its tokens are sent again behind the prompt, with a budget that is smaller by as many, and what
comes is joined: tokens, log-probs, and the weight version of each.
"""

from __future__ import annotations

import asyncio
import bisect
import dataclasses
from collections.abc import Callable, Sequence

import aiohttp
import numpy as np

from slime_like.errors import EngineError, WaitTimeout
from slime_like.records import ABORTED, COMPLETED, EngineEndpoint
from slime_like.rollout.asking import unlimited_session
from slime_like.rollout.generate import Generation, GenerationClient
from slime_like.rollout.kept_answers import slot_of
from slime_like.rollout.policy import Policy

#: How often engines are asked to end what runs, until nothing does: a request that was on its way escapes the first.
_ABORT_EVERY_S = 0.2

#: token ids, whether special tokens are left out -> text
Decode = Callable[[list[int], bool], str]


class ContinuingClient(GenerationClient):
    """Use it as a GenerationClient; an answer that `policy` explains the end of is gone on with.

    thrown_tokens: the last token of each part is asked for again, since an end that we bring about hides whether that
    token would have ended the answer.
    """

    def __init__(self, *args, policy: Policy, decode: Decode, endpoints: Sequence[EngineEndpoint], **options):
        super().__init__(*args, **options)
        self._policy, self._decode, self._endpoints = policy, decode, tuple(endpoints)
        self._num_running = 0
        self._control = unlimited_session()
        self.num_continued, self.thrown_tokens = 0, 0

    def take_counts(self) -> tuple[int, int]:
        """(answers that were gone on with, tokens that were thrown away) since the last call."""
        counts = (self.num_continued, self.thrown_tokens)
        self.num_continued = self.thrown_tokens = 0
        return counts

    async def generate(
        self, tokens: np.ndarray | Sequence[int], sampling_params: dict, *, session: str | None = None
    ) -> Generation:
        """As GenerationClient.generate, over as many requests as it takes."""
        kept = slot_of(sampling_params, tokens)
        answer = kept.answer
        if answer is not None and answer.status != ABORTED:
            return answer
        while True:
            await self._policy.settled(self._timeout_s)
            await self._policy.gone_on()
            changes = self._policy.num_changes
            before = [] if answer is None else answer.tokens
            self._num_running += 1
            try:
                part = await self._generated(
                    [*map(int, tokens), *before], _rest_of(sampling_params, len(before)), session
                )
            finally:
                self._num_running -= 1
            answer = part if answer is None else self._joined(answer, part, sampling_params)
            if part.status != ABORTED:
                kept.answer = answer
                return answer
            if not self._policy.explains_abort(changes):
                return answer
            self.num_continued += 1
            self.thrown_tokens += min(1, len(answer.tokens))
            kept.answer = answer = dataclasses.replace(_without_last(answer), status=ABORTED)

    async def close(self) -> None:
        """Close all connections."""
        await self._control.close()
        await super().close()

    def hold_on(self, engines: Sequence[EngineEndpoint]) -> None:
        """Only what runs on these engines is ended by `hold`."""
        self._endpoints = tuple(engines)

    async def hold(self, timeout_s: float) -> None:
        """End everything that runs and keep it, until the policy goes on. Raises WaitTimeout."""
        self._policy.hold()
        try:
            async with asyncio.timeout(timeout_s):
                while self._num_running:
                    await asyncio.gather(*(self._abort(endpoint) for endpoint in self._endpoints))
                    await asyncio.sleep(_ABORT_EVERY_S)
        except TimeoutError:
            last = f"{self._num_running} requests run on"
            raise WaitTimeout(
                who="the rollout", whom="engines", phase="ending what runs", seconds=timeout_s, last=last
            ) from None

    async def _abort(self, endpoint: EngineEndpoint) -> None:
        headers = {"Authorization": f"Bearer {endpoint.api_key or ''}"}
        url = f"{endpoint.url.rstrip('/')}/abort_request"
        try:
            async with self._control.post(url, json={"rid": "", "abort_all": True}, headers=headers) as answer:
                if answer.status != 200:
                    raise EngineError(f"{url} answered HTTP {answer.status}: {(await answer.text())[:200]}")
        except (aiohttp.ClientError, OSError) as error:
            raise EngineError(f"{url} does not answer: {type(error).__name__}: {error}") from error

    def _joined(self, before: Generation, part: Generation, sampling_params: dict) -> Generation:
        """Both as one answer, which ends where a stop string does that lies across them."""
        tokens = [*before.tokens, *part.tokens]
        skip = bool(sampling_params.get("skip_special_tokens", True))
        whole = dataclasses.replace(
            part,
            tokens=tokens,
            logprobs=[*before.logprobs, *part.logprobs],
            text=self._decode(tokens, skip),
            weight_versions=np.concatenate([_versions(before), _versions(part)]),
        )
        stops = (
            [sampling_params["stop"]] if isinstance(sampling_params.get("stop"), str) else sampling_params.get("stop")
        )

        def is_over(count: int) -> bool:
            text = self._decode(tokens[:count], skip)
            return any(stop in text for stop in stops or ())

        if not is_over(len(tokens)):
            return whole
        end = bisect.bisect_left(range(len(tokens) + 1), True, key=is_over)
        self.thrown_tokens += len(tokens) - end
        return dataclasses.replace(
            _first(whole, end), text=self._decode(tokens[:end], skip), status=COMPLETED, routed_experts=None
        )


def _rest_of(sampling_params: dict, num_tokens: int) -> dict:
    """The parameters for what is left to say after so many tokens."""
    rest = dict(sampling_params)
    for name, least in (("max_new_tokens", 1), ("min_new_tokens", 0)):
        if name in rest:
            rest[name] = max(least, rest[name] - num_tokens)
    return rest


def _without_last(answer: Generation) -> Generation:
    return _first(answer, max(0, len(answer.tokens) - 1))


def _first(answer: Generation, count: int) -> Generation:
    """The answer's first tokens; its text is not cut."""
    return dataclasses.replace(
        answer,
        tokens=answer.tokens[:count],
        logprobs=answer.logprobs[:count],
        weight_versions=_versions(answer)[:count],
    )


def _versions(answer: Generation) -> np.ndarray:
    """[tokens] int32"""
    if answer.weight_versions is not None:
        return answer.weight_versions
    return np.full(len(answer.tokens), answer.weight_version, dtype=np.int32)
