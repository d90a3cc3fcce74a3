"""Processes for scorers that may get stuck in code no Python thread can interrupt."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys

from slime_like.errors import RewardError, WaitTimeout
from slime_like.utils.files import PACKAGE_ROOT

_START_S = 120.0
_GRACE_S = 5.0
#: Processes that a task is given to before it counts as one that ends them.
_TRIES = 2


class WorkerPool:
    """Scores in child processes (rewards/worker.py); a stuck one is killed and replaced.

    Children start at first use, as plain commands: forking a driver with threads is not safe. Use inside one event
    loop. module: another that serves as rewards/worker.py does.
    """

    def __init__(self, num_workers: int | None = None, *, module: str = "slime_like.rollout.rewards.worker"):
        self._module = module
        self.num_workers = num_workers or max(1, min(8, (os.cpu_count() or 1) // 2))
        self._idle: list[asyncio.subprocess.Process] = []
        self._all: set[asyncio.subprocess.Process] = set()
        self._slots = asyncio.Semaphore(self.num_workers)

    async def score(self, kind: str, response: str, label: str, *, timeout_s: float) -> float | None:
        """The reward, or None if scoring took longer than timeout_s, raised, or killed its process."""
        result = await self.run({"kind": kind, "response": response, "label": label}, timeout_s=timeout_s)
        return result.get("reward") if result else None

    async def run(self, task: dict, *, timeout_s: float) -> dict | None:
        """What a child answers to the task; None if it took longer than timeout_s, or two of them died of it.

        One that died may have been killed by somebody, the kernel say, which is no fault of the task's.
        """
        async with self._slots:
            for _ in range(_TRIES):
                worker = self._idle.pop() if self._idle else await self._start()
                result = None
                try:
                    # The worker's own alarm fires at timeout_s; ours is for a worker that is stopped or swapped out.
                    result = await asyncio.wait_for(_ask(worker, task | {"seconds": timeout_s}), timeout_s + _GRACE_S)
                except TimeoutError:
                    return None
                finally:
                    if result is not None:
                        self._idle.append(worker)
                    else:
                        await self._end(worker)
                if result is not None or worker.returncode == -signal.SIGALRM:  # its own alarm
                    return result
            return None

    async def close(self) -> None:
        """End all processes."""
        self._idle.clear()
        for worker in list(self._all):
            await self._end(worker)

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
        if worker.returncode is None:
            try:
                worker.kill()
            except ProcessLookupError:
                return  # it ended in between
        await worker.wait()


async def _ask(worker: asyncio.subprocess.Process, task: dict) -> dict | None:
    """The worker's answer; None if it died."""
    assert worker.stdin is not None, "started with a pipe"
    try:
        worker.stdin.write(json.dumps(task).encode() + b"\n")
        await worker.stdin.drain()
    except (BrokenPipeError, ConnectionResetError):
        return None
    return await _read(worker)


async def _read(worker: asyncio.subprocess.Process) -> dict | None:
    assert worker.stdout is not None, "started with a pipe"
    line = await worker.stdout.readline()
    return json.loads(line) if line.endswith(b"\n") else None
