"""A row is read once while it is young; its absence every time."""

from __future__ import annotations

import asyncio

from slime_like.tinker.execution.recent_rows import RecentRows


def test_young_rows_are_not_read_again():
    rows, reads = {"a": 1}, []

    async def read(key: str) -> int | None:
        reads.append(key)
        return rows.get(key)

    async def run() -> None:
        recent = RecentRows(read, max_age_s=0.05)
        assert [await recent.get("a") for _ in range(3)] == [1, 1, 1] and reads == ["a"]
        assert [await recent.get("b") for _ in range(2)] == [None, None] and reads == ["a", "b", "b"]
        rows["a"] = 2
        recent.forget("a")
        assert await recent.get("a") == 2
        rows["a"] = 3
        await asyncio.sleep(0.1)
        assert await recent.get("a") == 3

    asyncio.run(run())


def test_rows_that_are_old_take_no_memory():
    async def read(key: str) -> str:
        return key

    async def run() -> int:
        recent = RecentRows(read, max_age_s=0.05)
        for number in range(100):
            await recent.get(str(number))
        await asyncio.sleep(0.1)
        assert await recent.get("0") == "0"
        return len(recent)

    assert asyncio.run(run()) == 1
