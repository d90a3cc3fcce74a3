"""Processes for scorers that may get stuck in code no Python thread can interrupt."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys

from slime_like.errors import RewardError, WaitTimeout
from slime_like.utils.files import PACKAGE_ROOT

_START_S = 120.0
_GRACE_S = 5.0
#: Of a processor, for one answer: a real one takes milliseconds, one made to be hard any time that it is given. Not of
#: the clock, by which a busy host would lose good answers.
ANSWER_CPU_S = 5.0
#: One process a core, to this many: each has libraries of 100 MB.
_MOST_WORKERS = 16
#: Processes that a task is given to before it counts as one that ends them.
_TRIES = 2


class WorkerPool:
    """Scores in child processes (rewards/worker.py); a stuck one is killed, and replaced while the others go on.

    Children start at first use, as plain commands: forking a driver with threads is not safe. Use inside one event
    loop. module: another that serves as rewards/worker.py does.
    """

    def __init__(self, num_workers: int | None = None, *, module: str = "slime_like.rollout.rewards.worker"):
        self._module = module
        self.num_workers = num_workers or min(_MOST_WORKERS, len(os.sched_getaffinity(0)))
        self._ready: asyncio.Queue[asyncio.subprocess.Process | Exception] = asyncio.Queue()
        self._num_there = 0  # processes that are ready, at work, or starting
        self._starting: set[asyncio.Task] = set()
        self._all: set[asyncio.subprocess.Process] = set()

    async def score(self, kind: str, response: str, label: str, *, timeout_s: float) -> float | None:
        """The reward, or None if scoring took longer than timeout_s or 5 s of a processor, raised, or killed its
        process.
        """
        task = {"kind": kind, "response": response, "label": label, "cpu_seconds": ANSWER_CPU_S}
        result = await self.run(task, timeout_s=timeout_s)
        return result.get("reward") if result else None

    async def run(self, task: dict, *, timeout_s: float) -> dict | None:
        """What a child answers to the task; None if it took longer than timeout_s, or two of them died of it.

        One that died may have been killed by somebody, the kernel say, which is no fault of the task's.
        """
        for _ in range(_TRIES):
            worker = await self._worker()
            result = None
            try:
                # The worker's own alarm fires at timeout_s; ours is for a worker that is stopped or swapped out.
                result = await asyncio.wait_for(_ask(worker, task | {"seconds": timeout_s}), timeout_s + _GRACE_S)
            except TimeoutError:
                return None
            finally:
                if result is not None:
                    self._ready.put_nowait(worker)
                else:
                    self._start_soon(instead_of=worker)
            if result is not None or await _ended_itself(worker):
                return result
        return None

    async def _worker(self) -> asyncio.subprocess.Process:
        """One that is free. Raises what kept it from starting."""
        if self._ready.empty() and self._num_there < self.num_workers:
            self._num_there += 1
            self._start_soon()
        worker = await self._ready.get()
        if isinstance(worker, Exception):
            raise worker
        return worker

    async def close(self) -> None:
        """End all processes."""
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        for worker in list(self._all):
            await self._end(worker)
        self._ready, self._num_there = asyncio.Queue(), 0

    def _start_soon(self, instead_of: asyncio.subprocess.Process | None = None) -> None:
        """Start a process beside what goes on; who waits for one gets it, or why there is none."""
        task = asyncio.get_running_loop().create_task(self._start_one(instead_of))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _start_one(self, instead_of: asyncio.subprocess.Process | None) -> None:
        try:
            if instead_of is not None:
                await self._end(instead_of)
            self._ready.put_nowait(await self._start())
        except Exception as error:  # noqa: BLE001 whoever waits for the process raises it
            self._num_there -= 1
            self._ready.put_nowait(error)

    async def _start(self) -> asyncio.subprocess.Process:
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, [PACKAGE_ROOT, os.environ.get("PYTHONPATH")]))
        }
        worker = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            self._module,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
        )
        self._all.add(worker)
        try:
            ready = await asyncio.wait_for(_read(worker), _START_S)
        except TimeoutError:
            await self._end(worker)
            raise WaitTimeout(
                who="rollout", whom="a reward process", phase="its start", seconds=_START_S, last="nothing"
            ) from None
        if ready is None:
            await self._end(worker)
            raise RewardError(
                f"a reward process ended while starting (exit status {worker.returncode}); its message is on stderr"
                " above."
            )
        return worker

    async def _end(self, worker: asyncio.subprocess.Process) -> None:
        self._all.discard(worker)
        assert worker.stdout is not None, "started with a pipe"
        if worker.returncode is None and worker.stdout.at_eof():
            # It is ending. kill() would take its status from asyncio's watcher, which then tells 255 (Python 3.11):
            # whoever asks whether it ended itself would score its sample once more.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(worker.wait(), _GRACE_S)
        if worker.returncode is None:
            try:
                worker.kill()
            except ProcessLookupError:
                return  # it ended in between
        await worker.wait()


async def _ended_itself(worker: asyncio.subprocess.Process) -> bool:
    """Whether a worker that ended was ended by its own clocks, of which a task has had what it may."""
    return await worker.wait() in (-signal.SIGALRM, -signal.SIGPROF)


async def _ask(worker: asyncio.subprocess.Process, task: dict) -> dict | None:
    """The worker's answer; None if it died."""
    assert worker.stdin is not None, "started with a pipe"
    try:
        worker.stdin.write(json.dumps(task).encode() + b"\n")
        await worker.stdin.drain()
    except (BrokenPipeError, ConnectionResetError):
        pass  # it ended, or is about to: its output ends, too
    return await _read(worker)


async def _read(worker: asyncio.subprocess.Process) -> dict | None:
    assert worker.stdout is not None, "started with a pipe"
    line = await worker.stdout.readline()
    return json.loads(line) if line.endswith(b"\n") else None
