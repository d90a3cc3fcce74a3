"""Ask an engine for samples: one HTTP request each, with retries, a deadline and a limit on requests in flight."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import hashlib
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import aiohttp
import numpy as np
import orjson

from slime_like.config.rollout import RolloutConfig
from slime_like.errors import EngineError
from slime_like.records import ABORTED, COMPLETED, TRUNCATED, EngineEndpoint, Prompt, WeightsRef
from slime_like.rollout.asking import NoAnswer, ask, unlimited_session
from slime_like.rollout.kept_answers import slot_of
from slime_like.rollout.policy import Policy
from slime_like.rollout.prefill import after_prefill
from slime_like.rollout.routed_experts import RoutingShape
from slime_like.utils.activity import Activity

#: How long requests wait at most while too few engines serve; that each of them comes up in time is watched elsewhere.
SERVED_S = 3600.0
#: What sglang-router's policy `manual` goes by (0.3.2); it knows nothing of X-Session-ID.
SESSION_HEADER = "x-smg-routing-key"
#: A user's sampling parameters may hold numpy's numbers, and a logit_bias by token id.
_JSON = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS
_STATUS = {"stop": COMPLETED, "length": TRUNCATED, "abort": ABORTED}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How one kind of rollout samples; training and each evaluation have their own."""

    max_response_tokens: int
    max_context_tokens: int
    temperature: float
    top_p: float
    top_k: int
    stop: list[str] | None
    stop_token_ids: list[int] | None
    skip_special_tokens: bool
    seed: str  # run seed and purpose; each sample derives its own
    min_response_tokens: int = 0

    @classmethod
    def for_training(cls, rollout: RolloutConfig, *, max_context_tokens: int, seed: str) -> Sampling:
        """The --rollout-* flags."""
        return cls(
            max_response_tokens=rollout.rollout_max_response_len,
            max_context_tokens=max_context_tokens,
            temperature=rollout.rollout_temperature,
            top_p=rollout.rollout_top_p,
            top_k=rollout.rollout_top_k,
            stop=rollout.rollout_stop,
            stop_token_ids=rollout.rollout_stop_token_ids,
            skip_special_tokens=rollout.rollout_skip_special_tokens,
            seed=seed,
        )

    def request(self, prompt: Prompt, sample_index: int) -> dict:
        """SGLang's sampling_params for one sample."""
        return {
            "max_new_tokens": max(1, min(self.max_response_tokens, self.max_context_tokens - len(prompt.tokens))),
            **({"min_new_tokens": self.min_response_tokens} if self.min_response_tokens else {}),
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop,
            "stop_token_ids": self.stop_token_ids,
            "skip_special_tokens": self.skip_special_tokens,
            "no_stop_trim": True,  # a stop string is in the tokens that are trained on: rewards see it too
            "spaces_between_special_tokens": False,  # matters to slow tokenizers only; sglang-router 0.3.2 drops it
            # Used by engines with --sglang-enable-deterministic-inference, where a missing seed makes all samples of a
            # group equal.
            "sampling_seed": sample_seed(self.seed, prompt.index, sample_index),
        }


