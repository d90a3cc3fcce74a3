"""The engines and their router as one typed object, whether they were started here or run elsewhere (then see external.py)."""

from __future__ import annotations

import dataclasses
import logging
import os
import shutil
import time

import ray

from slime_like.cluster.bundles import Bundles
from slime_like.cluster.ray_session import Wait, kill_actors
from slime_like.cluster.receivers import Receivers
from slime_like.cluster.train_group import TrainGroup, redirect_output
from slime_like.config.run import RunConfig
from slime_like.config.system import engine_url
from slime_like.errors import EngineError, RunError, WeightSyncError
from slime_like.planning.engines import EnginePlan
from slime_like.planning.placement import PlacementPlan
from slime_like.records import EngineEndpoint, SyncReceipt, WeightsRef
from slime_like.sglang_backend.client import EngineClient
from slime_like.sglang_backend.external import HealthWatch
from slime_like.sglang_backend.launcher import Engine, EngineSpec, host_has_cuda, launch_engine
from slime_like.sglang_backend.router import Router, attach_router, launch_router
from slime_like.utils.logs import start_logging
from slime_like.utils.net import free_port, host_port
from slime_like.weight_sync.envelope import WeightUpdate
from slime_like.weight_sync.probe import compare_probe, probe_samples
from slime_like.weight_sync.receiver_client import RunningReceiver, start_receiver

logger = logging.getLogger(__name__)

#: Deadline of one control request to an engine, in seconds.
CONTROL_TIMEOUT_S = 60.0
#: SGLang's server goes on for 5 s after its scheduler was killed, without answering; then it ends, and its log says why.
_DYING_S = 10.0
#: How soon one that is well answers.
_ANSWER_S = 2.0


class EngineActor:
    """Holds an engine's GPUs on one machine and the SGLang server that runs on them as a child process."""

    def __init__(self, name: str, log_dir: str, log_level: str | None):
        redirect_output(f"{log_dir}/engine-actor-{name}.log")
        start_logging(log_level)
        self._engine: Engine | None = None
        self._receiver: RunningReceiver | None = None
        self._receiver_directory = ""

    def address(self) -> tuple[str, int]:
        """(this node's address, a free port there)."""
        host = ray.util.get_node_ip_address()
        return host, free_port(host)

    def start(self, spec: EngineSpec, timeout_s: float) -> EngineEndpoint:
        """Start the server and wait until it is healthy. Only node rank 0's endpoint takes requests."""
        if spec.dtype is None:  # the trainer's own rule
            spec = dataclasses.replace(spec, dtype="bfloat16" if host_has_cuda() else "float32")
        started = time.monotonic()
        self._engine = launch_engine(spec, timeout_s)
        logger.info("engine %d (pid %d) is healthy at %s after %.1f s", spec.index, self._engine.pid, self._engine.endpoint.url, time.monotonic() - started)
        return self._engine.endpoint

    def start_receiver(self, directory: str, host: str, log_path: str, timeout_s: float, log_level: str | None) -> tuple[str, str]:
        """Start this machine's receiver of weight deltas; its URL and key. `directory` is removed at the end."""
        self._receiver = start_receiver(directory, host=host, log_path=log_path, timeout_s=timeout_s, log_level=log_level or "info")
        self._receiver_directory = directory
        return self._receiver.url, self._receiver.key

    def check(self) -> None:
        """Raise EngineError, or ReceiverError, with the tail of the log if the server, or the receiver beside it, has ended."""
        self._engine.check()
        if self._receiver is not None:
            self._receiver.check()

    def stop(self) -> None:
        """End the server."""
        if self._engine is not None:
            self._engine.close()
        if self._receiver is not None:
            self._receiver.close()
            shutil.rmtree(self._receiver_directory, ignore_errors=True)


def _part_name(engine: EnginePlan, node_rank: int) -> str:
    return f"engine {engine.index}" + (f" node rank {node_rank}" if node_rank else "")


def _answers(client: EngineClient) -> bool:
    try:
        EngineClient(client.endpoint, timeout_s=_ANSWER_S).model_info()
    except RunError:
        return False
    return True


