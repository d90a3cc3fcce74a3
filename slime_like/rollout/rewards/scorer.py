"""One way to score a sample, whichever reward the flags name."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import math
import threading
from collections.abc import Callable
from typing import Any

from slime_like.config.rollout import RewardConfig
from slime_like.errors import ConfigError, RewardError
from slime_like.records import Sample
from slime_like.rollout.rewards.exact import exact
from slime_like.rollout.rewards.pool import WorkerPool

#: --rm-type values that score in a worker process, and the ones that score right here.
IN_WORKER = ("math", "deepscaler")
IN_PROCESS = {"exact": exact}

_MOST_THREADS = 32


class RewardScorer:
    """Gives samples their reward, inside the rollout's event loop. function: the user's (--custom-rm-path), None for --rm-type.

    num_unscorable: samples that a built-in reward could not judge within its deadline; their reward is 0.
    """

    def __init__(self, config: RewardConfig, function: Callable | None, plugin_args: Any):
        if function is None and config.rm_type not in (*IN_WORKER, *IN_PROCESS):
            raise ConfigError([f"--rm-type {config.rm_type} is unknown. Known: {', '.join((*IN_WORKER, *IN_PROCESS))}; or --custom-rm-path module.function."])
        self.config = config
        self.plugin_args = plugin_args
        self.num_unscorable = 0
        self._function = function
        self._pool: WorkerPool | None = None
        self._plugin_loop: asyncio.AbstractEventLoop | None = None
        self._threads: asyncio.Semaphore | None = None

    async def score(self, sample: Sample) -> Sample:
        """The sample with its reward. Raises RewardError naming the sample if the function raises, hangs or gives no finite number."""
        if self._function is not None:
            result = await self._call(self._function, sample)
            return dataclasses.replace(sample, reward=self._number(result, sample))
        if sample.label is None:
            raise RewardError(f"--rm-type {self.config.rm_type} compares with a label, and {_name(sample)} has none. Fix: --label-key.")
        if self.config.rm_type in IN_PROCESS:
            return dataclasses.replace(sample, reward=IN_PROCESS[self.config.rm_type](sample))
        self._pool = self._pool or WorkerPool()
        reward = await self._pool.score(str(self.config.rm_type), sample.response, str(sample.label), timeout_s=self.config.reward_timeout_s)
        if reward is None:
            self.num_unscorable += 1
        return dataclasses.replace(sample, reward=reward or 0.0)

    async def close(self) -> None:
        """End the worker processes and the loop of the user's coroutines."""
        if self._pool is not None:
            await self._pool.close()
        if self._plugin_loop is not None:
            self._plugin_loop.call_soon_threadsafe(self._plugin_loop.stop)

    async def _call(self, function: Callable, sample: Sample):
        """Run the user's function away from our event loop, so that one that blocks meets its deadline all the same."""
        self._threads = self._threads or asyncio.Semaphore(_MOST_THREADS)
        async with self._threads:
            is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004
            future = self._start_coroutine(function, sample) if is_async else _start_thread(function, self.plugin_args, sample)
            try:
                return await asyncio.wait_for(future, self.config.reward_timeout_s)
            except TimeoutError as error:
                if future.done() and not future.cancelled():
                    raise self._error(f"raised {type(error).__name__}: {error}", sample) from error
                raise self._error(f"gave no reward within {self.config.reward_timeout_s:g} s (--reward-timeout-s)", sample) from None
            except Exception as error:
                raise self._error(f"raised {type(error).__name__}: {error}", sample) from error

    def _start_coroutine(self, function: Callable, sample: Sample) -> asyncio.Future:
        if self._plugin_loop is None:
            self._plugin_loop = asyncio.new_event_loop()
            threading.Thread(target=self._plugin_loop.run_forever, name="reward-coroutines", daemon=True).start()
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(function(self.plugin_args, sample), self._plugin_loop))

    def _number(self, result: Any, sample: Sample) -> float:
        key = self.config.reward_key
        if isinstance(result, dict):
            if key is None:
                raise self._error(f"gave a dict with the keys {sorted(map(str, result))}. Fix: name one with --reward-key", sample)
            if key not in result:
                raise self._error(f"gave a dict without --reward-key {key!r}; its keys are {sorted(map(str, result))}", sample)
            result = result[key]
        elif key is not None:
            raise self._error(f"gave {result!r}, but --reward-key {key} needs a dict", sample)
        try:
            reward = float(result) if not isinstance(result, (str, bytes)) else None
        except (TypeError, ValueError):
            reward = None
        if reward is None or not math.isfinite(reward):
            raise self._error(f"gave {result!r}, which is no finite number", sample)
        return reward

    def _error(self, what: str, sample: Sample) -> RewardError:
        about = f"{_name(sample)}, label {str(sample.label)[:80]!r}, response starts {sample.response[:80]!r}"
        return RewardError(f"reward function {self.config.custom_rm_path} {what}: {about}")


def _start_thread(function: Callable, plugin_args: Any, sample: Sample) -> asyncio.Future:
    """Run a plain function in a daemon thread: unlike an executor's, a stuck one does not keep the process from ending."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def settle(result, error) -> None:
        if not future.done():  # the deadline may have come first
            future.set_exception(error) if error is not None else future.set_result(result)

    def run() -> None:
        result, error = None, None
        try:
            result = function(plugin_args, sample)
        except BaseException as raised:  # noqa: BLE001 carried to the waiting task; StopIteration and SystemExit cannot travel in a future
            plain = isinstance(raised, Exception) and not isinstance(raised, StopIteration)
            error = raised if plain else RuntimeError(f"{type(raised).__name__}: {raised}")
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="reward-function", daemon=True).start()
    return future


def _name(sample: Sample) -> str:
    return f"prompt {sample.prompt_index}, sample {sample.sample_index}"
