"""Scoring processes: ended when stuck, replaced when dead, none left behind."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time

import pytest

from slime_like.rollout.rewards.pool import WorkerPool

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
        return await pool.score("math", ENDLESS, "1", timeout_s=4), time.monotonic() - started

    reward, seconds = run(work)[0]
    assert reward is None and seconds < 8


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
