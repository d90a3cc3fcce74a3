"""The engines and their router as one typed object, whether they were started here or run elsewhere."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Callable

import ray

from slime_like.cluster.bundles import Bundles
from slime_like.cluster.ray_session import Wait, kill_actors
from slime_like.cluster.train_group import redirect_output
from slime_like.config.run import RunConfig
from slime_like.config.system import engine_url
from slime_like.errors import EngineError, WeightSyncError
from slime_like.planning.placement import EnginePlan, PlacementPlan
from slime_like.records import EngineEndpoint, SyncReceipt
from slime_like.sglang_backend.client import EngineClient
from slime_like.sglang_backend.launcher import Engine, EngineSpec, host_has_cuda, launch_engine
from slime_like.sglang_backend.router import Router, attach_router, launch_router
from slime_like.utils.net import host_port
from slime_like.weight_sync.envelope import WeightUpdate

logger = logging.getLogger(__name__)

#: Deadline of one control request to an engine, in seconds.
CONTROL_TIMEOUT_S = 60.0


class EngineActor:
    """Holds an engine's GPUs and the SGLang server that runs on them as a child process."""

    def __init__(self, index: int, log_dir: str):
        redirect_output(f"{log_dir}/engine-actor-{index}.log")
        self._engine: Engine | None = None

    def address(self) -> str:
        """This node's address."""
        return ray.util.get_node_ip_address()

    def start(self, spec: EngineSpec, timeout_s: float) -> EngineEndpoint:
        """Start the server and wait until it is healthy."""
        if spec.dtype is None:  # the trainer's own rule
            spec = dataclasses.replace(spec, dtype="bfloat16" if host_has_cuda() else "float32")
        self._engine = launch_engine(spec, timeout_s)
        return self._engine.endpoint

    def check(self) -> None:
        """Raise EngineError with the tail of the log if the server has ended."""
        self._engine.check()

    def stop(self) -> None:
        """End the server."""
        if self._engine is not None:
            self._engine.close()


