"""The rollout side as the loop sees it: generate, evaluate, remember the data position. Nothing here blocks another call."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from slime_like.config.run import RunConfig
from slime_like.errors import RunError, WaitTimeout
from slime_like.records import EngineEndpoint, WeightsRef
from slime_like.rollout.collect import Collector, RolloutResult
from slime_like.rollout.data_source import DataSource, check_data, context_tokens, load_eval_data
from slime_like.rollout.evaluate import evaluate
from slime_like.rollout.generate import GenerationClient, Sampling
from slime_like.rollout.groups import CUSTOM_DEADLINES, GroupMaker
from slime_like.rollout.plugins import load_plugins
from slime_like.rollout.rewards.scorer import RewardScorer, ScoresSamples
from slime_like.rollout.routed_experts import RoutingShape
from slime_like.rollout.train_samples import to_train_samples

__all__ = ["RolloutManager", "RolloutResult", "check_data", "to_train_samples"]

_CLOSE_S = 30.0
_T = TypeVar("_T")


class RolloutManager:
    """Lives in the driver; all requests run in one event loop in a thread of its own, so the driver is free meanwhile.

    start() loads tokenizer, data and plugins and raises every error the user can make there; it needs no engine.
    generate() and start_generate() move the data position; call one at a time. evaluate() may run beside them.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        router_url: str,
        router_api_key: str | None,
        num_engines: int,
        reward_model: ScoresSamples | None = None,
        endpoints: Sequence[EngineEndpoint] = (),
    ):
        self._config = config
        self._endpoints = tuple(endpoints)  # of the engines behind the router; needed where they are asked for routed experts
        self._reward_model = reward_model
        self._router_url = router_url
        self._router_api_key = router_api_key
        self._concurrency = config.engine.sglang_server_concurrency * max(1, num_engines)
        self._weight_version = 0
        self._source: DataSource | None = None
        self._eval_data: dict[str, DataSource] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._client: GenerationClient | None = None
        self._scorer: RewardScorer | None = None
        self._generating: concurrent.futures.Future | None = None

    def start(self, source: DataSource | None = None) -> None:
        """Get everything ready. source: what check_data gave, to save reading the data twice."""
        config = self._config
        plugin_args = config.plugin_args()
        plugins = load_plugins(config)
        scorer = RewardScorer(config.reward, plugins.reward, plugin_args, self._reward_model)
        self._source = source or check_data(config)
        self._eval_data = load_eval_data(config, self._source.tokenizer)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rollout", daemon=True)
        self._thread.start()
        self._scorer, self._client = scorer, self._wait(self._submit(self._make_client()), "making the client")
        make = functools.partial(
            GroupMaker,
            self._client,
            scorer,
            plugin_args=plugin_args,
            custom_generate=plugins.generate,
            custom_timeout_s=CUSTOM_DEADLINES * config.rollout.rollout_request_timeout_s,
        )
        self._maker, self._eval_maker = make(), make(evaluation=True)
        sampling = Sampling.for_training(config.rollout, max_context_tokens=context_tokens(config), seed=str(config.data.rollout_seed))
        self._collector = Collector(self._source, self._maker, config.rollout, sampling=sampling, group_filter=plugins.group_filter, plugin_args=plugin_args)

    @property
    def source(self) -> DataSource:
        """The training data; start() must have run."""
        assert self._source is not None, "start() first"
        return self._source

    @property
    def num_rollouts(self) -> int:
        """Rollout steps of the whole run, from --num-rollout or --num-epoch."""
        return self.source.num_rollouts(self._config.rollout.rollout_batch_size)

    def generate(self, step: int, watch: Callable[[], None] | None = None) -> RolloutResult:
        """The groups of rollout `step`; waits for them. watch: asked each second meanwhile; what it raises ends the wait."""
        return self._wait(self.start_generate(step), f"rollout {step}", watch)

    def start_generate(self, step: int) -> concurrent.futures.Future[RolloutResult]:
        """Begin rollout `step`; the result comes in the future. Raises RunError if another rollout is still being generated."""
        if self._generating is not None and not self._generating.done():
            raise RunError(f"rollout {step} cannot begin: the one before is still being generated.")
        self._generating = self._submit(self._generate(step))
        return self._generating

    def evaluate(self, step: int, watch: Callable[[], None] | None = None) -> dict[str, float]:
        """Metrics of all evaluation sets with the present weights; {} if there are none. Does not move the training data."""
        return self._wait(self._submit(self._evaluate()), f"the evaluation after {step} rollouts", watch)

    def policy_changed(self, weights: WeightsRef) -> None:
        """The engines serve these weights from now on: what to record for those that do not tell their version."""
        self._weight_version = weights.version

    def state_dict(self) -> dict:
        """What resuming needs, as JSON. Meaningful between rollouts, not while one is being generated."""
        return {"data": self.source.state_dict()}

    def load_state_dict(self, state: dict) -> None:
        """Go on where the state was saved; raises CheckpointError if the data changed."""
        self.source.load_state_dict(state["data"])

    def close(self) -> None:
        """Cancel what runs, close connections, end the reward processes. May be called twice, or without start()."""
        loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is None or thread is None:
            return
        done = asyncio.run_coroutine_threadsafe(self._shut_down(), loop)
        try:
            done.result(timeout=_CLOSE_S)
        except TimeoutError:
            raise WaitTimeout(who="driver", whom="the rollout thread", phase="closing", seconds=_CLOSE_S, last="running") from None
        finally:
            loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=_CLOSE_S)
        if not thread.is_alive():
            loop.close()

    async def _make_client(self) -> GenerationClient:
        config = self._config
        return GenerationClient(
            self._router_url,
            self._router_api_key,
            config.rollout,
            concurrency=self._concurrency,
            weight_version=lambda: self._weight_version,
            routing=RoutingShape.of(config.model) if config.loss.use_rollout_routing_replay else None,
            engines=self._endpoints,
        )

    async def _generate(self, step: int) -> RolloutResult:
        assert self._scorer is not None, "start() first"
        start, unscorable = time.monotonic(), self._scorer.num_unscorable
        try:
            result = await self._collector.collect()
        except RunError as error:
            error.add_note(f"in rollout {step}")
            raise
        seconds = time.monotonic() - start
        extra = {
            "rollout/seconds": seconds,
            "rollout/tokens_per_second": result.metrics["rollout/generated_tokens"] / seconds,
            "rollout/unscorable_samples": float(self._scorer.num_unscorable - unscorable),
            "rollout/epoch": self.source.position / len(self.source.rows),
        }
        return RolloutResult(groups=result.groups, metrics=result.metrics | extra)

    async def _evaluate(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for name, source in self._eval_data.items():
            metrics |= await evaluate(self._eval_maker, name, source, self._config)
        return metrics

    async def _shut_down(self) -> None:
        running = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for part in (self._client, self._scorer):
            if part is not None:
                await part.close()

    def _submit(self, work: Coroutine[Any, Any, _T]) -> concurrent.futures.Future[_T]:
        if self._loop is None:
            work.close()
            raise RunError("the rollout manager is not running: start() has not been called, or close() has.")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _wait(self, future: concurrent.futures.Future[_T], phase: str, watch: Callable[[], None] | None = None) -> _T:
        """The future's result. Every request and reward in it has its own deadline; here only the thread itself is watched."""
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
