"""What an environment is, and how we call one that may block, hang or raise.

An environment is any class with `reset` and `step`, plain or async, and perhaps `close`; an instance plays one episode:

    class EchoTwice:
        def reset(self, seed, task):
            self.turns = 0
            return Turn(messages=task.messages)

        def step(self, answer):
            self.turns += 1
            return Turn(messages=[{"role": "user", "content": answer["content"]}], reward=0.5, done=self.turns == 2)
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import inspect
import math
import queue
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from slime_like.errors import RunError
from slime_like.utils.supervise import running

_ROLES = ("system", "developer", "user", "assistant", "tool", "observation")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What an episode is about: the prompt's row, before the chat template."""

    messages: list[dict]
    label: Any = None
    metadata: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """What the environment says: the opening of an episode (`reset`), or its answer to the policy's (`step`).

    messages: chat messages that are new, or with replaces_history the whole conversation from now on, which begins
    another row of the same episode. tools: what may be called, in OpenAI's form; None: as before. reward: added to the
    episode's. done: the episode has ended; truncated: it was cut off. info: kept in the sample's metadata.
    """

    messages: Sequence[dict] = ()
    tools: list[dict] | None = None
    reward: float = 0.0
    done: bool = False
    truncated: bool = False
    info: dict = dataclasses.field(default_factory=dict)
    replaces_history: bool = False


class EnvironmentFailure(RunError):
    """An environment raised, hung or answered with something else than a Turn. kind: "error" or "timeout"."""

    def __init__(self, message: str, kind: str = "error"):
        super().__init__(message)
        self.kind = kind

    def __reduce__(self):
        return (EnvironmentFailure, (str(self), self.kind))


class EnvironmentHost:
    """Where environments run: plain ones in a thread each, async ones in one event loop beside the rollout's.

    So neither kind can hold up the rollout, and each call has a deadline. name: of the environment, in messages.
    """

    def __init__(self, make: Callable[[], Any], *, timeout_s: float, name: str):
        self.timeout_s, self.name = timeout_s, name
        self._make = make
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self, where: str) -> HostedEnvironment:
        """Room for one episode's environment; its `reset` makes it. where: the sample, for messages."""
        return HostedEnvironment(self, self._make, where)

    def close(self) -> None:
        """End the loop of the async environments."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    def start_coroutine(self, coroutine: Coroutine) -> concurrent.futures.Future:
        """Run it in the environments' own loop."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="environment-coroutines", daemon=True).start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)


class HostedEnvironment:
    """One episode's environment; every call raises EnvironmentFailure and nothing else."""

    def __init__(self, host: EnvironmentHost, make: Callable[[], Any], where: str):
        self._host, self._make, self._where = host, make, where
        self._environment: Any = None
        self._thread = _CallThread()

    async def reset(self, seed: int, task: Task) -> Turn:
        """The opening; makes the environment."""
        self._environment = await self._wait("__init__", self._thread.submit(self._make))
        turn = await self._call("reset", seed, task)
        if not turn.messages:
            raise self._failure("reset", "gave no message to begin with")
        return turn

    async def step(self, answer: dict) -> Turn:
        """The environment's answer to the policy's message."""
        return await self._call("step", answer)

    async def close(self) -> None:
        """Let the environment clean up, if it wants to, and end its thread once it returns."""
        try:
            if callable(getattr(self._environment, "close", None)):
                await self._wait("close", self._start("close"))
        finally:
            self._thread.end()

    async def _call(self, method: str, *arguments: Any) -> Turn:
        answer = await self._wait(method, self._start(method, *arguments))
        if not isinstance(answer, Turn):
            raise self._failure(method, f"gave a {type(answer).__name__}, not a Turn")
        return self._checked(answer, method)

    def _start(self, method: str, *arguments: Any) -> concurrent.futures.Future:
        function = getattr(self._environment, method)
        if inspect.iscoroutinefunction(function):
            return self._host.start_coroutine(_carry(function(*arguments)))
        return self._thread.submit(function, *arguments)

    async def _wait(self, method: str, future: concurrent.futures.Future) -> Any:
        try:
            with running(f"environment {self._host.name}, {method} for {self._where}"):
                return await asyncio.wait_for(asyncio.wrap_future(future), self._host.timeout_s)
        except TimeoutError:
            what = f"gave no answer within {self._host.timeout_s:g} s (--env-timeout-s)"
            raise self._failure(method, what, "timeout") from None
        except _Raised as error:
            cause = error.__cause__
            raise self._failure(method, f"raised {type(cause).__name__}: {cause}") from cause

    def _checked(self, turn: Turn, method: str) -> Turn:
        for message in turn.messages:
            if not isinstance(message, dict) or message.get("role") not in _ROLES:
                raise self._failure(
                    method, f"gave {message!r:.80}, not a chat message with a role of {', '.join(_ROLES)}"
                )
            content = message.get("content")
            if not isinstance(content, str) and not (content is None and message.get("tool_calls")):
                raise self._failure(
                    method, f"gave a {message['role']} message whose content is {content!r:.80}, no text"
                )
        if not isinstance(turn.reward, (int, float)) or not math.isfinite(turn.reward):
            raise self._failure(method, f"gave the reward {turn.reward!r:.80}, which is no finite number")
        return turn

    def _failure(self, method: str, what: str, kind: str = "error") -> EnvironmentFailure:
        return EnvironmentFailure(f"environment {self._host.name}, {method} for {self._where}: {what}", kind)


class _Raised(Exception):
    """Carries whatever an environment raised, StopIteration and SystemExit too, as its cause."""


async def _carry(coroutine: Coroutine) -> Any:
    try:
        return await coroutine
    except (Exception, SystemExit) as error:
        raise _Raised from error


class _CallThread:
    """One daemon thread, begun at the first call: libraries that belong to a thread see only this one, and one that
    never returns does not keep the process alive.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def submit(self, function: Callable, *arguments: Any) -> concurrent.futures.Future:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="environment", daemon=True)
            self._thread.start()
        future: concurrent.futures.Future = concurrent.futures.Future()
        self._calls.put((future, function, arguments))
        return future

    def end(self) -> None:
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            future, function, arguments = call
            if not future.set_running_or_notify_cancel():
                continue
            try:
                result = function(*arguments)
            except BaseException as error:  # noqa: BLE001 carried to the waiting task
                raised = _Raised()
                raised.__cause__ = error
                future.set_exception(raised)
            else:
                future.set_result(result)
