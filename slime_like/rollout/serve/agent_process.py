"""Runs the user's agents in an interpreter of their own (--agent-python): another virtual environment, or none of ours.

One process for all episodes. Both sides send one JSON object a line over a socket in a folder that is ours alone:
{"number", "arguments"} and {"cancel": number} go there; {"ready"} or {"failed"}, then {"number", "result"} or
{"number", "error"} come back. It dies with us, whatever ends us; what it prints is in its log.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import shutil
import tempfile
import time
from typing import Any

from slime_like.errors import PluginError
from slime_like.rollout.serve import agent_runner
from slime_like.rollout.serve.agent_host import AgentFailure
from slime_like.utils.guard import GuardedProcess, start_guarded

logger = logging.getLogger(__name__)

#: How long imports of the user's module may take.
_START_S = 300.0
#: How long its log may take to be whole once it has hung up.
_LAST_WORDS_S = 5.0
_LOG_LINES = 15
#: What the kernel takes as a socket's name.
_SOCKET_PATH_BYTES = 107


def _socket_path() -> str:
    """In a new folder of mode 700, into which nobody else gets: in TMPDIR, or in /tmp where that is too long a name."""
    for parent in (None, "/tmp"):
        path = os.path.join(tempfile.mkdtemp(prefix="slime_like_agents_", dir=parent), "socket")
        if len(os.fsencode(path)) <= _SOCKET_PATH_BYTES:
            break
        os.rmdir(os.path.dirname(path))
    return path


class AgentProcess:
    """Calls of one function in another interpreter: coroutines share an event loop, a plain function gets a thread.

    python: the interpreter; path: of the function, as it is imported there, from PYTHONPATH or the current folder.
    A process that ends is started again by the next call.
    """

    def __init__(self, python: str, path: str, *, log_path: str, start_s: float = _START_S):
        self.name = path
        self._python, self._log_path, self._start_s = os.path.abspath(python), log_path, start_s
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future] = {}
        self._starting = asyncio.Lock()
        self._process: GuardedProcess | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task | None = None

    async def start(self) -> None:
        """Start it and wait until it has imported the function. Raises PluginError with the end of its log."""
        socket_path = _socket_path()
        folder = os.path.dirname(socket_path)
        connected: asyncio.Future = asyncio.get_running_loop().create_future()

        def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if not connected.done():
                connected.set_result((reader, writer))

        server = await asyncio.start_unix_server(take, socket_path, limit=agent_runner.LINE_BYTES)
        try:
            self._process = await asyncio.to_thread(self._launch, folder, socket_path)
            reader, self._writer = await self._unless_ended(connected, "connect")
            line = await self._unless_ended(asyncio.ensure_future(reader.readline()), "import the function")
            answer = json.loads(line or b'{"failed": "it ended"}')
            if "failed" in answer:
                raise self._problem(f"cannot be loaded: {answer['failed']}")
        except BaseException:
            await self.close()
            raise
        finally:
            server.close()
        self._reading = asyncio.create_task(self._read(reader))
        logger.info("agents of %s play in Python %s of %s", self.name, answer["ready"], self._python)

    async def call(self, *arguments: Any) -> Any:
        """What the function gives, from JSON. Raises AgentFailure for whatever it raises, and if its process ends;
        cancelling ends a coroutine.
        """
        async with self._starting:
            if self._reading is None or self._reading.done():
                await self._restart()
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._send({"number": number, "arguments": arguments})
            return await future
        except asyncio.CancelledError:
            self._send({"cancel": number})
            raise
        finally:
            self._waiting.pop(number, None)

    async def close(self) -> None:
        """End the process and all that it started. Harmless when called twice."""
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self._process is not None:
            await asyncio.to_thread(self._process.close)
            self._process = None

    def _launch(self, folder: str, socket_path: str) -> GuardedProcess:
        """Start the runner as if its virtual environment were active."""
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "VIRTUAL_ENV")}
        environment |= {
            "PYTHONUNBUFFERED": "1",
            "PATH": os.pathsep.join([os.path.dirname(self._python), os.environ.get("PATH", os.defpath)]),
        }
        argv = [self._python, agent_runner.__file__, socket_path, self.name]
        try:
            return start_guarded(argv, env=environment, log_path=self._log_path, remove_folder=folder)
        except OSError as error:
            shutil.rmtree(folder, ignore_errors=True)
            raise PluginError(f"--agent-python {self._python}: cannot be started: {error}") from error

    async def _unless_ended(self, future: asyncio.Future, phase: str) -> Any:
        """The future's result. Raises PluginError if the process ends before, or at the deadline."""
        assert self._process is not None, "it has been started"
        end = time.monotonic() + self._start_s
        while not (await asyncio.wait([future], timeout=0.2))[0]:
            status = self._process.poll()
            if status is not None and (await asyncio.wait([future], timeout=0.5))[0]:
                break  # it said something before it ended
            if status is not None or time.monotonic() > end:
                future.cancel()
                late = f"did not {phase} within {self._start_s:g} s"
                raise self._problem(late if status is None else f"ended with status {status}")
        return future.result()

    async def _restart(self) -> None:
        logger.warning("the agents' process of %s has ended; it is started again", self.name)
        await self.close()
        try:
            await self.start()
        except PluginError as error:
            raise AgentFailure(str(error)) from error

    def _send(self, message: dict) -> None:
        """Never waits: an agent that blocks its loop must not hold up a deadline. What it has not read yet is kept."""
        if self._writer is not None:  # if its process has ended, whoever waits is told so by _read
            self._writer.write(json.dumps(message).encode() + b"\n")

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Hand out answers until the process ends, and tell all who wait then."""
        why = "was closed"
        try:
            while line := await reader.readline():
                answer = json.loads(line)
                future = self._waiting.get(answer["number"])
                if future is None or future.done():
                    continue  # its deadline came first
                if "error" in answer:
                    future.set_exception(AgentFailure(f"--agent-path {self.name} raised {answer['error']}"))
                else:
                    future.set_result(answer["result"])
            await self._ended()
            why = f"ended. End of {self._log_path}:\n{self._tail()}"
        except (ConnectionError, ValueError) as error:
            await self._ended()
            why = f"broke off ({type(error).__name__}: {error}). End of {self._log_path}:\n{self._tail()}"
        finally:
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(AgentFailure(f"--agent-path {self.name}: the agents' process {why}"))

    async def _ended(self) -> None:
        """Wait until its supervisor has ended too, which has written all of its output by then."""
        assert self._process is not None, "it has been started"
        end = time.monotonic() + _LAST_WORDS_S
        while self._process.poll() is None and time.monotonic() < end:
            await asyncio.sleep(0.05)

    def _problem(self, what: str) -> PluginError:
        where = f"--agent-path {self.name} in --agent-python {self._python}"
        return PluginError(f"{where}: {what}. End of {self._log_path}:\n{self._tail()}")

    def _tail(self) -> str:
        return self._process.log_tail(_LOG_LINES) if self._process is not None else ""