class RolloutGroup:
    """Every engine of the run, registered with one router."""

    def __init__(self, config: RunConfig, plan: PlacementPlan, bundles: Bundles, run_dir: str):
        self._config, self._plan, self._bundles = config, plan, bundles
        self._run_dir = run_dir
        self.actors: list = []  # one per engine and machine
        self.endpoints: tuple[EngineEndpoint, ...] = ()
        self.clients: list[EngineClient] = []
        self.router: Router | None = None
        self._starting: dict = {}
        self._watch: HealthWatch | None = None  # of external engines only: ours are watched as processes
        self._receivers = Receivers(config, run_dir) if config.sync.sends_deltas else None
        self._released: set[str] = set()  # memory tags that the engines have given back

    def start(self) -> None:
        """Begin starting every engine and the router; `wait_started` waits."""
        local = [engine for engine in self._plan.engines if engine.external_url is None]
        actor_class = ray.remote(EngineActor)
        parts = []  # (engine, node rank, its bundles there, actor)
        for engine in local:
            for rank in range(engine.num_nodes):
                here = [bundle for bundle, at in zip(engine.bundles, engine.node_ranks, strict=True) if at == rank]
                name = f"{engine.index}" if rank == 0 else f"{engine.index}.{rank}"
                options = self._bundles.options(here[0], self._plan.bundles[here[0]].roles["rollout"])
                actor = actor_class.options(**options).remote(name, f"{self._run_dir}/logs", self._config.observability.log_level)
                self.actors.append(actor)
                parts.append((engine, rank, here, actor))
        timeout = self._config.engine.engine_start_timeout_s
        one_host = self._bundles.on_one_host()
        asked = {} if one_host else {_part_name(engine, rank): actor.address.remote() for engine, rank, _, actor in parts}
        addresses = dict(zip(asked, Wait(timeout, whom="the engines", phase="start").gather(asked), strict=True))
        for engine, rank, here, actor in parts:
            host = "127.0.0.1" if one_host else addresses[_part_name(engine, rank)][0]
            spec = self._spec(engine, host, rank, here)
            if spec.nnodes > 1:
                spec = dataclasses.replace(spec, dist_init_addr=host_port(*addresses[_part_name(engine, 0)]))
            if self._receivers is not None:
                self._receivers.add(engine.index, self._bundles.slots[here[0]].node_id, host, actor)
            self._starting[_part_name(engine, rank)] = actor.start.remote(spec, timeout)
        self.router = self._make_router()

    def _make_router(self) -> Router:
        engine, log_path = self._config.engine, f"{self._run_dir}/logs/router-0.log"
        if engine.sglang_router_ip:
            url = engine_url(host_port(engine.sglang_router_ip, engine.sglang_router_port))
            return attach_router(url, timeout_s=engine.engine_start_timeout_s, api_key=os.environ.get(engine.sglang_router_api_key_env))
        return launch_router(
            policy=engine.sglang_router_policy,
            port=engine.sglang_router_port,
            log_path=log_path,
            timeout_s=engine.engine_start_timeout_s,
            log_level=self._config.observability.log_level or "warning",
        )

    def _spec(self, engine: EnginePlan, host: str, node_rank: int, bundles: list[int]) -> EngineSpec:
        """One machine's server of an engine; `bundles` are the engine's there."""
        config, suffix = self._config, f".{node_rank}" if node_rank else ""
        return EngineSpec(
            index=engine.index,
            model_path=os.path.abspath(config.checkpoint.hf_checkpoint),
            tp_size=engine.tp,
            nnodes=engine.num_nodes,
            node_rank=node_rank,
            host=host,
            dtype={True: "bfloat16", False: "float32", None: None}[config.optimizer.bf16],
            gpu_ids=tuple(self._bundles.slots[i].gpu_id for i in bundles),
            context_length=config.rollout.rollout_max_context_len or config.model.max_position_embeddings,
            seed=config.data.rollout_seed + engine.index,
            extra_flags=config.engine.sglang | ({"enable_return_routed_experts": True} if config.loss.use_rollout_routing_replay else {}),
            memory_saver=config.offload_rollout,
            log_level=config.observability.log_level,
            log_path=f"{self._run_dir}/logs/engine-{engine.index}{suffix}.log",
        )

    def wait_started(self) -> None:
        """Wait for every engine, then register each with the router and wait until it is healthy there."""
        timeout = self._config.engine.engine_start_timeout_s
        answers = Wait(timeout, whom="the engines", phase="start").gather(self._starting)
        started = [endpoint for name, endpoint in zip(self._starting, answers, strict=True) if "node rank" not in name]
        self.endpoints = tuple(started) + tuple(self._external_endpoints())
        if self._receivers is not None:
            self.endpoints = self._receivers.beside(self.endpoints)
        self.clients = [EngineClient(endpoint, timeout_s=CONTROL_TIMEOUT_S) for endpoint in self.endpoints]
        for client in self.clients:
            if client.endpoint.external:
                # A run that failed inside a sync left it paused: /health would stay 503, and the router would never take it.
                client.continue_generation()
            self.router.register(client.endpoint, timeout_s=timeout)
        external = [endpoint for endpoint in self.endpoints if endpoint.external]
        if external:
            self._watch = HealthWatch(external)

    def _external_endpoints(self) -> list[EngineEndpoint]:
        """The external engines, with the sizes that they told before the start."""
        key = os.environ.get(self._config.placement.rollout_external_api_key_env)
        return [
            EngineEndpoint(index=engine.index, url=engine.external_url, api_key=key, tp_size=engine.tp, external=True)
            for engine in self._plan.engines
            if engine.external_url is not None
        ]

    def check(self) -> None:
        """Raise EngineError if an engine or the router has died, with the tail of its log."""
        if self.actors:
            Wait(CONTROL_TIMEOUT_S, whom="the engines", phase="health check").gather(
                dict(zip(self._starting, [actor.check.remote() for actor in self.actors], strict=True))
            )
        self.check_watch()
        for client in self.clients:
            if client.endpoint.external:
                self._ask(client)
        self.router.check()

    def check_after_failure(self) -> None:
        """As check(), but an engine that does not answer is given time to end, so that its own death is told instead of what it led to."""
        deadline = time.monotonic() + _DYING_S
        while True:
            self.check()
            if all(_answers(client) for client in self.clients) or time.monotonic() > deadline:
                return
            time.sleep(0.2)

    def check_watch(self) -> None:
        """Raise EngineError if an external engine has stopped answering; asks nobody itself."""
        if self._watch is not None:
            self._watch.check()

    def _ask(self, client: EngineClient) -> None:
        try:
            client.model_info()
        except RunError as error:
            raise EngineError(f"external engine {client.endpoint.index} at {client.url} does not answer: {error}") from error

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

    def sync(self, weights: WeightsRef, trainer: TrainGroup) -> SyncReceipt:
        """One weight sync: pause, send, compare digests, check the version on every engine, continue. A failed one leaves engines paused."""
        sync, version = self._config.sync, weights.version
        update = WeightUpdate(
            self.clients, self._plan.transport, timeout_s=sync.update_weight_timeout_s, pause_mode=sync.update_weight_pause_mode, watch=self.check_watch
        )
        update.begin()
        try:
            receipt = trainer.publish(version, self.endpoints, self.check_watch)
            if receipt.num_tensors == 0:
                raise WeightSyncError(f"weight version {version}: the trainer sent no tensor")
            update.load(version, self._config.sync.update_weight_disk_dir)
            if self._config.sync.compares_digests:
                started = time.monotonic()
                update.open_for_digests()
                proven, left_out = trainer.verify_weights(self.check_watch)
                seconds = time.monotonic() - started
                receipt = dataclasses.replace(receipt, engines_proven=proven, tensors_unproven=left_out, verify_seconds=seconds)
        except BaseException:
            update.abandon()
            raise
        update.finish(version)
        return receipt

    @property
    def num_members(self) -> int:
        """Engines that serve."""
        return len(self.clients)

    def compare(self, trainer: TrainGroup, weights: WeightsRef, *, bf16: bool) -> float:
        """Largest mean |log-prob difference| of a fixed prompt between an engine and the trainer. Raises WeightSyncError above the tolerance."""
        samples = probe_samples(self._config)
        expected = trainer.probe(samples)
        return compare_probe(self._config, self.clients, samples, expected, version=weights.version, bf16=bf16)

    def close(self) -> None:
        """Deregister external engines, end our router and our engines."""
        if self._watch is not None:
            self._watch.stop()
        if self.router is not None:
            for endpoint in self.endpoints:
                if endpoint.external:
                    try:
                        self.router.deregister(endpoint)
                    except RunError as error:
                        logger.warning("engine %s stays registered: %s", endpoint.url, error)
            self.router.close()
        if self.actors:
            refs = [actor.stop.remote() for actor in self.actors]
            ray.wait(refs, num_returns=len(refs), timeout=15.0)
            kill_actors(self.actors)
