"""Samples from real engines: SGLang servers of the fleet, each with many clients' adapters over the base model, or with
the whole weights of one client who trains them all.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import json
import logging
import os
from collections.abc import Sequence
from typing import Any, Protocol

import orjson

from slime_like.config.lora import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from slime_like.errors import EngineError, RunError, WaitTimeout
from slime_like.records import EngineEndpoint
from slime_like.rollout.asking import NoAnswer, ask, unlimited_session
from slime_like.sglang_backend.client import EngineHttpError
from slime_like.tinker.backends.sample_bodies import EngineLimits, check_job, read_answers, request_body
from slime_like.tinker.backends.seat import EngineSeat, Sampler
from slime_like.tinker.errors import BackendLost
from slime_like.tinker.records import SampleJob, SampleResult

logger = logging.getLogger(__name__)

_JSON = orjson.OPT_SERIALIZE_NUMPY
#: How often a question is asked of an engine that does not answer, before it is looked after.
_TRIES = 2


class Fleet(Protocol):
    """The engines as processes: those that serve, and new ones for those that have died."""

    @property
    def endpoints(self) -> Sequence[EngineEndpoint]:
        """Of the engines that serve."""

    def revive(self) -> list[str]:
        """Start new engines for dead ones, and wait until they are healthy; why each has died. Raises RunError."""

    def close(self) -> None:
        """End the engines."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """base_folder: HF folder of the base model; max_adapters: that an engine holds; max_rank: of an adapter;
    concurrency: requests in flight per engine; load_deadline_s: for room and a load.
    """

    base_folder: str
    limits: EngineLimits
    max_adapters: int
    max_rank: int
    concurrency: int = 512
    request_timeout_s: float = 600.0
    load_deadline_s: float = 120.0


class EngineSampling:
    """The SamplingBackend over a fleet. Make and use it inside one running event loop."""

    def __init__(self, fleet: Fleet, options: SamplingOptions):
        self._fleet, self._options = fleet, options
        self._samplers: dict[str, Sampler] = {}
        self._seats: dict[EngineEndpoint, EngineSeat] = {}
        self._reviving = asyncio.Lock()
        self._round = 0  # of revivals
        self._releasing: set[asyncio.Task] = set()
        self._take_seats()

    @functools.cached_property
    def _session(self):
        return unlimited_session()

    def _take_seats(self) -> None:
        endpoints, options = tuple(self._fleet.endpoints), self._options
        self._seats = {
            endpoint: self._seats.get(endpoint)
            or EngineSeat(
                endpoint,
                base_folder=options.base_folder,
                capacity=options.max_adapters,
                deadline_s=options.load_deadline_s,
                concurrency=options.concurrency,
            )
            for endpoint in endpoints
        }

    async def open(self, sampler_id: str, folder: str | None) -> None:
        """Serve a folder of save_sampler's (None: the base) under this id; an engine loads it when it is asked for.

        Raises RunError where no engine could load it.
        """
        known = self._samplers.get(sampler_id)
        if known is not None and known.folder == folder:
            return
        if known is not None:
            raise RunError(f"sampler {sampler_id} is of {known.folder or 'the base model'} already, not of {folder}.")
        self._samplers[sampler_id] = await asyncio.to_thread(read_sampler, sampler_id, folder, self._options.max_rank)

    async def sample(self, job: SampleJob) -> SampleResult:
        """Generate. Raises RunError for the client's mistakes, BackendLost when the engine died meanwhile."""
        sampler = self._samplers.get(job.sampler_id)
        if sampler is None:
            raise RunError(f"sampler {job.sampler_id} is not open.")
        max_tokens = check_job(job, self._options.limits)
        round_before = self._round
        if not self._seats:
            raise await self._lost(EngineError("no engine is up"), round_before)
        seat = min(self._seats.values(), key=lambda one: one.cost(sampler))
        try:
            async with seat.serving(sampler) as adapter:
                body = request_body(job, max_tokens, adapter, self._options.limits)
                answers = await self._asked(seat, body)
        except EngineHttpError as error:
            raise await self._lost(error, round_before) from error
        except WaitTimeout as error:
            raise await self._lost(error, round_before) from error
        except NoAnswer as error:
            if error.kind == "refused":
                raise RunError(f"engine {seat.endpoint.index} refused the request: {error.last}") from error
            raise await self._lost(error, round_before) from error
        return read_answers(job, answers, adapter or sampler.base or "base")

    async def release(self, sampler_id: str) -> None:
        """Forget it once its last request has ended."""
        sampler = self._samplers.pop(sampler_id, None)
        if sampler is not None:
            for seat in self._seats.values():
                task = asyncio.create_task(self._forget(seat, sampler))
                self._releasing.add(task)
                task.add_done_callback(self._releasing.discard)

    async def close(self) -> None:
        """End the engines."""
        for task in self._releasing:
            task.cancel()
        await asyncio.gather(*self._releasing, return_exceptions=True)
        if "_session" in vars(self):
            await self._session.close()
        await asyncio.to_thread(self._fleet.close)

    async def _forget(self, seat: EngineSeat, sampler: Sampler) -> None:
        try:
            await seat.forget(sampler)
        except RunError as error:  # it makes room by itself, or the engine is gone
            logger.warning("engine %d keeps sampler %s: %s", seat.endpoint.index, sampler.id, error)

    async def _asked(self, seat: EngineSeat, body: dict[str, Any]) -> Any:
        endpoint = seat.endpoint
        headers = {"Content-Type": "application/json"}
        if endpoint.api_key:
            headers["Authorization"] = f"Bearer {endpoint.api_key}"
        data = orjson.dumps(body, option=_JSON)

        async def exchange() -> tuple[bytes, int]:
            async with self._session.post(f"{endpoint.url}/generate", data=data, headers=headers) as answer:
                return await answer.read(), answer.status

        answer = await ask(exchange, slots=seat.slots, tries=_TRIES, timeout_s=self._options.request_timeout_s)
        try:
            return orjson.loads(answer)
        except orjson.JSONDecodeError:
            return json.loads(answer)  # takes NaN, so that what it is can be named

    async def _lost(self, error: Exception, round_before: int) -> RunError:
        """What to raise where an engine did not answer: those that have died are started anew first, once for all who
        noticed.
        """
        async with self._reviving:
            if self._round == round_before:
                try:
                    deaths = await asyncio.to_thread(self._fleet.revive)
                except RunError as failure:
                    return BackendLost(f"an engine died, and none could be started in its place: {failure}")
                finally:
                    self._take_seats()
                if not deaths:
                    return EngineError(f"an engine gave no answer, and has not died: {error}")
                self._round += 1
                logger.warning("engines were started anew: %s", "; ".join(deaths))
        return BackendLost(f"an engine died, and was started anew: {error}")


def read_sampler(sampler_id: str, folder: str | None, max_rank: int) -> Sampler:
    """What a folder holds: PEFT's adapters, or a whole model. Raises RunError where it is neither, or does not fit."""
    if folder is None:
        return Sampler(id=sampler_id, folder=None)
    folder = os.path.abspath(folder)
    path = os.path.join(folder, ADAPTER_CONFIG)
    if not os.path.isfile(path):
        if not os.path.isfile(os.path.join(folder, "config.json")):
            raise RunError(f"sampler {sampler_id}: {folder} has neither {ADAPTER_CONFIG} nor config.json.")
        return Sampler(id=sampler_id, folder=folder, is_whole=True)
    try:
        with open(path, encoding="utf-8") as file:
            rank = int(json.load(file)["r"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(f"sampler {sampler_id}: {path} cannot be read: {error}") from error
    if not os.path.isfile(os.path.join(folder, ADAPTER_WEIGHTS)):
        raise RunError(f"sampler {sampler_id}: {folder} has no {ADAPTER_WEIGHTS}.")
    if rank > max_rank:
        raise RunError(f"sampler {sampler_id}: rank {rank} is above --max-lora-rank {max_rank}.")
    return Sampler(id=sampler_id, folder=folder)
