"""Many small transactions on SQLite for one fsync."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, AsyncSession
from sqlalchemy.orm.session import JoinTransactionMode

#: Writers that share a commit at most, so that the first of them does not wait for ever.
MOST = 64


class _Group:
    """A transaction that several writers are in, all but the first in a savepoint of their own."""

    def __init__(self, connection: AsyncConnection):
        self.connection = connection
        self.num_writers = 0
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()


class GroupCommit:
    """Writers one after the other; a writer that others wait behind leaves the commit to them.

    So a lone writer's commit is not put off, and n that come together wait for one fsync instead of n. Each is told
    only when its commit is on disk, and what one of them undoes is undone alone.
    """

    def __init__(self, engine: AsyncEngine):
        self._engine = engine
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self._group: _Group | None = None
        self._left_over: asyncio.Future[None] | None = None  # a commit that nobody else is there for

    @contextlib.asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncSession]:
        """As Database.write."""
        await self._take_turn()
        group = None
        try:
            group = await self._join()
            # The first needs no savepoint: what it undoes is all that there is.
            mode: JoinTransactionMode = "create_savepoint" if group.num_writers else "rollback_only"
            session = AsyncSession(group.connection, join_transaction_mode=mode, expire_on_commit=False)
            async with session, session.begin():
                yield session
            group.num_writers += 1
        finally:
            # Shielded: a writer that is cancelled here still commits what the others have written.
            await asyncio.shield(asyncio.ensure_future(self._leave()))
        await asyncio.shield(group.ended)

    async def _take_turn(self) -> None:
        self._num_waiting += 1
        try:
            await self._turn.acquire()
        except asyncio.CancelledError:
            self._num_waiting -= 1
            if not self._num_waiting and self._group is not None:
                # It was the one that the commit was left to.
                self._left_over = asyncio.ensure_future(self._commit_in_turn())
            raise
        self._num_waiting -= 1

    async def _commit_in_turn(self) -> None:
        async with self._turn:
            if not self._num_waiting:
                await self._commit()

    async def _join(self) -> _Group:
        if self._group is None:
            connection = await self._engine.connect()
            try:
                await connection.begin()
            except BaseException:
                await connection.close()
                raise
            self._group = _Group(connection)
        return self._group

    async def _leave(self) -> None:
        try:
            group = self._group
            if group is not None and (not self._num_waiting or group.num_writers >= MOST or not group.num_writers):
                await self._commit()
        finally:
            self._turn.release()

    async def _commit(self) -> None:
        group, self._group = self._group, None
        if group is None:
            return
        if not group.num_writers:  # its only writer has failed
            await group.connection.close()
            return
        try:
            await group.connection.commit()
        except BaseException as error:
            group.ended.set_exception(error)
            raise
        else:
            group.ended.set_result(None)
        finally:
            await group.connection.close()
