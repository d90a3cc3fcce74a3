"""A service that dies at a chosen moment, before or after any commit or verb of the trainer; a client that goes on."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from sqlalchemy.ext.asyncio import AsyncSession

from slime_like.tinker.execution.settings import ServiceSettings
from slime_like.tinker.records import Call, CallFailure, CallResult
from slime_like.tinker.service import CallService
from slime_like.tinker.store.database import Database
from tests.helpers.tinker_backends import VectorEngines, VectorTrainer
from tests.helpers.tinker_service import WAIT_S


class Moments:
    """Counts moments; from number `last` on, everything that comes to one stays there for ever."""

    def __init__(self, last: int | None = None):
        self.count, self._last = 0, last
        self.names: list[str] = []
        self.dead = asyncio.Event()

    async def pass_by(self, name: str) -> None:
        """One moment."""
        self.count += 1
        self.names.append(name)
        if self._last is not None and self.count >= self._last:
            self.dead.set()
            await asyncio.Event().wait()


class MortalDatabase(Database):
    """Each write is two moments: before its commit, and after."""

    def __init__(self, url: str, moments: Moments):
        super().__init__(url)
        self._moments = moments

    @contextlib.asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncSession]:
        """As Database.write."""
        async with super().write() as session:
            yield session
            await self._moments.pass_by("before commit")
        await self._moments.pass_by("after commit")


class MortalTrainer(VectorTrainer):
    """Each verb is two moments: before it, and after."""

    def __init__(self, moments: Moments):
        super().__init__()
        self._moments = moments

    async def _verb(self, *what: object) -> None:
        await self._moments.pass_by(f"before {what[0]}")
        await super()._verb(*what)
        await self._moments.pass_by(f"after {what[0]}")


@dataclasses.dataclass
class MortalService:
    """A service that is started anew when it dies; the trainer and the engines die with it."""

    folder: Path
    settings: dict[str, Any]
    moments: Moments
    service: CallService | None = None
    num_deaths: int = 0

    async def start(self) -> None:
        """Begin, on what there is."""
        numbers = {"state_folder": str(self.folder / "state"), "weights_folder": str(self.folder / "weights")}
        database = MortalDatabase(f"sqlite:///{self.folder / 'server.db'}", self.moments)
        if not self.num_deaths:
            await database.upgrade()
        self.service = CallService(
            database,
            MortalTrainer(self.moments),
            VectorEngines(),
            ServiceSettings(**(numbers | self.settings)),
            staging=self.folder / "staging",
        )
        await self.service.start()

    async def _bury(self) -> None:
        """What a kill does: everything stops where it is; nothing is saved, and open transactions are undone."""
        assert self.service is not None
        tasks = [*self.service._tasks, *self.service.training.writing]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.service.database.close()
        self.num_deaths += 1
        self.moments = Moments()
        await self.start()

    async def do(self, call: Call) -> CallResult | CallFailure:
        """A call's answer, asked for again where the service died over it."""
        while True:
            attempt = asyncio.create_task(self._once(call))
            death = asyncio.create_task(self.moments.dead.wait())
            await asyncio.wait({attempt, death}, return_when=asyncio.FIRST_COMPLETED, timeout=WAIT_S)
            if attempt.done() and not death.done():
                death.cancel()
                return attempt.result()
            assert death.done(), f"no answer to {call.kind} {call.seq_id} in {WAIT_S} s"
            attempt.cancel()
            await asyncio.gather(attempt, return_exceptions=True)
            await self._bury()

    async def _once(self, call: Call) -> CallResult | CallFailure:
        assert self.service is not None
        request_id = await self.service.submit(call)
        answer = await self.service.result(request_id, tenant=call.tenant, timeout_s=WAIT_S)
        assert isinstance(answer, CallResult | CallFailure), answer
        return answer

    async def close(self) -> None:
        """End it well."""
        assert self.service is not None
        await self.service.close()
        await self.service.database.close()
