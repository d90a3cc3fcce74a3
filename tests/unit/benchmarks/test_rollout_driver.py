"""The benchmark's arithmetic, by hand, and that its bound reads what the engine sends."""

from __future__ import annotations

import asyncio
import runpy
from pathlib import Path

import pytest


@pytest.fixture
def rollout_driver(repo_root: Path, monkeypatch) -> dict:
    monkeypatch.syspath_prepend(str(repo_root / "benchmarks"))
    return runpy.run_path(str(repo_root / "benchmarks" / "rollout_driver.py"))


def row(kind: str, count: int, cpu_us: float) -> dict:
    return {"kind": kind, "count": count, "cpu_us": cpu_us}


def test_ratios_are_taken_where_both_were_measured(rollout_driver: dict):
    rows = [row("driver", 1000, 400), row("library", 1000, 100), row("bytes", 1000, 100)]
    rows += [row("driver", 10_000, 300), row("library", 10_000, 200), row("bytes", 10_000, 120)]
    rows += [row("driver", 100_000, 360), row("queue", 100_000, 1)]
    assert rollout_driver["ratios"](rows) == pytest.approx(
        {"driver/library": 1.5, "driver/bytes": 2.5, "driver_per_sample_last/first": 0.9}
    )


def test_the_bare_connection_puts_an_answer_together(rollout_driver: dict):
    class Transport:
        def write(self, request: bytes) -> None:
            assert request == b"ask"

    async def main() -> list[bytes]:
        connection, answers = rollout_driver["BareConnection"](), []
        connection.connection_made(Transport())
        for pieces in ((b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhe", b"llo"), (b"Content-Length: 2\r\n\r\nok",)):
            answer = connection.send(b"ask")
            for piece in pieces:
                connection.data_received(piece)
            answers.append(await answer)
        return answers

    assert asyncio.run(main()) == [b"hello", b"ok"]


def test_an_answer_is_of_the_size_that_the_goal_names(rollout_driver: dict):
    ids, logprobs, text = rollout_driver["scripted_answer"]()
    assert len(ids) == len(logprobs) == len(text) // 4 == 512 and max(logprobs) <= 0
    assert 20_000 < len(rollout_driver["engine_answer"]()) < 30_000
