"""One way to score a sample, whichever reward the flags name."""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from slime_like.config.reward import BOXED, RewardConfig, reward_type_problem
from slime_like.errors import ConfigError, RewardError
from slime_like.records import Prompt, Sample
from slime_like.rollout.rewards import instructions
from slime_like.rollout.rewards.boxes import last_boxed
from slime_like.rollout.rewards.exact import exact
from slime_like.rollout.rewards.pool import WorkerPool
from slime_like.rollout.rewards.remote import RemoteFailure, RemoteReward
from slime_like.rollout.rewards.texts import f1, gpqa
from slime_like.rollout.rows import RM_TYPE
from slime_like.utils.supervise import running

#: --rm-type values that score in a worker process, the ones that score right here, and the one that another server
#: scores.
IN_WORKER = ("math", "math_strict", "deepscaler", "deepscaler_strict", "dapo")
IN_PROCESS = {"exact": exact, "f1": f1, "gpqa": gpqa}
REMOTE = "remote_rm"

_MOST_THREADS = 32


class ScoresSamples(Protocol):
    """A reward model, wherever it runs."""

    async def score(self, prompt: Prompt, sample: Sample) -> float:
        """One number for the whole sample; raises RunError if there is none."""
        ...


class RewardScorer:
    """Gives samples their reward, inside the rollout's event loop: the rule's + --reward-model-weight x the model's, or
    the one that there is.

    function: the user's rule (--custom-rm-path), None for --rm-type. model: the reward model, None without
    --reward-load. environment: samples come with a reward, which stands where there is no rule.
    num_unscorable: samples that a built-in rule could not judge within its deadline; the rule's part of their reward is
    0.
    """

    def __init__(
        self,
        config: RewardConfig,
        function: Callable | None,
        plugin_args: Any,
        model: ScoresSamples | None = None,
        *,
        environment: bool = False,
    ):
        known = (*IN_WORKER, *IN_PROCESS, instructions.KIND, REMOTE)
        plain = None if config.rm_type is None else config.rm_type.removeprefix(BOXED)
        has_other = plain is None and (model is not None or environment)
        if function is None and plain not in known and not has_other:
            raise ConfigError(
                [
                    (
                        f"--rm-type {config.rm_type} is unknown. Known: {', '.join(known)}; or --custom-rm-path"
                        " module.function."
                    )
                ]
            )
        self.config = config
        self.plugin_args = plugin_args
        self.num_unscorable = 0
        self._function = function
        self._model = model
        self._pool: WorkerPool | None = None
        self._remote: RemoteReward | None = None
        self._plugin_loop: asyncio.AbstractEventLoop | None = None
        self._threads: asyncio.Semaphore | None = None

    async def score(self, sample: Sample, prompt: Prompt, *, evaluation: bool = False) -> Sample:
        """The sample with its reward.

        Raises RewardError naming the sample if its function or server fails, hangs or gives no finite number.
        """
        rule = await self._rule(sample, prompt, self._key(evaluation))
        return await self._with_model(sample, prompt, rule)

    async def score_group(self, samples: Sequence[Sample], prompt: Prompt, *, evaluation: bool = False) -> list[Sample]:
        """A prompt's samples with their rewards, for --group-rm: the user's function sees them together.

        Raises as score does.
        """
        assert self._function is not None, "RewardConfig.problems() lets --group-rm through only with --custom-rm-path"
        if not samples:
            return []
        answers = await self._call(self._function, list(samples), samples[0])
        if not isinstance(answers, (list, tuple, np.ndarray)) or len(answers) != len(samples):
            raise self._error(
                f"gave {answers!r:.200}; with --group-rm it must give a list of {len(samples)} rewards, one a sample",
                samples[0],
            )
        rules = [
            self._number(answer, sample, self._key(evaluation)) for answer, sample in zip(answers, samples, strict=True)
        ]
        return list(
            await asyncio.gather(
                *(self._with_model(sample, prompt, rule) for sample, rule in zip(samples, rules, strict=True))
            )
        )

    async def close(self) -> None:
        """End the worker processes, the connections and the loop of the user's coroutines."""
        for part in (self._pool, self._remote):
            if part is not None:
                await part.close()
        if self._plugin_loop is not None:
            self._plugin_loop.call_soon_threadsafe(self._plugin_loop.stop)

    def _key(self, evaluation: bool) -> str | None:
        return (self.config.eval_reward_key if evaluation else None) or self.config.reward_key

    async def _with_model(self, sample: Sample, prompt: Prompt, rule: float | None) -> Sample:
        """The rule's reward and the model's in one; each is kept as it was in reward_parts where there is a model."""
        if self._model is None:
            return dataclasses.replace(sample, reward=rule)
        model = await self._model.score(prompt, sample)
        parts = {"model": model} if rule is None else {"rule": rule, "model": model}
        return dataclasses.replace(
            sample, reward=(rule or 0.0) + self.config.reward_model_weight * model, reward_parts=parts
        )

    async def _rule(self, sample: Sample, prompt: Prompt, key: str | None) -> float | None:
        """What --custom-rm-path or --rm-type says; None if only a reward model scores."""
        kind = prompt.metadata.get(RM_TYPE) or self.config.rm_type
        if self._function is not None:
            return self._number(await self._call(self._function, sample, sample), sample, key)
        if kind is None:
            return sample.reward  # an environment's; None where only a reward model scores
        if problem := reward_type_problem(kind):  # of a row that no file has
            raise RewardError(f"{_name(sample)}: its rm_type: {problem}")
        if kind.startswith(BOXED):
            kind, sample = (
                kind.removeprefix(BOXED),
                dataclasses.replace(sample, response=last_boxed(sample.response) or ""),
            )
        if kind == REMOTE:
            return self._number(await self._ask(sample, prompt), sample, key)
        if kind == instructions.KIND:
            return await self._instructions(sample, prompt)
        if sample.label is None:
            raise RewardError(
                f"--rm-type {kind} compares with a label, and {_name(sample)} has none. Fix: --label-key."
            )
        if kind in IN_PROCESS:
            return IN_PROCESS[kind](sample)
        self._pool = self._pool or WorkerPool()
        reward = await self._pool.score(
            kind, sample.response, str(sample.label), timeout_s=self.config.reward_timeout_s
        )
        if reward is None:
            self.num_unscorable += 1
        return reward or 0.0

    async def _instructions(self, sample: Sample, prompt: Prompt) -> float:
        if problem := instructions.row_problem(prompt.metadata):  # of a row that no file has
            raise RewardError(f"--rm-type ifbench, {_name(sample)}: {problem}")
        self._pool = self._pool or WorkerPool()
        task = {"kind": instructions.KIND, "response": sample.response, "metadata": instructions.task(prompt.metadata)}
        result = await self._pool.run(task, timeout_s=self.config.reward_timeout_s) or {}
        if "fault" in result:
            raise RewardError(f"--rm-type ifbench, {_name(sample)}: {result['fault']}")
        if "reward" not in result:
            self.num_unscorable += 1
        return result.get("reward", 0.0)

    async def _ask(self, sample: Sample, prompt: Prompt) -> Any:
        self._remote = self._remote or RemoteReward(self.config)
        try:
            return await self._remote.ask(prompt=prompt.text, response=sample.response, label=sample.label)
        except RemoteFailure as error:
            raise self._error(str(error), sample) from error

    async def _call(self, function: Callable, argument: Sample | list[Sample], sample: Sample):
        """Run the user's function away from our event loop, so that one that blocks meets its deadline all the same.

        argument: its second argument, a sample or a group. sample: who is named if it fails.
        """
        self._threads = self._threads or asyncio.Semaphore(_MOST_THREADS)
        async with self._threads:
            call = getattr(function, "__call__", None)  # noqa: B004
            is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
            try:
                # should it end the process, the supervisor names it
                with running(f"reward function {self.config.custom_rm_path} for {_name(sample)}"):
                    future = (
                        self._start_coroutine(function, argument)
                        if is_async
                        else _start_thread(function, self.plugin_args, argument)
                    )
                    return await asyncio.wait_for(future, self.config.reward_timeout_s)
            except TimeoutError as error:
                if future.done() and not future.cancelled():
                    raise self._error(f"raised {type(error).__name__}: {error}", sample) from error
                raise self._error(
                    f"gave no reward within {self.config.reward_timeout_s:g} s (--reward-timeout-s)", sample
                ) from None
            except Exception as error:
                raise self._error(f"raised {type(error).__name__}: {error}", sample) from error

    def _start_coroutine(self, function: Callable, argument: Sample | list[Sample]) -> asyncio.Future:
        if self._plugin_loop is None:
            self._plugin_loop = asyncio.new_event_loop()
            threading.Thread(target=self._plugin_loop.run_forever, name="reward-coroutines", daemon=True).start()
        return asyncio.wrap_future(
            asyncio.run_coroutine_threadsafe(function(self.plugin_args, argument), self._plugin_loop)
        )

    def _number(self, result: Any, sample: Sample, key: str | None) -> float:
        if isinstance(result, dict):
            if key is None:
                raise self._error(
                    f"gave a dict with the keys {sorted(map(str, result))}. Fix: name one with --reward-key", sample
                )
            if key not in result:
                raise self._error(
                    f"gave a dict without --reward-key {key!r}; its keys are {sorted(map(str, result))}", sample
                )
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
        who = (
            f"reward function {self.config.custom_rm_path}"
            if self._function is not None
            else f"reward server {self.config.rm_url}"
        )
        return RewardError(f"{who} {what}: {about}")


def _start_thread(function: Callable, plugin_args: Any, argument: Sample | list[Sample]) -> asyncio.Future:
    """Run a plain function in a daemon thread: unlike an executor's, a stuck one does not keep the process alive."""
    loop = asyncio.get_running_loop()
    future = loop.create_future()

    def settle(result, error) -> None:
        if not future.done():  # the deadline may have come first
            future.set_exception(error) if error is not None else future.set_result(result)

    def run() -> None:
        result, error = None, None
        try:
            result = function(plugin_args, argument)
        except BaseException as raised:  # noqa: BLE001 carried to the waiting task; StopIteration and SystemExit cannot travel in a future
            plain = isinstance(raised, Exception) and not isinstance(raised, StopIteration)
            error = raised if plain else RuntimeError(f"{type(raised).__name__}: {raised}")
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, name="reward-function", daemon=True).start()
    return future


def _name(sample: Sample) -> str:
    return f"prompt {sample.prompt_index}, sample {sample.sample_index}"
