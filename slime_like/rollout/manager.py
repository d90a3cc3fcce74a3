"""The rollout side as the driver sees it: a service in an event loop in a thread of its own, and calls that wait for
it.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from slime_like.config.run import RunConfig
from slime_like.errors import RunError, WaitTimeout
from slime_like.records import EngineEndpoint, SampleGroup, WeightsRef
from slime_like.rollout.check_data import check_data
from slime_like.rollout.data_source import DataSource
from slime_like.rollout.rewards.scorer import ScoresSamples
from slime_like.rollout.service import EngineAccess, RolloutResult, RolloutService
from slime_like.rollout.stock import Stock
from slime_like.utils.garbage import collect_seldom

_CLOSE_S = 30.0
#: How long a call that only changes the service's state may take.
_TELL_S = 60.0
_T = TypeVar("_T")


class RolloutManager:
    """All requests run in the thread's event loop, so the driver is free meanwhile.

    start() loads tokenizer, data and plugins and raises every error the user can make there; it needs no engine.
    """

    def __init__(self, config: RunConfig, access: EngineAccess, reward_model: ScoresSamples | None = None):
        self._config, self._access, self._reward_model = config, access, reward_model
        self._service: RolloutService | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._begun: dict[int, concurrent.futures.Future[RolloutResult]] = {}  # rollouts that nobody has taken yet
        self._evaluating: dict[int, concurrent.futures.Future[dict[str, float]]] = {}

    def start(self, source: DataSource | None = None) -> None:
        """Get everything ready. source: what check_data gave, to save reading the data twice."""
        source = source or check_data(self._config)
        collect_seldom()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout", daemon=True)
        self._thread.start()
        self._wait(self._submit(self._make(source)), "making the service")

    def generate(self, step: int, watch: Callable[[], None] | None = None) -> RolloutResult:
        """The groups of rollout `step`; waits for them.

        watch: asked each second meanwhile; what it raises ends the wait.
        """
        future = self._begun.pop(step, None) or self.start_generate(step)
        return self._wait(future, f"rollout {step}", watch)

    def begin(self, step: int) -> None:
        """Begin rollout `step`, which `generate` gives later; does nothing where it has begun."""
        if step not in self._begun:
            self._begun[step] = self.start_generate(step)

    def settle(self, watch: Callable[[], None] | None = None) -> None:
        """Wait until the rollouts that have begun are there."""
        for step, future in self._begun.items():
            self._wait(future, f"rollout {step}", watch)

    def ahead(self, step: int, *, wait: bool, watch: Callable[[], None] | None = None) -> RolloutResult | None:
        """Rollout `step` if it has begun, which `generate` still gives later; None: it has not. wait: until it is
        there; else None, too, if it is not.
        """
        future = self._begun.get(step)
        if future is None or not (wait or future.done()):
            return None
        return self._wait(future, f"rollout {step}", watch)

    def put_ahead(self, step: int, groups: tuple[SampleGroup, ...], metrics: dict[str, float]) -> None:
        """After load_state_dict: what `generate` gives for rollout `step`. Raises CheckpointError."""
        self._tell(lambda: self._running().feed.ledger.take_again([group.prompt.index for group in groups]))
        self._begun[step] = concurrent.futures.Future()
        self._begun[step].set_result(RolloutResult(groups=groups, metrics=metrics))

    def start_generate(self, step: int) -> concurrent.futures.Future[RolloutResult]:
        """Begin rollout `step`; the result comes in the future, or RunError if another rollout is still being
        generated.
        """
        return self._submit(self._running().generate(step))

    def evaluate(self, step: int, watch: Callable[[], None] | None = None) -> dict[str, float]:
        """Metrics of all evaluation sets with the present weights; {} if there are none. May run beside a rollout."""
        self.begin_evaluate(step)
        return self._wait(self._evaluating.pop(step), f"the evaluation after {step} rollouts", watch)

    def begin_evaluate(self, step: int, engines: Sequence[EngineEndpoint] = ()) -> None:
        """Begin the evaluation after `step` rollouts, which `evaluate` gives later; does nothing where it has begun.

        engines: only these are asked; (): all.
        """
        if step not in self._evaluating:
            self._evaluating[step] = self._submit(self._running().evaluate(step, engines))

    def evaluation_is_over(self, step: int) -> bool:
        """Whether `evaluate` gives what was begun at once."""
        return self._evaluating[step].done()

    @property
    def serving_url(self) -> str | None:
        """Where agents play (--serve-rollout), or None."""
        return self._running().serving_url

    def engines_changed(self, serving: Sequence[EngineEndpoint], *, enough: bool = True) -> None:
        """These engines take the training's requests from now on, and no others. enough: whether they may be sent
        requests; else those wait.
        """
        self._tell(lambda: self._running().engines_changed(serving, enough=enough))

    def policy_changing(self) -> frozenset[WeightsRef]:
        """Engines are about to get other weights; what they abort now did not fail. Adapters that requests under way
        have named.
        """
        return self._tell(self._running().policy_changing)

    def policy_changed(self, weights: WeightsRef, steps: int = 0) -> None:
        """The engines serve these from now on: also what to record for those that do not tell their version.

        steps: rollouts that they were trained on.
        """
        self._tell(lambda: self._running().policy_changed(weights, steps))

    def trained(self, prompts: Iterable[int]) -> None:
        """The trainer has used the groups of these prompts."""
        self._tell(lambda: self._running().trained(prompts))

    def snapshot(self) -> tuple[dict, Stock | None]:
        """What resuming needs, of one moment: as JSON, and what is made ahead between two rollouts, where anything
        can be.
        """
        state, stock = self._wait(self._submit(self._running().snapshot()), "a checkpoint")
        return {"data": state}, stock

    def load_state_dict(self, state: dict) -> None:
        """Go on where the state was saved; raises CheckpointError if the data changed."""
        self._tell(lambda: self._running().feed.load_state_dict(state["data"]))

    def load_stock(self, stock: Stock, step: int) -> None:
        """After load_state_dict: with what a snapshot has beside it, in rollout `step`. Raises CheckpointError."""
        self._tell(lambda: self._running().load_stock(stock, step))

    def close(self) -> None:
        """Cancel what runs, close connections, end the reward processes. May be called twice, or without start()."""
        loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is None or thread is None:
            return
        done = asyncio.run_coroutine_threadsafe(self._shut_down(), loop)
        try:
            done.result(timeout=_CLOSE_S)
        except TimeoutError:
            raise WaitTimeout(
                who="driver", whom="the rollout thread", phase="closing", seconds=_CLOSE_S, last="running"
            ) from None
        finally:
            loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=_CLOSE_S)
        if not thread.is_alive():
            loop.close()

    async def _make(self, source: DataSource) -> None:
        self._service = RolloutService(self._config, self._access, source, self._reward_model)
        await self._service.start()  # if it fails, close() ends what it has begun

    async def _shut_down(self) -> None:
        running = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if self._service is not None:
            await self._service.close()

    def _running(self) -> RolloutService:
        if self._service is None or self._loop is None:
            raise RunError("the rollout manager is not running: start() has not been called, or close() has.")
        return self._service

    def _tell(self, change: Callable[[], _T]) -> _T:
        """Run `change` inside the event loop, between two of its steps."""

        async def run() -> _T:
            return change()

        try:
            return self._submit(run()).result(timeout=_TELL_S)
        except TimeoutError:
            raise WaitTimeout(
                who="driver",
                whom="the rollout thread",
                phase="a change of state",
                seconds=_TELL_S,
                last="its loop is busy",
            ) from None

    def _submit(self, work: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        if self._loop is None:
            work.close()
            raise RunError("the rollout manager is not running: start() has not been called, or close() has.")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _wait(self, future: concurrent.futures.Future[_T], phase: str, watch: Callable[[], None] | None = None) -> _T:
        """The future's result.

        Every request and reward in it has its own deadline; here only the thread itself is watched.
        """
        while True:
            try:
                return future.result(timeout=1.0)
            except TimeoutError:
                if future.done():
                    raise  # the work's own
                if self._thread is None or not self._thread.is_alive():
                    raise RunError(f"the rollout thread ended during {phase}.") from None
                if watch is not None:
                    try:
                        watch()
                    except RunError:
                        future.cancel()
                        raise
            except concurrent.futures.CancelledError:
                raise RunError(f"{phase} was cancelled: the rollout manager was closed.") from None
            except KeyboardInterrupt:
                future.cancel()
                raise