def sample_seed(seed: str, prompt_index: int, sample_index: int) -> int:
    """A 31-bit seed of one sample, derived and never drawn, so that order and restarts do not change it."""
    digest = hashlib.blake2b(f"{seed}/{prompt_index}/{sample_index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Generation:
    """What an engine answered to one request."""

    tokens: list[int]  # the response only
    logprobs: list[float]  # one for each of tokens
    text: str
    status: str  # COMPLETED, TRUNCATED or ABORTED
    weight_version: int  # of the last token
    #: [tokens] int32, where an engine tells that weights changed under the answer; None: all are of weight_version
    weight_versions: np.ndarray | None = None
    #: As records.Sample.routed_experts, for the tokens that were sent and those that came; None unless the client asks
    #: for them.
    routed_experts: np.ndarray | None = None

    @functools.cached_property
    def token_array(self) -> np.ndarray:
        """[response tokens] int32: `tokens`, converted once."""
        return np.array(self.tokens, dtype=np.int32)

    @functools.cached_property
    def logprob_array(self) -> np.ndarray:
        """[response tokens] float32: `logprobs`, converted once."""
        return np.array(self.logprobs, dtype=np.float32)


@dataclasses.dataclass
class _Asked:
    """One request over all its tries. weights: of the adapters that the last one has named."""

    body: dict
    weights: WeightsRef | None = None

    @functools.cached_property
    def whole(self) -> bytes:
        """As it is sent."""
        return orjson.dumps(self.body, option=_JSON)


class GenerationClient:
    """The `/generate` face of a router or engine; handed to custom generate functions as `engine`.

    Create and use it inside one running event loop. concurrency: requests in flight at most. weight_version: gives the
    version to record when an engine does not tell one. adapter: where engines serve adapters, gives those that a
    request names, each try anew: as long as the context is open it needs them.
    engines: requests go to these themselves, to the one with the fewest in flight; (): by way of the router. routing:
    ask for the experts of every token, which needs `engines`, because sglang-router (0.3.2) drops fields that it does
    not know, `return_routed_experts` among them.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None,
        rollout: RolloutConfig,
        *,
        concurrency: int,
        weight_version: Callable[[], int],
        adapter: Callable[[], contextlib.AbstractContextManager[WeightsRef]] | None = None,
        routing: RoutingShape | None = None,
        engines: Sequence[EngineEndpoint] = (),
    ):
        self.url = url.rstrip("/")
        self.routing = routing
        assert not routing or engines, "routed experts are asked of the engines themselves"
        self._engines, self._in_flight = tuple(engines), Counter[EngineEndpoint]()
        self._timeout_s = rollout.rollout_request_timeout_s
        self._tries = rollout.rollout_request_retries
        self._weight_version, self._adapter = weight_version, adapter
        self._serving: Policy | None = None
        self.concurrency, self.prefills = concurrency, rollout.share_prefill == "on"
        self._slots = asyncio.Semaphore(concurrency)
        self._headers = _headers(api_key)
        self.activity = Activity()

    @functools.cached_property
    def _session(self) -> aiohttp.ClientSession:
        """Opened by the first request: whoever is made and never asks leaves nothing open."""
        return unlimited_session()

    async def close(self) -> None:
        """Close all connections."""
        if "_session" in vars(self):
            await self._session.close()

    def wait_for_engines(self, serving: Policy) -> None:
        """From now on requests wait while too few engines serve, and what failed because one died is asked again.

        serving: tells when engines die and are replaced.
        """
        self._serving = serving

    def ask_only(self, engines: Sequence[EngineEndpoint]) -> None:
        """New requests go to these engines themselves."""
        self._engines = tuple(engines)

    async def generate(
        self, tokens: np.ndarray | Sequence[int], sampling_params: dict, *, session: str | None = None
    ) -> Generation:
        """One response to the token ids. Raises EngineError naming the last answer, after all tries or at the deadline.

        The deadline counts from when a slot is free, over all tries. session: requests of one session go to one engine
        where the router keeps to it (--sglang-router-policy manual).
        """
        kept = slot_of(sampling_params, tokens)
        if kept.answer is None or kept.answer.status == ABORTED:
            generation = await self._generated(tokens, sampling_params, session)
            kept.answer = generation if generation.status != ABORTED else None
            return generation
        return kept.answer

    async def _generated(
        self, tokens: np.ndarray | Sequence[int], sampling_params: dict, session: str | None
    ) -> Generation:
        """What engines answer."""
        body = {
            "input_ids": np.ascontiguousarray(tokens, dtype=np.int64),
            "sampling_params": sampling_params,
            "return_logprob": True,
        }
        if self.routing:
            body["return_routed_experts"] = True
        asked = _Asked(body)
        try:
            with self.activity.call():
                answer = await self._asked(functools.partial(self._exchange, asked, session))
        except NoAnswer as error:
            why = {
                "deadline": (
                    f"gave no answer within {self._timeout_s:g} s (--rollout-request-timeout-s). Last heard:"
                    f" {error.last}"
                ),
                "tries": f"failed {self._tries} times (--rollout-request-retries). Last: {error.last}",
                "refused": f"refused the request: {error.last}",
            }
            raise EngineError(f"{self.url}/generate {why[error.kind]}") from error
        generation = self._read(answer, num_sent=len(tokens))
        if asked.weights is not None:  # the engine tells its newest version, also where that changed under the answer
            return dataclasses.replace(generation, weight_version=asked.weights.version, weight_versions=None)
        return generation

    async def _asked(self, exchange: Callable[[], Awaitable[tuple[bytes, int]]]) -> bytes:
        """The answer. What failed because an engine died is asked again when its place is taken."""
        while True:
            changes = 0
            if self._serving is not None:
                await self._serving.served(SERVED_S)
                changes = self._serving.num_engine_changes
            try:
                return await ask(exchange, slots=self._slots, tries=self._tries, timeout_s=self._timeout_s)
            except NoAnswer as error:
                if self._serving is None or error.kind != "tries":
                    raise
                if not await self._serving.changes_after(changes, SERVED_S):
                    raise

    async def _exchange(self, asked: _Asked, session: str | None) -> tuple[bytes, int]:
        """(the answer, its HTTP status); the request names its adapters when it is sent, however long it has waited."""

        def sent(body: dict) -> Awaitable[tuple[bytes, int]]:
            return self._sent(orjson.dumps(body, option=_JSON), session)

        if self._adapter is None:
            await after_prefill(sent)
            return await self._sent(asked.whole, session)
        with self._adapter() as weights:
            asked.weights, named = weights, {"lora_path": str(weights)}
            await after_prefill(lambda body: sent(body | named))
            return await sent(asked.body | named)

    async def _sent(self, body: bytes, session: str | None) -> tuple[bytes, int]:
        """To the router or to an engine."""
        if not self._engines:
            headers = self._headers | {SESSION_HEADER: session} if session else self._headers
            return await self._post(f"{self.url}/generate", body, headers)
        engine = min(self._engines, key=lambda one: self._in_flight[one])
        self._in_flight[engine] += 1
        try:
            # Whatever the session says is the router's key, not an engine's.
            return await self._post(f"{engine.url.rstrip('/')}/generate", body, _headers(engine.api_key))
        finally:
            self._in_flight[engine] -= 1

    async def _post(self, url: str, body: bytes, headers: dict[str, str]) -> tuple[bytes, int]:
        async with self._session.post(url, data=body, headers=headers) as answer:
            return await answer.read(), answer.status

    def _read(self, body: bytes, *, num_sent: int) -> Generation:
        """Check and convert SGLang's answer."""
        try:
            answer = _parsed(body)
            meta = answer["meta_info"]
            reason, version = meta["finish_reason"]["type"], _as_version(meta.get("weight_version"))
            tokens = answer["output_ids"]
            # [log-prob, id, text or null] a token. The parser's own objects are kept: half of the work on an answer is
            # making them.
            entries = meta["output_token_logprobs"] if tokens else []
            chosen = [entry[1] for entry in entries]
            generation = Generation(
                tokens=tokens,
                logprobs=[entry[0] for entry in entries],
                text=answer.get("text") or "",
                status=_STATUS.get(reason, reason),
                weight_version=self._weight_version() if version is None else version,
                weight_versions=token_versions(meta.get("weight_versions"), len(tokens)),
            )
            shapes = {generation.token_array.shape, generation.logprob_array.shape}
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
            raise EngineError(
                f"{self.url}/generate gave an answer that is not SGLang's ({type(error).__name__}: {error}):"
                f" {body[:200].decode(errors='replace')}"
            ) from error
        if chosen != tokens or shapes != {(len(tokens),)}:
            raise EngineError(
                f"{self.url}/generate: {len(tokens)} tokens but log-probs of {len(chosen)}, or of other tokens:"
                f" {tokens[:8]} and {chosen[:8]}"
            )
        if not np.isfinite(generation.logprob_array).all():
            raise EngineError(f"{self.url}/generate gave log-probs that are not finite: {generation.logprobs[:8]}")
        if reason not in _STATUS:
            raise EngineError(f"{self.url}/generate: finish reason {reason!r} is unknown. Known: {', '.join(_STATUS)}")
        if meta.get("prompt_tokens", num_sent) != num_sent:
            raise EngineError(
                f"{self.url}/generate answered to {meta['prompt_tokens']} tokens, but {num_sent} were sent: what was"
                " sampled belongs to another prompt."
            )
        # An aborted request may have been processed only in part; it is never trained on.
        routing = self.routing if _STATUS[reason] != ABORTED else None
        if routing is None:
            return generation
        experts = routing.read(meta.get("routed_experts"), num_tokens=num_sent + len(tokens))
        return dataclasses.replace(generation, routed_experts=experts)


def _headers(api_key: str | None) -> dict[str, str]:
    return {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {api_key}"} if api_key else {})


def _parsed(body: bytes) -> Any:
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return json.loads(body)  # takes what strict JSON has no word for, as NaN, so that an error can name it


def token_versions(spans: Any, count: int) -> np.ndarray | None:
    """[count] int32, each token's weight version by SGLang's spans; None where one version, or none, is named.

    Raises EngineError unless the spans cover the tokens one after the other.
    Example: [{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 2, "end": 3}], 3 -> [1, 1, 2]
    """
    if not isinstance(spans, list) or len(spans) < 2:
        return None
    versions, end = np.empty(count, dtype=np.int32), 0
    for span in spans:
        version = _as_version(span["version"])
        if span["start"] != end or version is None:
            raise EngineError(f"weight versions {spans} do not follow one another over {count} tokens")
        versions[span["start"] : span["end"]] = version
        end = span["end"]
    if end != count:
        raise EngineError(f"weight versions {spans} do not cover {count} tokens")
    return versions


def _as_version(value: Any) -> int | None:
    """An engine's weight version as a number; None for "default" and other names."""
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None
