"""The engines that this run starts itself: server processes under Ray actors that hold their GPUs.

Which of them serves is the fleet's matter.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Collection, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from slime_like.cluster.bundles import Bundles
from slime_like.cluster.engine_actor import EngineActor
from slime_like.cluster.gpu_environment import nccl_environment
from slime_like.cluster.ray_session import Wait, call_error, kill_actors
from slime_like.cluster.receivers import Receivers
from slime_like.config.adapter_rules import versions_at_once
from slime_like.config.deterministic_rules import seeded_engine_flags
from slime_like.config.hf_model import read_hf_config
from slime_like.config.lora import adapter_flags
from slime_like.config.quantisation import engine_flags, plain_flags, scheme_of
from slime_like.config.run import RunConfig
from slime_like.errors import RunError
from slime_like.planning.engines import EnginePlan
from slime_like.planning.placement import PlacementPlan
from slime_like.records import EngineEndpoint
from slime_like.sglang_backend.cpu_compat import BATCH_INVARIANT
from slime_like.sglang_backend.launcher import EngineSpec
from slime_like.sglang_backend.shared_memory import shared_environment
from slime_like.utils.net import host_port

#: Deadline of one question to the actors, in seconds.
_ASK_S = 60.0
#: How long engines that are told to end may take.
_STOP_S = 15.0


class EngineProcesses:
    """Engines by their index; each may have parts on several machines."""

    def __init__(self, config: RunConfig, plan: PlacementPlan, bundles: Bundles, run_dir: str):
        self._config, self._plan, self._bundles, self._run_dir = config, plan, bundles, run_dir
        self._actors: dict[int, dict[str, Any]] = {}  # engine -> name of its part -> actor
        self._starting: dict[int, dict[str, ray.ObjectRef]] = {}  # engine -> name of its part -> its endpoint
        self._timeout_s = config.engine.engine_start_timeout_s

    def begin(self, engines: Sequence[EnginePlan], receivers: Receivers | None) -> None:
        """Begin starting engines, and a receiver of weight deltas on each machine that has none; `wait` waits."""
        actor_class = ray.remote(EngineActor)
        parts = []  # (engine, node rank, its bundles there, actor)
        for engine in engines:
            for rank in range(engine.num_nodes):
                here = [bundle for bundle, at in zip(engine.bundles, engine.node_ranks, strict=True) if at == rank]
                name = f"{engine.index}" if rank == 0 else f"{engine.index}.{rank}"
                options = self._bundles.options(here[0], self._plan.bundles[here[0]].roles["rollout"])
                actor = actor_class.options(**options).remote(
                    name, f"{self._run_dir}/logs", self._config.observability.log_level
                )
                self._actors.setdefault(engine.index, {})[_part_name(engine, rank)] = actor
                parts.append((engine, rank, here, actor))
        one_host = self._bundles.on_one_host()
        address_refs = (
            {} if one_host else {_part_name(engine, rank): actor.address.remote() for engine, rank, _, actor in parts}
        )
        addresses = dict(
            zip(
                address_refs, Wait(self._timeout_s, whom="the engines", phase="start").gather(address_refs), strict=True
            )
        )
        for engine, rank, here, actor in parts:
            host = "127.0.0.1" if one_host else addresses[_part_name(engine, rank)][0]
            spec = self._spec(engine, host, rank, here)
            if spec.nnodes > 1:
                spec = dataclasses.replace(spec, dist_init_addr=host_port(*addresses[_part_name(engine, 0)]))
            if receivers is not None:
                node_id = self._bundles.gpus[here[0]].node_id
                receivers.add(engine.index, node_id, host, self._bundles.options(here[0], 0.0))
            self._starting.setdefault(engine.index, {})[_part_name(engine, rank)] = actor.start.remote(
                spec, self._timeout_s
            )

    def wait(self) -> list[EngineEndpoint]:
        """Wait for all that were begun; their endpoints. Raises EngineError with the end of a log, or WaitTimeout."""
        refs = {name: ref for parts in self._starting.values() for name, ref in parts.items()}
        self._starting = {}
        answers = Wait(self._timeout_s, whom="the engines", phase="start").gather(refs)
        return [endpoint for name, endpoint in zip(refs, answers, strict=True) if "node rank" not in name]

    def poll(self, index: int) -> EngineEndpoint | None:
        """The endpoint of an engine that was begun, once it is healthy; None before. Raises as `wait` does."""
        parts = self._starting[index]
        done, waiting = ray.wait(list(parts.values()), num_returns=len(parts), timeout=0)
        if waiting and _failure(parts) is None:
            return None
        self._starting.pop(index)
        answers = Wait(_ASK_S, whom=f"engine {index}", phase="start").gather(parts)
        return next(endpoint for name, endpoint in zip(parts, answers, strict=True) if "node rank" not in name)

    def dead(self, known: Collection[int] = ()) -> dict[int, RunError]:
        """Engines beside the `known` ones that have ended, and what the end of their log says. An actor that starts one
        answers no question before it is done, minutes of a large model: `poll` asks after those.

        Raises WaitTimeout if an actor does not answer.
        """
        settled = self._actors.keys() - set(known) - self._starting.keys()
        actors = {index: self._actors[index] for index in sorted(settled)}
        checks = {
            index: {name: actor.check.remote() for name, actor in parts.items()} for index, parts in actors.items()
        }
        refs = {name: ref for parts in checks.values() for name, ref in parts.items()}
        try:
            Wait(_ASK_S, whom="the engines", phase="health check").gather(refs)
        except RunError:
            failures = {index: failure for index, parts in checks.items() if (failure := _failure(parts)) is not None}
            if not failures:
                raise
            return failures
        return {}

    def stop(self, indices: Sequence[int] | None = None) -> None:
        """End engines (None: all) and give their GPUs back."""
        chosen = list(self._actors) if indices is None else indices
        actors = [actor for index in chosen for actor in self._actors.pop(index, {}).values()]
        for index in chosen:
            self._starting.pop(index, None)
        if actors:
            refs = [actor.stop.remote() for actor in actors]
            ray.wait(refs, num_returns=len(refs), timeout=_STOP_S)
            kill_actors(actors)

    def _spec(self, engine: EnginePlan, host: str, node_rank: int, bundles: list[int]) -> EngineSpec:
        """One machine's server of an engine; `bundles` are the engine's there."""
        config, suffix = self._config, f".{node_rank}" if node_rank else ""
        scheme = scheme_of(config.sync.rollout_quantization)
        assert config.checkpoint.hf_checkpoint, "--hf-checkpoint is checked before anything starts"
        return EngineSpec(
            index=engine.index,
            model_path=os.path.abspath(config.checkpoint.hf_checkpoint),
            tp_size=engine.tp,
            nnodes=engine.num_nodes,
            node_rank=node_rank,
            host=host,
            dtype={True: "bfloat16", False: "float32", None: None}[config.optimizer.bf16],
            gpu_ids=tuple(self._bundles.gpus[i].gpu_id for i in bundles),
            environment=nccl_environment(os.environ, config.engine.sglang)
            | shared_environment()
            | ({BATCH_INVARIANT: "1"} if config.observability.deterministic else {}),
            context_length=config.rollout.rollout_max_context_len or config.model.max_position_embeddings,
            seed=config.data.rollout_seed + engine.index,
            extra_flags=config.engine.sglang
            | seeded_engine_flags(config, on_gpu=self._bundles.have_cuda)
            | ({"enable_return_routed_experts": True} if config.loss.use_rollout_routing_replay else {})
            | (
                adapter_flags(config.lora, config.model, num_versions=versions_at_once(config))
                if config.sync.sends_adapters
                else {}
            )
            | (self._plain_flags() if scheme is None else engine_flags(scheme, config.engine.sglang)),
            memory_saver=config.offload_rollout,
            shares_gpus=config.shares_cards,
            log_level=config.observability.log_level,
            log_path=f"{self._run_dir}/logs/engine-{engine.index}{suffix}.log",
        )

    def _plain_flags(self) -> dict:
        """What keeps an engine from a checkpoint in eight bits, where syncs send plain weights."""
        config = self._config
        assert config.checkpoint.hf_checkpoint
        if config.placement.debug_rollout_only or config.sync.sends_adapters:
            return {}
        return plain_flags(read_hf_config(config.checkpoint.hf_checkpoint), config.engine.sglang)


def _part_name(engine: EnginePlan, node_rank: int) -> str:
    return f"engine {engine.index}" + (f" node rank {node_rank}" if node_rank else "")


def _failure(parts: dict[str, ray.ObjectRef]) -> RunError | None:
    """How the check of an engine's parts has failed; None if none has, so far."""
    done = ray.wait(list(parts.values()), num_returns=len(parts), timeout=0)[0]
    for name, ref in parts.items():
        if ref in done:
            try:
                ray.get(ref)
            except (RayTaskError, RayActorError) as error:
                failure = call_error(error, name, "health check")
                return failure if isinstance(failure, RunError) else RunError(str(failure))
    return None
