"""Load a user's function by its dotted path and check, at start, that it can be called as we will call it."""

from __future__ import annotations

import asyncio
import dataclasses
import difflib
import importlib
import importlib.util
import inspect
import threading
import time
from collections.abc import Awaitable, Callable
from types import ModuleType
from typing import Any

from slime_like.errors import PluginError, RunError, UserError
from slime_like.utils.activity import Activity

#: How long a plain function of the user's may take over one call: those that look at groups, samples or rows.
HOOK_TIMEOUT_S = 600.0
#: How long a coroutine may take to end once it is cancelled.
_CANCEL_S = 5.0


@dataclasses.dataclass(frozen=True)
class Hook:
    """A user's function with the flag and path it is from: whatever is wrong with it names both."""

    function: Callable
    flag: str
    path: str
    timeout_s: float = HOOK_TIMEOUT_S  # of one call of a plain function; of a coroutine's idling

    @classmethod
    def load(cls, path: str | None, num_positional: int, flag: str) -> Hook | None:
        """None without a path. Raises PluginError as load_function does."""
        return cls(load_function(path, num_positional=num_positional, flag=flag), flag, path) if path else None

    def __call__(self, *arguments: Any) -> Any:
        """What the function gives. Raises RunError naming it if it raises or does not answer in time; our own errors
        pass as they are.
        """
        try:
            return self._in_time(arguments)
        except (RunError, UserError):
            raise
        except Exception as error:
            raise self.error(f"the function raised {type(error).__name__}: {error}") from error

    async def awaited(self, *arguments: Any, activity: Activity) -> Any:
        """As a call, of a coroutine function or a plain one.

        A coroutine may take as long as it likes with what the run does for it, which has deadlines of its own; it is
        ended when it has made nothing of that run for timeout_s.
        """
        try:
            answer = self.function(*arguments)
            return await self._unless_idle(answer, activity) if inspect.isawaitable(answer) else answer
        except (RunError, UserError):
            raise
        except Exception as error:
            raise self.error(f"the function raised {type(error).__name__}: {error}") from error

    async def _unless_idle(self, answer: Awaitable, activity: Activity) -> Any:
        task, begin = asyncio.ensure_future(answer), time.monotonic()
        try:
            while not (await asyncio.wait({task}, timeout=min(1.0, self.timeout_s / 4)))[0]:
                if activity.idle_s(begin) > self.timeout_s:
                    what = "the function neither answered nor asked for anything"
                    raise self.error(f"{what} for {self.timeout_s:.0f} s")
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait({task}, timeout=_CANCEL_S)

    def _in_time(self, arguments: tuple) -> Any:
        # In a daemon thread: one that is stuck neither holds up the run nor keeps the process alive.
        outcome: list[tuple[Any, BaseException | None]] = []

        def work() -> None:
            try:
                outcome.append((self.function(*arguments), None))
            except BaseException as error:  # noqa: BLE001 - raised by the caller
                outcome.append((None, error))

        thread = threading.Thread(target=work, name=self.flag, daemon=True)
        thread.start()
        thread.join(self.timeout_s)
        if not outcome:
            raise self.error(f"the function did not answer within {self.timeout_s:.0f} s")
        answer, error = outcome[0]
        if error is not None:
            raise error
        return answer

    def error(self, what: str) -> RunError:
        """What is wrong with what it did."""
        return RunError(f"{self.flag} {self.path}: {what}")


def load_function(path: str, *, num_positional: int | None, flag: str) -> Callable:
    """The function at `pkg.module.function` or `pkg.module:function`.

    num_positional: how many positional arguments we will pass; None: not checked here. flag: the command-line flag,
    for messages.
    Raises PluginError naming the path, what was found, and the closest names.
    """
    module_path, name = _split(path, flag)
    module = _import(module_path, path, flag)
    if not hasattr(module, name):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        close = difflib.get_close_matches(name, functions, n=3, cutoff=0.4) or sorted(functions)[:5]
        hint = f"It has: {', '.join(close)}." if close else "It has no functions."
        raise PluginError(f"{flag} {path}: module {module_path} has no {name!r}. {hint}")
    function = getattr(module, name)
    if not callable(function):
        raise PluginError(f"{flag} {path}: {name!r} is a {type(function).__name__}, not a function.")
    if num_positional is not None:
        _check_signature(function, path, num_positional, flag)
    return function


def _split(path: str, flag: str) -> tuple[str, str]:
    module_path, separator, name = path.partition(":") if ":" in path else path.rpartition(".")
    if (
        not separator
        or not module_path
        or not name.isidentifier()
        or not all(part.isidentifier() for part in module_path.split("."))
    ):
        raise PluginError(
            f"{flag} {path}: is no path to a function. Fix: package.module.function or package.module:function."
        )
    return module_path, name


def _import(module_path: str, path: str, flag: str) -> ModuleType:
    try:
        return importlib.import_module(module_path)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_path != missing and not module_path.startswith(missing + "."):
            # The module is there; something that it imports is not.
            raise PluginError(f"{flag} {path}: importing {module_path} failed: {error}") from error
        raise PluginError(
            f"{flag} {path}: no module {missing!r}. Fix: the path, or add its folder to PYTHONPATH."
        ) from None
    except Exception as error:
        raise PluginError(f"{flag} {path}: importing {module_path} raised {type(error).__name__}: {error}") from error


def _check_signature(function: Callable, path: str, num_positional: int, flag: str) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a builtin that does not tell; calling it will
    try:
        signature.bind(*[None] * num_positional)
    except TypeError:
        raise PluginError(
            f"{flag} {path}: will be called with {num_positional} positional arguments, but its signature is"
            f" {signature}."
        ) from None
