"""The rollout side by itself: generates, evaluates and keeps the ledger, inside whatever event loop it is started in.

Knows neither the driver nor Ray: a thread of the driver runs it today (manager.py), an actor's event loop could.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterable, Sequence
from typing import Any

from slime_like.config.run import RunConfig
from slime_like.errors import RunError
from slime_like.records import EngineEndpoint, SampleGroup, WeightsRef
from slime_like.rollout.agents.stage import AgentStage
from slime_like.rollout.continuing import ContinuingClient
from slime_like.rollout.data_source import DataSource, context_tokens, load_eval_data
from slime_like.rollout.evaluate import check_versions, eval_sampling, evaluate, set_metrics
from slime_like.rollout.filters import apply_filter
from slime_like.rollout.generate import GenerationClient, Sampling
from slime_like.rollout.group_flow import FlowLimits, GroupFlow
from slime_like.rollout.group_pool import Taken
from slime_like.rollout.group_stream import GroupStream, StreamLimits
from slime_like.rollout.groups import CUSTOM_DEADLINES, GroupMaker, GroupOutcome, groups_at_a_time
from slime_like.rollout.hooks import chosen_prompts, eval_data, filtered_samples, logged
from slime_like.rollout.policy import Policy
from slime_like.rollout.prefill import with_prefill
from slime_like.rollout.prompt_feed import PromptFeed
from slime_like.rollout.put_aside import PutAside
from slime_like.rollout.rewards.scorer import RewardScorer, ScoresSamples
from slime_like.rollout.rollout_metrics import FILTERED, detail_metrics, drop_metrics, ledger_metrics, sample_metrics
from slime_like.rollout.rollout_plugins import load_rollout_plugins
from slime_like.rollout.routed_experts import RoutingShape
from slime_like.rollout.serve.stage import ServeStage
from slime_like.rollout.staleness import check_bound, staleness_metrics, without_older
from slime_like.rollout.stock import AheadKeeper, Stock
from slime_like.rollout.user_rollout import EvalTools, RolloutTools
from slime_like.utils.files import RunDirectory

#: Of a stock's record: (answers that were gone on with, tokens thrown away) since the last rollout.
_ENDED = "ended"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutResult:
    """rollout_batch_size groups in the order of their prompts, or what a rollout function gave; and metrics."""

    groups: tuple[SampleGroup, ...]
    metrics: dict[str, float]
    busy: tuple[tuple[float, float], ...] = ()  # time.monotonic() from and to which groups were being made


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineAccess:
    """Where requests go."""

    router_url: str
    router_api_key: str | None = dataclasses.field(repr=False)
    num_engines: int
    #: of the engines behind the router; needed where they are asked for routed experts, or to end what runs
    endpoints: tuple[EngineEndpoint, ...] = ()


class RolloutService:
    """Make it inside the event loop that runs it.

    Raises every error that the user can make; needs no engine for that.
    """

    def __init__(
        self, config: RunConfig, access: EngineAccess, source: DataSource, reward_model: ScoresSamples | None = None
    ):
        self._config = config
        run_dir = config.observability.run_dir
        put_aside = PutAside(config.reward) if config.reward.drops_errors else None
        self.feed = PromptFeed(source, RunDirectory(run_dir).dropped if run_dir else None, put_aside)
        self.policy = Policy()
        self._taken_at: float | None = None
        self._trained_on = {self.policy.weights.version: 0}  # weight version -> rollouts that it was trained on
        self._plugins, plugin_args = load_rollout_plugins(config), config.plugin_args()
        plugins = self._plugins
        self._eval_data = load_eval_data(config, source.tokenizer)
        self._scorer = RewardScorer(
            config.reward, plugins.reward, plugin_args, reward_model, environment=config.plays_episodes
        )
        self._client = self._make_client(access, source)
        # On engines set aside no sync concerns an evaluation.
        self._eval_policy = Policy() if config.asynchrony.eval_num_engines else self.policy
        self._eval_client = self._make_eval_client(access)
        if config.engine.outlives_faults:
            self._client.wait_for_engines(self.policy)
            self._eval_client.wait_for_engines(self._eval_policy)
        self._num_engines = access.num_engines
        self._agents = self._make_agents(source)
        make = functools.partial(
            GroupMaker,
            scorer=self._scorer,
            plugin_args=plugin_args,
            custom_generate=plugins.generate,
            custom_timeout_s=CUSTOM_DEADLINES * config.rollout.rollout_request_timeout_s,
        )
        agents = self._agents
        self._maker = make(self._client, policy=self.policy, player=agents.player if agents else None)
        self._eval_maker = make(
            self._eval_client,
            policy=self._eval_policy,
            player=agents.eval_player if agents else None,
            evaluation=True,
        )
        self._plugin_args = plugin_args
        self._sampling = Sampling.for_training(
            config.rollout, max_context_tokens=context_tokens(config), seed=str(config.data.rollout_seed)
        )
        group = functools.partial(
            self._maker.group, num_samples=config.rollout.n_samples_per_prompt, sampling=self._sampling
        )
        self._ahead = AheadKeeper(config.asynchrony.staleness_bound)
        choose = None if plugins.choose is None else functools.partial(chosen_prompts, plugins.choose, plugin_args)
        self.stream = self._make_stream(group, choose, access)

    @property
    def serving_url(self) -> str | None:
        """Where agents play (--serve-rollout), or None."""
        return self._agents.url if isinstance(self._agents, ServeStage) else None

    async def start(self) -> None:
        """Open the endpoint of foreign agents, where there is one."""
        if isinstance(self._agents, ServeStage):
            await self._agents.start()

    async def generate(self, step: int) -> RolloutResult:
        """The groups of rollout `step`; nothing is in flight afterwards, but for --async-mode full."""
        rollout = self._config.rollout
        start, unscorable = time.monotonic(), self._scorer.num_unscorable
        try:
            taken, own_metrics = await self._take(step)
            groups = self._after_taking(taken, step)
        except RunError as error:
            error.add_note(f"in rollout {step}")
            raise
        # Where generation never stops, what was made belongs to all the time since the last rollout was taken.
        seconds = time.monotonic() - (self._taken_at or start)
        self._taken_at = time.monotonic() if self._config.asynchrony.is_full else None
        metrics = sample_metrics(groups, mask_truncated=rollout.mask_truncated_samples) | drop_metrics(
            taken.outcomes, taken.dropped
        )
        metrics |= detail_metrics(groups, self._config.observability, self._config.eval.eval_pass_threshold)
        metrics |= ledger_metrics(self.feed.ledger) | self._staleness_metrics(groups, taken, step)
        metrics |= {
            "rollout/seconds": seconds,
            "rollout/tokens_per_second": metrics["rollout/generated_tokens"] / seconds,
            "rollout/put_aside_rows": float(self.feed.put_aside_rows),
            "rollout/unscorable_samples": float(self._scorer.num_unscorable - unscorable),
        }
        if self.feed.epoch is not None:
            metrics["rollout/epoch"] = self.feed.epoch
        if self._agents is not None:
            metrics |= self._agents.player.tally.take("rollout/episodes/")
        metrics |= own_metrics
        self.feed.source.observe(groups)
        samples = [sample for group in groups for sample in group.samples]
        metrics |= logged(self._plugins.rollout_log, step, self._plugin_args, samples, dict(metrics), seconds)
        return RolloutResult(groups=groups, metrics=metrics, busy=taken.busy)

    async def evaluate(self, step: int, engines: Sequence[EngineEndpoint] = ()) -> dict[str, float]:
        """Metrics of all evaluation sets with the present weights; {} if there are none. engines: only these are asked,
        and no sync reaches them meanwhile; (): all.

        Moves nothing of the training's.
        """
        if engines:
            self._eval_client.ask_only(engines)
            self._eval_policy.changed(self.policy.weights)
        started, weights = time.monotonic(), self._eval_policy.weights
        metrics: dict[str, float] = {}
        sets: dict[str, tuple[SampleGroup, ...]] = {}
        hook = self._plugins.evaluation
        if hook is not None:
            sets, metrics = await self._eval_tools().run(hook, self._plugin_args, step)
        else:
            for name, source in self._eval_data.items():
                sets[name] = await evaluate(self._eval_maker, name, source, self._config)
                if self._agents is not None:
                    metrics |= self._agents.eval_player.tally.take(f"eval/{name}/episodes/")
        for name, groups in sets.items():
            if engines:
                check_versions(name, groups, weights)
            metrics |= set_metrics(name, groups, self._config.eval.eval_pass_threshold)
        if sets:
            metrics["eval/seconds"] = time.monotonic() - started
            metrics["eval/engines"] = float(len(engines) or self._num_engines)
            metrics["eval/weight_version"] = float(weights.version)
            metrics |= logged(self._plugins.eval_log, step, self._plugin_args, eval_data(sets), dict(metrics))
        return metrics

    def engines_changed(self, serving: Sequence[EngineEndpoint], *, enough: bool = True) -> None:
        """The training's requests go to these engines only, also past the router; without `enough` they wait."""
        for policy in {self.policy, self._eval_policy}:
            policy.engines_changed(enough=enough)
        if self._client.routing:
            self._client.ask_only(serving)
        if isinstance(self._client, ContinuingClient):
            self._client.hold_on(serving)

    def engines_looked_at(self) -> None:
        """Somebody has looked which engines have died; what came of it was said before."""
        for policy in {self.policy, self._eval_policy}:
            policy.engines_looked_at()

    def policy_changing(self) -> frozenset[WeightsRef]:
        """Engines are about to get other weights; what they abort now did not fail. Adapters that requests under way
        have named.
        """
        self.policy.changing()
        return self.policy.in_use

    def policy_changed(self, weights: WeightsRef, steps: int = 0) -> None:
        """The engines serve these from now on. steps: rollouts that they were trained on."""
        self.policy.changed(weights)
        self._trained_on[weights.version] = steps
        self.stream.policy_changed(steps)

    def trained(self, prompts: Iterable[int]) -> None:
        """The trainer has used the groups of these prompts."""
        self.feed.ledger.trained(prompts)

    async def snapshot(self) -> tuple[dict, Stock | None]:
        """What resuming needs, all of one moment: the prompts as JSON, and what is made between two rollouts, where
        anything can be. With --partial-rollout nothing runs afterwards, until the next rollout.
        """
        if isinstance(self._client, ContinuingClient) and self._config.asynchrony.partial_rollout:
            await self._client.hold(self._config.rollout.rollout_request_timeout_s)
        stock = None
        if isinstance(self.stream, GroupFlow):
            stock = self._ahead.stock(self.stream, self._trained_on)
            if isinstance(self._client, ContinuingClient):
                stock.record[_ENDED] = [self._client.num_continued, self._client.thrown_tokens]
        return self.feed.state_dict(), stock

    def load_stock(self, stock: Stock, step: int) -> None:
        """After the feed's state: go on with what a snapshot has, in rollout `step`. Raises CheckpointError."""
        if isinstance(self.stream, GroupFlow):
            self._trained_on |= self._ahead.load(self.stream, stock, step)
        if isinstance(self._client, ContinuingClient):
            self._client.num_continued, self._client.thrown_tokens = stock.record.get(_ENDED, (0, 0))

    async def close(self) -> None:
        """End what runs, close connections, end the reward processes."""
        await self.stream.stop()
        self.feed.log_put_aside()
        for part in (self._client, self._eval_client, self._scorer, self._agents):
            if part is not None:
                await part.close()

    async def _take(self, step: int) -> tuple[Taken, dict[str, float]]:
        """The rollout's groups, and metrics of the user's rollout function where there is one."""
        rollout = self._config.rollout
        if self._plugins.rollout is None:
            return await self._from_stream(rollout.rollout_batch_size, step), {}
        tools = RolloutTools(
            self.feed,
            self._maker,
            self._scorer,
            self._client,
            functools.partial(self._from_stream, step=step),
            sampling=self._sampling,
            num_groups=rollout.rollout_batch_size,
            group_size=rollout.n_samples_per_prompt,
        )
        return await tools.run(self._plugins.rollout, self._plugin_args, step)

    async def _from_stream(self, count: int, step: int) -> Taken:
        """With --partial-rollout what else runs is ended, and gone on with in the next rollout."""
        if not isinstance(self._client, ContinuingClient) or not self._config.asynchrony.partial_rollout:
            return await self.stream.take(count, step)
        self.policy.go_on()
        taken = await self.stream.take(count, step)
        await self._client.hold(self._config.rollout.rollout_request_timeout_s)
        return taken

    def _after_taking(self, taken: Taken, step: int) -> tuple[SampleGroup, ...]:
        """What the user's functions make of the groups: one looks at all, one says which samples train."""
        plugins, asynchrony = self._plugins, self._config.asynchrony
        if asynchrony.staleness_bound is not None and asynchrony.stale_policy != "train":
            check_bound(taken.groups, step, self._trained_on, asynchrony.staleness_bound)
        if asynchrony.mask_offpolicy_in_partial_rollout:
            taken = dataclasses.replace(taken, groups=without_older(taken.groups, self.policy.weights.version))
        if plugins.all_samples is not None:
            everything = sorted((outcome.group for outcome in taken.outcomes), key=lambda group: group.prompt.index)
            plugins.all_samples(self._plugin_args, everything, self.feed.source)
        if plugins.sample_filter is None:
            return taken.groups
        return filtered_samples(plugins.sample_filter, self._plugin_args, taken.groups)

    def _eval_tools(self) -> EvalTools:
        sets = {
            name: [source.prompt_at(position) for position in range(len(source.rows))]
            for name, source in self._eval_data.items()
        }
        return EvalTools(
            self._eval_maker,
            self._scorer,
            self._eval_client,
            sets=sets,
            sampling=functools.partial(eval_sampling, self._config),
            num_samples=lambda name: self._config.eval.setting(name, "n_samples_per_eval_prompt") or 1,
        )

    def _judge(self, outcome: GroupOutcome) -> str | None:
        if self._plugins.group_filter is None:
            return None
        path = str(self._config.rollout.dynamic_sampling_filter_path)
        keep, reason = apply_filter(self._plugins.group_filter, path, self._plugin_args, outcome.group)
        return None if keep else FILTERED + reason

    def _staleness_metrics(self, groups: tuple[SampleGroup, ...], taken: Taken, step: int) -> dict[str, float]:
        """`async/…`; {} where nothing can be stale."""
        asynchrony = self._config.asynchrony
        if not asynchrony.is_stale:
            return {}
        metrics = staleness_metrics(groups, taken, step, self._trained_on, asynchrony.staleness_bound)
        if isinstance(self._client, ContinuingClient):
            num_continued, thrown = self._client.take_counts()
            metrics["async/continued_requests"] = float(num_continued)
            metrics["async/tokens_thrown_away"] += thrown
        return metrics

    def _make_stream(self, group, choose, access: EngineAccess) -> GroupStream | GroupFlow:
        config, asynchrony = self._config, self._config.asynchrony
        if not (asynchrony.is_full or asynchrony.partial_rollout):
            return GroupStream(self.feed, group, self._judge, self._limits(), choose=choose)
        rollout = config.rollout
        workers = rollout.over_sampling_batch_size or rollout.rollout_batch_size
        if asynchrony.is_full:
            workers = max(1, self._client_options(access)["concurrency"] // rollout.n_samples_per_prompt)
        limits = FlowLimits(
            batch=rollout.rollout_batch_size,
            workers=workers,
            max_staleness=asynchrony.staleness_bound,
            stale_policy=asynchrony.stale_policy,
            max_draws=rollout.dynamic_sampling_max_draws,
            works_ahead=asynchrony.is_full,
            num_rollouts=config.data.num_rollout,
        )
        return GroupFlow(self.feed, self._ahead.keeping(group), self._judge, limits, choose=choose)

    def _limits(self) -> StreamLimits:
        rollout = self._config.rollout
        # Without a filter only failures leave gaps, and a gap is one prompt.
        is_picky = self._plugins.group_filter is not None or self._plugins.choose is not None
        batch = (rollout.over_sampling_batch_size or rollout.rollout_batch_size) if is_picky else None
        return StreamLimits(
            draw_batch=batch,
            max_draws=rollout.dynamic_sampling_max_draws,
            max_running=groups_at_a_time(self._client, rollout.n_samples_per_prompt),
        )

    def _make_agents(self, source: DataSource) -> AgentStage | ServeStage | None:
        if not self._config.plays_episodes:
            return None
        parts = (self._config, source.tokenizer, self._client, self.policy)
        if not self._config.agents.env:
            return ServeStage(*parts)
        return AgentStage(*parts, eval_client=self._eval_client, eval_policy=self._eval_policy)

    def _make_client(self, access: EngineAccess, source: DataSource) -> GenerationClient:
        if not self._config.keeps_partial_answers:
            return GenerationClient(**self._client_options(access))

        def decode(tokens: list[int], skip_special_tokens: bool) -> str:
            return source.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)

        return ContinuingClient(
            **self._client_options(access), policy=self.policy, decode=decode, endpoints=access.endpoints
        )

    def _make_eval_client(self, access: EngineAccess) -> GenerationClient:
        """Evaluation is never held, and what a sync ends of it is asked for again."""
        num_engines, policy = self._config.asynchrony.eval_num_engines, None
        if num_engines:
            access, policy = dataclasses.replace(access, num_engines=num_engines), self._eval_policy
        elif not self._config.keeps_partial_answers:
            return self._client
        return GenerationClient(**self._client_options(access, policy))

    def _client_options(self, access: EngineAccess, policy: Policy | None = None) -> dict[str, Any]:
        config, policy = self._config, policy or self.policy
        return {
            "url": access.router_url,
            "api_key": access.router_api_key,
            "rollout": with_prefill(config, access.num_engines),
            "concurrency": config.engine.sglang_server_concurrency * max(1, access.num_engines),
            "weight_version": lambda: policy.weights.version,
            "adapter": policy.request if config.sync.sends_adapters else None,
            "routing": RoutingShape.of(config.model) if config.loss.use_rollout_routing_replay else None,
            "engines": access.endpoints if config.loss.use_rollout_routing_replay else (),
        }
