"""Writers that come together share a commit; each keeps its own fate."""

from __future__ import annotations

import asyncio
import random
import sqlite3
from pathlib import Path

import pytest
import sqlalchemy

from slime_like.tinker.store.database import Database
from slime_like.tinker.store.tables import SessionRow


def row(name: str) -> SessionRow:
    return SessionRow(id=name, tenant="ann", created=0, last_heartbeat=0)


def on_disk(path: Path) -> set[str]:
    """What another connection sees."""
    with sqlite3.connect(path) as connection:
        return {name for (name,) in connection.execute("SELECT id FROM sessions")}


async def open_counted(path: Path) -> tuple[Database, list[int]]:
    database = Database(str(path))
    await database.upgrade()
    commits: list[int] = []
    sqlalchemy.event.listen(database._engine.sync_engine, "commit", lambda _: commits.append(1))
    return database, commits


def test_many_at_once_are_few_commits_and_each_is_on_disk_when_its_block_ends(tmp_path: Path):
    async def run() -> int:
        database, commits = await open_counted(tmp_path / "a.db")

        async def write(number: int) -> None:
            async with database.write() as session:
                session.add(row(f"s{number}"))
            assert f"s{number}" in on_disk(tmp_path / "a.db")

        await asyncio.gather(*(write(number) for number in range(200)))
        await database.close()
        return len(commits)

    assert 200 / 64 <= asyncio.run(run()) <= 10


def test_a_lone_writer_commits_at_once(tmp_path: Path):
    async def run() -> int:
        database, commits = await open_counted(tmp_path / "a.db")
        for number in range(5):
            async with database.write() as session:
                session.add(row(f"s{number}"))
        await database.close()
        return len(commits)

    assert asyncio.run(run()) == 5


@pytest.mark.parametrize("seed", range(4))
def test_writers_that_fail_or_are_cancelled_take_nobody_with_them(tmp_path: Path, seed: int):
    """Each of 60 writes two rows with a pause between; some raise there, some are cancelled at any moment."""
    source = random.Random(seed)

    async def run() -> None:
        database, _ = await open_counted(tmp_path / "a.db")

        async def write(name: str, fails: bool) -> None:
            async with database.write() as session:
                session.add(row(f"{name}-1"))
                await session.flush()
                await asyncio.sleep(0)
                if fails:
                    raise ZeroDivisionError
                session.add(row(f"{name}-2"))

        fates = {f"w{n}": source.choice(["ends", "ends", "raises", "cancelled"]) for n in range(60)}
        tasks = {name: asyncio.create_task(write(name, fate == "raises")) for name, fate in fates.items()}
        for name, fate in fates.items():
            await asyncio.sleep(source.choice([0, 0, 0.001]))
            if fate == "cancelled":
                tasks[name].cancel()
        async with asyncio.timeout(20):
            results = dict(zip(tasks, await asyncio.gather(*tasks.values(), return_exceptions=True), strict=True))
        rows = on_disk(tmp_path / "a.db")
        for name, fate in fates.items():
            both = {f"{name}-1", f"{name}-2"}
            if fate == "ends":
                assert results[name] is None and both <= rows
            elif fate == "raises":
                assert isinstance(results[name], ZeroDivisionError) and not both & rows
            else:  # too late, or undone; never half
                assert both & rows in (set(), both)
                assert results[name] is not None or both <= rows
        async with asyncio.timeout(5), database.write() as session:  # and it goes on
            session.add(row("last"))
        await database.close()

    asyncio.run(run())