class RolloutGroup:
    """Every engine of the run, registered with one router."""

    def __init__(self, config: RunConfig, plan: PlacementPlan, bundles: Bundles, run_dir: str):
        self._config, self._plan, self._bundles = config, plan, bundles
        self._run_dir = run_dir
        self.actors: list = []
        self.endpoints: tuple[EngineEndpoint, ...] = ()
        self.clients: list[EngineClient] = []
        self.router: Router | None = None
        self._starting: dict = {}
        self._released: set[str] = set()  # memory tags that the engines have given back

    def start(self) -> None:
        """Begin starting every engine and the router; `wait_started` waits."""
        local = [engine for engine in self._plan.engines if engine.external_url is None]
        actor_class = ray.remote(EngineActor)
        for engine in local:
            share = self._plan.bundles[engine.bundles[0]].roles["rollout"]
            actor = actor_class.options(**self._bundles.options(engine.bundles[0], share)).remote(engine.index, f"{self._run_dir}/logs")
            self.actors.append(actor)
        one_host = self._bundles.on_one_host()
        timeout = self._config.engine.engine_start_timeout_s
        for actor, engine in zip(self.actors, local, strict=True):
            host = "127.0.0.1" if one_host else Wait(timeout, whom=f"engine {engine.index}", phase="start").gather({"its node": actor.address.remote()})[0]
            self._starting[f"engine {engine.index}"] = actor.start.remote(self._spec(engine, host), timeout)
        self.router = self._make_router()

    def _make_router(self) -> Router:
        engine, log_path = self._config.engine, f"{self._run_dir}/logs/router-0.log"
        if engine.sglang_router_ip:
            url = engine_url(host_port(engine.sglang_router_ip, engine.sglang_router_port))
            return attach_router(url, timeout_s=engine.engine_start_timeout_s, api_key=os.environ.get(engine.sglang_router_api_key_env))
        return launch_router(policy=engine.sglang_router_policy, port=engine.sglang_router_port, log_path=log_path, timeout_s=engine.engine_start_timeout_s)

    def _spec(self, engine: EnginePlan, host: str) -> EngineSpec:
        config = self._config
        return EngineSpec(
            index=engine.index, model_path=os.path.abspath(config.checkpoint.hf_checkpoint), tp_size=engine.tp, host=host,
            dtype={True: "bfloat16", False: "float32", None: None}[config.optimizer.bf16],
            gpu_ids=tuple(self._bundles.slots[i].gpu_id for i in engine.bundles),
            context_length=config.rollout.rollout_max_context_len or config.model.max_position_embeddings, seed=config.data.rollout_seed + engine.index,
            extra_flags=config.engine.sglang, memory_saver=config.offload_rollout, log_path=f"{self._run_dir}/logs/engine-{engine.index}.log",
        )

    def wait_started(self) -> None:
        """Wait for every engine, then register each with the router and wait until it is healthy there."""
        timeout = self._config.engine.engine_start_timeout_s
        started = Wait(timeout, whom="the engines", phase="start").gather(self._starting)
        self.endpoints = tuple(started) + tuple(self._external_endpoints())
        self.clients = [EngineClient(endpoint, timeout_s=CONTROL_TIMEOUT_S) for endpoint in self.endpoints]
        for endpoint in self.endpoints:
            self.router.register(endpoint, timeout_s=timeout)

    def _external_endpoints(self) -> list[EngineEndpoint]:
        """Reach each external engine once, and take its true tensor parallel size."""
        found = []
        key = os.environ.get(self._config.placement.rollout_external_api_key_env)
        for engine in self._plan.engines:
            if engine.external_url is None:
                continue
            endpoint = EngineEndpoint(index=engine.index, url=engine.external_url, api_key=key, tp_size=engine.tp, external=True)
            info = EngineClient(endpoint, timeout_s=CONTROL_TIMEOUT_S).server_info()
            found.append(EngineEndpoint(index=engine.index, url=engine.external_url, api_key=key, tp_size=int(info.get("tp_size", engine.tp)), external=True))
        return found

    def check(self) -> None:
        """Raise EngineError if an engine or the router has died, with the tail of its log."""
        if self.actors:
            Wait(CONTROL_TIMEOUT_S, whom="the engines", phase="health check").gather({f"engine {i}": a.check.remote() for i, a in enumerate(self.actors)})
        for client in self.clients:
            if client.endpoint.external:
                client.server_info()
        self.router.check()

    def release_memory(self) -> None:
        """Engines give back weights and KV cache."""
        for client in self.clients:
            client.flush_cache()
            client.release_memory_occupation(["kv_cache", "weights"])
        self._released = {"kv_cache", "weights"}

    def resume_memory(self, tag: str) -> None:
        """Engines take back "weights" (before a sync) or "kv_cache" (after it), if they had given it back."""
        if tag in self._released:
            for client in self.clients:
                client.resume_memory_occupation([tag])
            self._released.discard(tag)

    def update_weights(self, version: int, publish: Callable[[int, tuple[EngineEndpoint, ...]], SyncReceipt]) -> SyncReceipt:
        """One weight sync: pause, send, check the version on every engine, continue. A failed one leaves engines paused."""
        update = WeightUpdate(self.clients, self._plan.transport, timeout_s=self._config.sync.update_weight_timeout_s)
        update.begin()
        try:
            receipt = publish(version, self.endpoints)
        except BaseException:
            update.abandon()
            raise
        if receipt.num_tensors == 0:
            raise WeightSyncError(f"weight version {version}: the trainer sent no tensor")
        update.finish(version, directory=self._config.sync.update_weight_disk_dir)
        return receipt

    def close(self) -> None:
        """Deregister external engines, end our router and our engines."""
        if self.router is not None:
            for endpoint in self.endpoints:
                if endpoint.external:
                    try:
                        self.router.deregister(endpoint)
                    except EngineError as error:
                        logger.warning("engine %s stays registered: %s", endpoint.url, error)
            self.router.close()
        if self.actors:
            refs = [actor.stop.remote() for actor in self.actors]
            ray.wait(refs, num_returns=len(refs), timeout=15.0)
            kill_actors(self.actors)
