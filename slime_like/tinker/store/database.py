"""The database that a URL names: SQLite in a file, or PostgreSQL."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import time
from collections.abc import AsyncIterator
from pathlib import Path

import alembic.command
import alembic.config
import sqlalchemy
from sqlalchemy.engine import URL, Connection, make_url
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine

from slime_like.errors import ConfigError
from slime_like.tinker.store.group_commit import GroupCommit

MIGRATIONS = Path(__file__).parent / "migrations"
#: How long a transaction waits for another process's (the keys' command writes too).
BUSY_S = 30
#: Names this program's lock among a PostgreSQL's.
_LOCK = 7_433_001_547


def database_url(text: str) -> URL:
    """`sqlite:///FILE`, `postgresql://USER@HOST/NAME`, or a path, with the driver that the server uses.

    Raises ConfigError for any other.
    """
    url = make_url(text) if "://" in text else URL.create("sqlite", database=text)
    drivers = {"sqlite": "sqlite+aiosqlite", "postgresql": "postgresql+psycopg", "postgres": "postgresql+psycopg"}
    dialect = url.drivername.partition("+")[0]
    if dialect not in drivers or (dialect == "sqlite" and not url.database):
        raise ConfigError(
            [f"{text} is no database for this: sqlite:///FILE or postgresql://USER:PASSWORD@HOST:PORT/NAME is."]
        )
    return url.set(drivername=drivers[dialect])


class Database:
    """Sessions on the tables. A transaction that has ended is on disk.

    SQLite: WAL, so that reading never waits for writing, with synchronous=FULL: a commit returns after the log's
    fsync, so what was acknowledged survives a kill -9 and a loss of power too (NORMAL would lose the last commits in
    the latter). One writer at a time, as SQLite has it; those that come meanwhile share one commit (GroupCommit).
    PostgreSQL: synchronous_commit as the server has it, which is the same promise by default.
    """

    def __init__(self, url: str):
        self.url = database_url(url)
        self.is_sqlite = self.url.get_backend_name() == "sqlite"
        self._engine: AsyncEngine = _engine(self.url, is_sqlite=self.is_sqlite)
        self._sessions = async_sessionmaker(self._engine, expire_on_commit=False)
        self._writers = GroupCommit(self._engine.execution_options(writes=True))
        self._claim = contextlib.AsyncExitStack()

    @contextlib.asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncSession]:
        """A session that sees one moment's state, and changes nothing."""
        async with self._sessions() as session:
            yield session

    @contextlib.asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncSession]:
        """One transaction: all of it is on disk when the block has ended, or nothing where it raised."""
        if self.is_sqlite:
            async with self._writers.write() as session:
                yield session
            return
        async with self._sessions() as session, session.begin():
            yield session

    async def upgrade(self) -> None:
        """Bring the tables to what this version wants."""
        await asyncio.to_thread(upgrade, str(self.url.render_as_string(hide_password=False)))

    async def claim(self, wait_s: float = 10.0) -> None:
        """Be the only server on this database until `close`, or the process's end.

        Raises ConfigError where another one is and does not end within wait_s.
        """
        deadline = time.monotonic() + wait_s
        while not await self._try_claim():
            if time.monotonic() > deadline:
                raise ConfigError([f"another server uses {self.url.render_as_string()}. Fix: end it, or another --db."])
            await asyncio.sleep(0.1)

    async def _try_claim(self) -> bool:
        if self.is_sqlite:
            file = open(f"{self.url.database}.lock", "w")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                file.close()
                return False
            self._claim.callback(file.close)
            return True
        connection = await self._engine.connect()
        locked = (await connection.exec_driver_sql(f"SELECT pg_try_advisory_lock({_LOCK})")).scalar()
        await connection.commit()  # the lock is the connection's, not the transaction's
        if locked:
            self._claim.push_async_callback(connection.close)
        else:
            await connection.close()
        return bool(locked)

    async def close(self) -> None:
        """Close all connections."""
        await self._claim.aclose()
        await self._engine.dispose()


def _engine(url: URL, *, is_sqlite: bool) -> AsyncEngine:
    if not is_sqlite:
        return create_async_engine(url, pool_size=8, max_overflow=8, pool_pre_ping=True, pool_timeout=BUSY_S)
    # isolation_level None: the driver begins no transactions on its own, so that ours can be IMMEDIATE.
    arguments = {"timeout": BUSY_S, "isolation_level": None}
    # No overflow: a connection is a thread of aiosqlite's, and threads that come and go leave their heaps behind.
    engine = create_async_engine(url, connect_args=arguments, pool_size=16, max_overflow=0, pool_timeout=BUSY_S)
    sqlalchemy.event.listen(engine.sync_engine, "connect", _set_up_sqlite)
    sqlalchemy.event.listen(engine.sync_engine, "begin", _begin_sqlite)
    return engine


def _set_up_sqlite(connection, _) -> None:
    cursor = connection.cursor()
    # A cache of 512 KiB (of 2 MB by default) for each connection: pages are in the system's cache too.
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "cache_size=-512"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    # A transaction that reads and then writes fails at once where another process has written in between; one that
    # says so at its start waits.
    writes = connection.get_execution_options().get("writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def upgrade(url: str, revision: str = "head") -> None:
    """Run alembic's migrations on the database that `url` names, whose file's folder is created if need be."""
    parsed = database_url(url)
    if parsed.get_backend_name() == "sqlite" and parsed.database != ":memory:":
        Path(str(parsed.database)).parent.mkdir(parents=True, exist_ok=True)
    config = alembic.config.Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    plain = parsed.set(drivername="sqlite+pysqlite") if parsed.get_backend_name() == "sqlite" else parsed
    engine = sqlalchemy.create_engine(plain, poolclass=sqlalchemy.pool.NullPool)
    try:
        with engine.begin() as connection:
            config.attributes["connection"] = connection
            alembic.command.upgrade(config, revision)
    finally:
        engine.dispose()
