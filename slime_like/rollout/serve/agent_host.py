"""Runs the user's agents away from the event loop that answers them: one that blocks must not block its endpoint."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import threading
from typing import Any, Protocol

from slime_like.errors import RunError
from slime_like.utils.user_functions import load_function


class AgentFailure(RunError):
    """An agent raised, hung, or gave what is no result. kind: "error" or "timeout"."""

    def __init__(self, message: str, kind: str = "error"):
        super().__init__(message)
        self.kind = kind

    def __reduce__(self):
        return (AgentFailure, (str(self), self.kind))


class CallsAgents(Protocol):
    """Where --agent-path runs. name: its path."""

    name: str

    async def start(self) -> None:
        """Get it ready. Raises PluginError."""

    async def call(self, *arguments: Any) -> Any:
        """What an episode gives. Raises AgentFailure for whatever the agent raises; cancelling ends a coroutine."""

    async def close(self) -> None:
        """End what runs. Harmless when called twice."""


class AgentHost:
    """Calls of a function of this process: coroutines share an event loop in a thread, a plain one gets a thread a
    call. Raises PluginError for a path that leads to none.
    """

    def __init__(self, path: str):
        self.name = path
        function = self._function = load_function(path, num_positional=4, flag="--agent-path")
        self._is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
            getattr(function, "__call__", None)  # noqa: B004
        )
        self._loop: asyncio.AbstractEventLoop | None = None

    async def start(self) -> None:
        """Nothing: it is imported already."""

    async def call(self, *arguments: Any) -> Any:
        """What the function gives. Raises AgentFailure for whatever it raises; cancelling ends a coroutine."""
        future = self._start_coroutine(arguments) if self._is_async else self._start_thread(arguments)
        try:
            return await asyncio.wrap_future(future)
        except _Raised as error:
            cause = error.__cause__
            raise AgentFailure(f"--agent-path {self.name} raised {type(cause).__name__}: {cause}") from cause

    async def close(self) -> None:
        """End the loop of the coroutines."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    def _start_coroutine(self, arguments: tuple) -> concurrent.futures.Future:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="agents", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(self._carried(arguments), self._loop)

    async def _carried(self, arguments: tuple) -> Any:
        try:
            return await self._function(*arguments)
        except (Exception, SystemExit) as error:
            raise _Raised from error

    def _start_thread(self, arguments: tuple) -> concurrent.futures.Future:
        future: concurrent.futures.Future = concurrent.futures.Future()

        def run() -> None:
            result, raised = None, None
            try:
                result = self._function(*arguments)
            except BaseException as error:  # noqa: BLE001 carried to the waiting task
                raised = _Raised()
                raised.__cause__ = error
            if not future.set_running_or_notify_cancel():
                return  # the deadline came first
            if raised is not None:
                future.set_exception(raised)
            else:
                future.set_result(result)

        # A daemon: one that never returns does not keep the process alive.
        threading.Thread(target=run, name="agent", daemon=True).start()
        return future


class _Raised(Exception):
    """Carries whatever an agent raised as its cause: StopIteration and TimeoutError would mean something else here."""
