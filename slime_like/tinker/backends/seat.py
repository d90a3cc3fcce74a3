"""What one engine holds, and who uses it: adapters over the base model, or the whole weights of one sampler in its
place.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import logging
from collections.abc import AsyncIterator

from slime_like.errors import EngineError, RunError
from slime_like.records import EngineEndpoint
from slime_like.sglang_backend.adapter_client import AdapterClient
from slime_like.sglang_backend.client import EngineHttpError

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampler:
    """What samples are asked of. folder None: the base model; is_whole: an HF folder, else a PEFT one."""

    id: str
    folder: str | None
    is_whole: bool = False

    @property
    def base(self) -> str | None:
        """Whose whole weights an engine must hold for it; None: the base model's."""
        return self.id if self.is_whole else None

    @property
    def has_adapter(self) -> bool:
        """Whether it is an adapter over the base model."""
        return self.folder is not None and not self.is_whole


class EngineSeat:
    """One engine's weights. An adapter that does not fit takes the place of the one that was used longest ago, which
    comes back when it is asked for; whole weights take the place of the base model's once nothing else runs.

    capacity: adapters that the engine holds; deadline_s: for room, and for one load; concurrency: requests in flight.
    """

    def __init__(
        self,
        endpoint: EngineEndpoint,
        *,
        base_folder: str,
        capacity: int,
        deadline_s: float,
        concurrency: int,
    ):
        self.endpoint = endpoint
        self.slots = asyncio.Semaphore(concurrency)
        self.requests = 0  # in flight
        self._client = AdapterClient(endpoint, timeout_s=deadline_s)
        self._base_folder, self._capacity, self._deadline_s = base_folder, capacity, deadline_s
        self._base: str | None = None
        self._names: collections.OrderedDict[str, str] = collections.OrderedDict()  # sampler -> adapter, used last last
        self._users: collections.Counter[str | None] = collections.Counter()  # sampler, None for the base -> requests
        self._loads = 0
        self._turn = asyncio.Lock()  # in the order of arrival, so that nobody waits for ever
        self._freed = asyncio.Condition()

    def cost(self, sampler: Sampler) -> int:
        """How long a request of this sampler's would wait here, in requests: what runs, what must be loaded first."""
        loads = 4 * (sampler.has_adapter and sampler.id not in self._names)
        return self.requests + loads + 16 * (sampler.base != self._base)

    @contextlib.asynccontextmanager
    async def serving(self, sampler: Sampler) -> AsyncIterator[str | None]:
        """The engine holds the sampler's weights meanwhile; gives the adapter's name, None for none.

        Raises RunError where no room comes or the engine refuses the weights, EngineHttpError without a status where it
        does not answer.
        """
        self.requests += 1
        try:
            try:
                async with asyncio.timeout(self._deadline_s):
                    name = await self._take(sampler)
            except TimeoutError:
                raise RunError(
                    f"engine {self.endpoint.index} had no room for {sampler.id} within {self._deadline_s:.0f} s: it"
                    f" holds {self._base or 'the base model'} with {len(self._names)} adapters of at most"
                    f" {self._capacity}, and all are used. Fix: more engines, or a larger max_cpu_loras."
                ) from None
            try:
                yield name
            finally:
                await self._leave(sampler)
        finally:
            self.requests -= 1

    async def forget(self, sampler: Sampler) -> None:
        """Unload an adapter once its last request has ended; nothing to do for one that is not here."""
        if not sampler.has_adapter or sampler.id not in self._names:
            return
        while True:
            await self._until(lambda: not self._users[sampler.id])
            async with self._turn:
                if not self._users[sampler.id]:
                    return await self._unload(sampler.id)

    async def _take(self, sampler: Sampler) -> str | None:
        async with self._turn:
            if self._base != sampler.base:
                await self._until(lambda: not self._users.total())
                await self._load_base(sampler)
            if sampler.has_adapter and sampler.id not in self._names:
                await self._load(sampler)
            name = self._names.get(sampler.id)
            if name is not None:
                self._names.move_to_end(sampler.id)
            self._users[sampler.id] += 1
            return name

    async def _leave(self, sampler: Sampler) -> None:
        async with self._freed:
            self._users[sampler.id] -= 1
            if not self._users[sampler.id]:
                del self._users[sampler.id]
            self._freed.notify_all()

    async def _until(self, condition) -> None:
        async with self._freed:
            await self._freed.wait_for(condition)

    async def _load(self, sampler: Sampler) -> None:
        assert sampler.folder is not None
        while len(self._names) >= self._capacity:
            await self._until(lambda: any(not self._users[known] for known in self._names))
            await self._unload(next(known for known in self._names if not self._users[known]))
        # A name of its own for each load: one whose answer never came may be there under the last.
        self._loads += 1
        name = f"{sampler.id}@{self._loads}"
        await _shielded(asyncio.to_thread(_loading, self._client, name, sampler.folder))
        self._names[sampler.id] = name

    async def _unload(self, sampler_id: str) -> None:
        name = self._names.pop(sampler_id, None)
        if name is not None:
            await _shielded(asyncio.to_thread(self._client.unload_adapter, name))

    async def _load_base(self, sampler: Sampler) -> None:
        """Whole weights; adapters stay loaded, and are not used over another base than theirs."""
        folder = (sampler.folder if sampler.is_whole else None) or self._base_folder
        self._base = f"half of {sampler.id}"  # whatever comes in between, the next one loads again
        await _shielded(asyncio.to_thread(_loading_whole, self._client, folder))
        self._base = sampler.base


def _loading(client: AdapterClient, name: str, folder: str) -> None:
    try:
        client.load_adapter(name, folder)
    except EngineHttpError as error:
        raise _refused(error, folder) from error


def _loading_whole(client: AdapterClient, folder: str) -> None:
    try:
        client.update_weights_from_disk(folder)
        client.flush_cache()
    except EngineHttpError as error:
        raise _refused(error, folder) from error


def _refused(error: EngineHttpError, folder: str) -> EngineError:
    """An answer is about the weights; no answer is about the engine, and stays what it is."""
    return error if error.status is None else EngineError(f"an engine does not take the weights in {folder}: {error}")


async def _shielded(work) -> None:
    """Wait for work that goes on, and changes an engine, even where nobody waits any more: then the end of it comes
    first.
    """
    task = asyncio.ensure_future(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.warning("%s", error)
        raise
