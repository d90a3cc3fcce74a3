"""Scoring processes: ended when stuck, replaced when dead, none left behind."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import time

import pytest

from slime_like.errors import RewardError
from slime_like.rollout.rewards.pool import ANSWER_CPU_S, WorkerPool

#: math-verify computes this power with all its digits: minutes in one call of Python's integer arithmetic.
ENDLESS = "\\boxed{7^{9^{9^{9}}}}"


def run(work, **options):
    """`work(pool)` in a loop of its own; (its result, process ids that were seen)."""

    async def inner():
        pool = WorkerPool(1, **options)
        try:
            result = await work(pool)
            return result, [worker.pid for worker in pool._all]
        finally:
            await pool.close()

    result, pids = asyncio.run(inner())
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    return result, pids


def test_one_process_scores_many():
    async def work(pool):
        rewards = await asyncio.gather(*[pool.score("math", f"\\boxed{{{n}}}", "3", timeout_s=30) for n in range(6)])
        return rewards

    rewards, pids = run(work)
    assert rewards == [0, 0, 0, 1, 0, 0] and len(pids) == 1


@pytest.mark.slow
def test_a_killed_process_costs_no_sample():
    async def work(pool):
        assert await pool.score("math", "1", "1", timeout_s=30) == 1
        (worker,) = pool._all
        os.kill(worker.pid, 9)
        await worker.wait()
        return [await pool.score("math", "1", "1", timeout_s=30) for _ in range(2)]

    assert run(work)[0] == [1, 1]


def test_a_sample_that_ends_its_process_twice_has_no_reward():
    async def work(pool):
        return [await pool.score(kind, "1", "1", timeout_s=30) for kind in ("kills", "kills once", "fine")]

    with tempfile.TemporaryDirectory() as folder:
        os.environ["DYING_WORKER_FOLDER"] = folder
        assert run(work, module="tests.helpers.dying_worker")[0] == [None, 1, 1]


@pytest.mark.slow
def test_a_sample_that_is_too_slow_is_not_scored_twice():
    async def work(pool):
        assert await pool.score("math", "1", "1", timeout_s=30) == 1
        started = time.monotonic()
        return await pool.score("math", ENDLESS, "1", timeout_s=6), time.monotonic() - started

    reward, seconds = run(work)[0]
    assert reward is None and seconds < 12


def test_an_exception_in_a_scorer_is_no_reward_and_no_end():
    async def work(pool):
        return [await pool.score(kind, "1", "1", timeout_s=30) for kind in ("unknown", "math")]

    assert run(work)[0] == [None, 1]


@pytest.mark.slow
def test_a_stuck_process_ends_even_if_its_parent_is_gone():
    """The alarm is the kernel's: it needs neither the parent nor the worker's own Python."""
    worker = subprocess.Popen(
        [sys.executable, "-m", "slime_like.rollout.rewards.worker"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert "ready" in worker.stdout.readline()
    worker.stdin.write(json.dumps({"kind": "math", "response": ENDLESS, "label": "2", "seconds": 0.5}) + "\n")
    worker.stdin.flush()
    start = time.monotonic()
    assert worker.wait(timeout=20) == -14  # SIGALRM
    assert time.monotonic() - start < 5


@pytest.mark.slow
def test_a_hostile_answer_costs_seconds_of_one_process_and_others_go_on():
    async def work():
        pool = WorkerPool(2)
        try:
            assert await asyncio.gather(*[pool.score("math", "1", "1", timeout_s=60) for _ in range(4)]) == [1] * 4
            start, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
            hostile = asyncio.create_task(pool.score("math", ENDLESS, "2", timeout_s=60))
            rewards = await asyncio.gather(*[pool.score("math", f"{n}", "3", timeout_s=60) for n in range(40)])
            assert not hostile.done(), "the others are not behind it"
            assert rewards == [float(n == 3) for n in range(40)]
            assert await hostile is None
            seconds = time.monotonic() - start
            # A new process is there without anybody asking for one.
            deadline = time.monotonic() + 60
            while pool._ready.qsize() < 2 and time.monotonic() < deadline:
                await asyncio.sleep(0.05)
            assert pool._ready.qsize() == 2 == len(pool._all)
            return seconds, resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before
        finally:
            await pool.close()

    seconds, processor = asyncio.run(work())
    assert ANSWER_CPU_S - 1 < processor < ANSWER_CPU_S + 8 and seconds < 50


def test_there_is_a_worker_for_each_core():
    assert WorkerPool().num_workers == min(16, len(os.sched_getaffinity(0)))


def test_a_process_that_cannot_start_is_said_to_who_waits():
    async def work():
        pool = WorkerPool(1, module="slime_like.no_such_worker")
        for _ in range(2):  # the second time too, instead of waiting for ever
            with pytest.raises(RewardError, match="ended while starting"):
                await asyncio.wait_for(pool.score("math", "1", "1", timeout_s=5), 60)
        await pool.close()

    asyncio.run(work())
