"""Both databases have the tables that tables.py says, and what was committed is there."""

# Covers slime_like.tinker.store.migrations.

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import text

from slime_like.errors import ConfigError
from slime_like.tinker.store.__main__ import main
from slime_like.tinker.store.database import Database, database_url, upgrade
from slime_like.tinker.store.tables import Base, SessionRow
from tests.helpers.postgres import postgres_server


@pytest.fixture(scope="module", params=["sqlite", pytest.param("postgresql", marks=pytest.mark.slow)])
def url(request, tmp_path_factory) -> Iterator[str]:
    if request.param == "sqlite":
        yield f"sqlite:///{tmp_path_factory.mktemp('database') / 'server.db'}"
        return
    with postgres_server() as address:
        yield address


def differences(url: str) -> list:
    """What alembic would change so that the database is as tables.py says."""
    engine = sqlalchemy.create_engine(str(database_url(url)).replace("+aiosqlite", "").replace("+asyncpg", ""))
    try:
        with engine.connect() as connection:
            return compare_metadata(MigrationContext.configure(connection), Base.metadata)
    finally:
        engine.dispose()


def test_the_migrations_end_where_tables_py_says(url: str):
    upgrade(url)
    upgrade(url)  # again: nothing to do
    assert differences(url) == []


def test_a_difference_is_seen(tmp_path: Path):
    url = f"sqlite:///{tmp_path / 'other.db'}"
    upgrade(url)
    with sqlite3.connect(tmp_path / "other.db") as connection:
        connection.execute("ALTER TABLE models DROP COLUMN num_steps")
    assert [change[0] for change in differences(url)] == ["add_column"]


def test_what_raised_is_not_written(url: str):
    async def run() -> list[str]:
        database = Database(url)
        await database.upgrade()
        async with database.write() as session:
            session.add(SessionRow(id="kept", tenant="ann", created=1.5, last_heartbeat=1.5))
        with pytest.raises(ZeroDivisionError):
            async with database.write() as session:
                session.add(SessionRow(id="lost", tenant="ann", created=1.5, last_heartbeat=1.5))
                await session.flush()
                raise ZeroDivisionError
        async with database.read() as session:
            ids = (await session.scalars(sqlalchemy.select(SessionRow.id))).all()
        await database.close()
        return list(ids)

    assert asyncio.run(run()) == ["kept"]


def test_reading_does_not_wait_for_writing(url: str):
    async def run() -> None:
        database = Database(url)
        await database.upgrade()
        async with database.write() as writing, asyncio.timeout(5):
            await writing.execute(text("DELETE FROM samplers"))
            async with database.read() as reading:
                await reading.execute(text("SELECT count(*) FROM samplers"))
        await database.close()

    asyncio.run(run())


def test_sqlite_syncs_every_commit_and_keeps_little_in_memory(tmp_path: Path):
    async def run() -> list:
        database = Database(str(tmp_path / "server.db"))
        await database.upgrade()
        async with database.read() as session:
            values = [
                (await session.execute(text(f"PRAGMA {name}"))).scalar()
                for name in ("journal_mode", "synchronous", "cache_size")
            ]
        await database.close()
        return values

    assert asyncio.run(run()) == ["wal", 2, -512]  # 2 is FULL; KiB a connection


def test_many_writers_at_once(url: str):
    async def run() -> int:
        database = Database(url)
        await database.upgrade()

        async def add(number: int) -> None:
            async with database.write() as session:
                session.add(SessionRow(id=f"many-{number}", tenant="ann", created=0, last_heartbeat=0))

        await asyncio.gather(*(add(number) for number in range(50)))
        async with database.read() as session:
            query = text("SELECT count(*) FROM sessions WHERE id LIKE 'many-%'")
            count = (await session.execute(query)).scalar()
        await database.close()
        return int(count or 0)

    assert asyncio.run(run()) == 50


def test_the_command(tmp_path: Path, capsys):
    url = f"sqlite:///{tmp_path / 'below' / 'server.db'}"
    command = [sys.executable, "-m", "slime_like.tinker.store", "upgrade", "--db", url]
    subprocess.run(command, check=True, timeout=60)
    assert differences(url) == []
    assert main(["upgrade", "--db", "mysql://host/name"]) == 2
    assert "no database for this" in capsys.readouterr().err


@pytest.mark.parametrize("wrong", ["mysql://host/name", "sqlite://"])
def test_a_wrong_url_is_refused(wrong: str):
    with pytest.raises(ConfigError, match="is no database for this"):
        database_url(wrong)
