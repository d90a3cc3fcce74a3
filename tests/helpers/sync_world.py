"""Real trainer ranks (in Ray) and real engines of one and of two ranks, joined as a run joins them: for faults put into
weight syncs.

Two trainer ranks gather together: tensor parallel with the dense model, expert parallel with the mixture of experts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import ray
import torch

from slime_like.cluster.bundles import Bundles, reserve
from slime_like.cluster.engine_fleet import EngineFleet
from slime_like.cluster.members import Membership
from slime_like.cluster.ray_session import Wait, connect
from slime_like.cluster.train_group import TrainGroup
from slime_like.config.placement import PlacementConfig
from slime_like.config.run import RunConfig
from slime_like.config.sync import SyncConfig
from slime_like.job.phases import Phases
from slime_like.job.running import Job, ResolvedRun
from slime_like.observability.tracing import PhaseTrace
from slime_like.planning.engines import EnginePlan
from slime_like.planning.placement import PlacementPlan, make_plan
from slime_like.records import EngineEndpoint, SyncReceipt, WeightsRef
from slime_like.sglang_backend.client import EngineClient
from slime_like.sglang_backend.launcher import Engine, EngineSpec, start_engine
from slime_like.weight_sync.delta.receiver_client import RunningReceiver, start_receiver
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.train_world import make_config, make_samples

#: Deadline of one sync; every fault has to be named within it.
TIMEOUT_S = 30.0
START_S = 180.0
#: Family, its shape, and how two trainer ranks share it. As many key heads as query heads, so that q and k can be
#: exchanged, and square.
MODELS: dict[str, tuple[str, dict, dict]] = {
    "dense": ("qwen3", {"num_key_value_heads": 4, "head_dim": 12}, {"tensor_model_parallel_size": 2}),
    "moe": ("qwen3_moe", {"num_key_value_heads": 4, "head_dim": 12}, {"expert_model_parallel_size": 2}),
}


class Metrics:
    """Where a phase logs: the lines, in memory."""

    def __init__(self) -> None:
        self.lines: list[dict] = []

    def log(self, kind: str, step: int, metrics: dict) -> None:
        """As MetricsLog.log."""
        self.lines.append({"kind": kind, "step": step} | metrics)


class Sampling:
    """Stands where the rollout manager does: which version samples may be generated with."""

    version: int | None = None

    def policy_changing(self) -> frozenset[WeightsRef]:
        """As RolloutManager's."""
        return frozenset()

    def policy_changed(self, weights: WeightsRef, steps: int = 0) -> None:
        """As RolloutManager's."""
        self.version = weights.version


class NoProcess:
    """Stands where the router does."""

    def check(self) -> None:
        """Nothing can be wrong with it."""

    def deregister(self, endpoint: EngineEndpoint) -> None:
        """Nobody is registered."""


def config_of(model: str, folder: str, root: Path, *, mode: str = "digest") -> RunConfig:
    """Two trainer ranks of one of MODELS."""
    base = make_config(folder, num_ranks=2, num_samples=4, parallel=MODELS[model][2])
    sync = SyncConfig(
        update_weight_transport="ipc", update_weight_disk_dir=str(root / "weights"), update_weight_buffer_size=60_000,
        update_weight_timeout_s=TIMEOUT_S, verify_weight_sync=mode, verify_weight_sync_interval=0,
    )  # fmt: skip
    observability = dataclasses.replace(base.observability, run_dir=str(root))
    placement = PlacementConfig(actor_num_gpus_per_node=2, debug_train_only=True)
    return dataclasses.replace(base, sync=sync, observability=observability, placement=placement)


class Trainers:
    """Two trainer ranks in a Ray of their own; they can be made anew, with another model, too."""

    def __init__(self, root: Path, config: RunConfig):
        os.environ["RAY_ADDRESS"] = "local"
        self.root, self._started = root, 0
        self.plan: PlacementPlan = make_plan(config)
        assert not self.plan.problems, self.plan.problems
        connect(self.plan.num_gpus)
        self.bundles: Bundles = reserve(self.plan, START_S)
        self.group: TrainGroup | None = None

    def start(self, config: RunConfig) -> TrainGroup:
        """Ranks that hold the first weights; those before are ended."""
        self.end()
        self._started += 1
        self.group = TrainGroup(config, self.plan, self.bundles, str(self.root / f"logs-{self._started}"))
        self.group.start()
        return self.group

    def end(self) -> None:
        """End the ranks."""
        if self.group is not None:
            self.group.close()
            self.group = None

    def close(self) -> None:
        """End everything."""
        self.end()
        self.bundles.close()
        ray.shutdown()


@dataclasses.dataclass
class SyncWorld:
    """One model's trainer ranks and engines."""

    name: str
    config: RunConfig
    trainers: Trainers
    train: TrainGroup
    engines: dict[int, Engine]  # tensor parallel size -> engine
    receiver: RunningReceiver  # of weights sent as deltas, to both engines
    root: Path
    version: int = 0
    sampling: Sampling = dataclasses.field(default_factory=Sampling)
    metrics: Metrics = dataclasses.field(default_factory=Metrics)

    @property
    def folder(self) -> str:
        """HF folder of the first weights."""
        return self.config.checkpoint.hf_checkpoint

    def client(self, tp: int) -> EngineClient:
        """Of one engine."""
        return EngineClient(self.engines[tp].endpoint, timeout_s=TIMEOUT_S)

    def rank_call(self, rank: int, function: Callable, *args):
        """function(worker, *args) in one trainer rank's process.

        The first call there imports this file, which takes a rank on a busy host as long as its start.
        """
        ref = self.train.actors[rank].__ray_call__.remote(
            lambda actor, *values: function(actor._worker, *values), *args
        )
        return Wait(START_S, whom=f"trainer rank {rank}", phase="test").gather({f"trainer rank {rank}": ref})[0]

    def each_rank(self, function: Callable, *args) -> list:
        """The same on both at once, as collectives need; see rank_call."""
        refs = {
            f"trainer rank {rank}": actor.__ray_call__.remote(
                lambda actor, *values: function(actor._worker, *values), *args
            )
            for rank, actor in enumerate(self.train.actors)
        }
        return Wait(START_S, whom="the trainer", phase="test").gather(refs)

    def use(self, transport: str, mode: str = "digest", directory: Path | None = None) -> None:
        """Sync by this transport, proof and, if given, folder from now on."""
        sync = dataclasses.replace(self.config.sync, update_weight_transport=transport, verify_weight_sync=mode)
        if directory is not None:
            sync = dataclasses.replace(sync, update_weight_disk_dir=str(directory))
        self.config = dataclasses.replace(self.config, sync=sync)
        self.each_rank(_forget_connection)

    def phases(self, *tps: int) -> Phases:
        """The run's own sync phase, over these engines. `self.phases(1, 2).sync(step)` is a whole sync."""
        config = self.config
        # Colocated: trainer rank 0 shares its card with the engine of one rank and the first one of the other.
        plan = types.SimpleNamespace(
            mode="colocate",
            transport=config.sync.update_weight_transport,
            engines=(),
            roles=self.trainers.plan.roles,
        )
        # As engines of somebody else: whether they live is then asked of them, and not of a Ray actor that holds them.
        beside = {"receiver_url": self.receiver.url, "receiver_key": self.receiver.key}
        endpoints = [dataclasses.replace(self.engines[tp].endpoint, external=True, **beside) for tp in tps]
        fleet = EngineFleet(config, plan, None, str(self.root), Membership.of_serving(endpoints))
        fleet.router = NoProcess()
        fleet._plans = {tp: EnginePlan(index=tp, bundles=tuple(range(tp)), tp=tp) for tp in tps}
        run = types.SimpleNamespace(path=str(self.root))
        resolved = ResolvedRun(config=config, plan=self.trainers.plan, run=run, data=None, num_rollout=0)
        job = Job(resolved, trainer=self.train, engines=fleet, rollouts=self.sampling)
        return Phases(
            job,
            self.metrics,
            console=None,
            trace=PhaseTrace(self.root / "trace.json"),
            weights=WeightsRef(version=self.version),
        )

    def sync(self, *tps: int, phases: Phases | None = None) -> SyncReceipt:
        """One sync of a run."""
        phases = phases or self.phases(*tps)
        receipt = phases.sync(0)
        self.version = receipt.version
        return receipt

    def train_step(self, step: int) -> None:
        """One real step on random samples."""
        self.train.train(step, self.train.put(make_samples(4, seed=step)))

    def log_probs(self, tp: int, prompts: list[list[int]]) -> list[np.ndarray]:
        """What an engine says of prompts."""
        return [np.asarray(row) for row in self.client(tp).prompt_log_probs(prompts)]

    def restart_trainer(self) -> None:
        """New ranks, with the first weights."""
        self.train = self.trainers.start(self.config)
        self.train.wait_started()

    def restart_engine(self, tp: int) -> None:
        """A new engine in the place of one that was killed."""
        self.engines[tp].close()
        self.engines[tp] = launch(self.name, self.folder, self.root, tp)
        self.engines[tp].wait_healthy(START_S)


def _forget_connection(worker) -> None:
    """Runs in a rank: the next sync connects anew."""
    if worker._sender is not None:
        worker._sender.close()
        worker._sender = None


def launch(name: str, folder: str, root: Path, tp: int, label: str = "") -> Engine:
    """An engine that is starting."""
    log = str(root / f"engine-{name}-{tp}{label}.log")
    spec = EngineSpec(
        index=tp,
        model_path=folder,
        tp_size=tp,
        dtype="float32",
        log_path=log,
        context_length=256,
        extra_flags={"skip_tokenizer_init": True},
    )
    return start_engine(spec)


@contextlib.contextmanager
def sync_world(name: str, root: Path, trainers: Trainers | None = None) -> Iterator[SyncWorld]:
    """A world; everything starts at the same time."""
    family, shape, _ = MODELS[name]
    folder = make_tiny_model(str(root / "model"), family, num_layers=2, **shape)
    config = config_of(name, folder, root)
    with contextlib.ExitStack() as stack:
        engines = {}
        for tp in (1, 2):
            engines[tp] = launch(name, folder, root, tp)
        receiver = start_receiver(str(root / "receiver"), log_path=str(root / "receiver.log"), timeout_s=TIMEOUT_S)
        stack.callback(receiver.close)
        world = SyncWorld(name, config, None, None, engines, receiver, root)  # type: ignore[arg-type]
        stack.callback(lambda: [engine.close() for engine in world.engines.values()])
        world.trainers = Trainers(root, config)
        stack.callback(world.trainers.close)
        world.train = world.trainers.start(config)
        for engine in engines.values():
            engine.wait_healthy(START_S)
        world.train.wait_started()
        yield world
    shutil.rmtree(root / "weights", ignore_errors=True)


def hf_log_probs(folder: str, prompts: list[list[int]]) -> list[np.ndarray]:
    """HF transformers' opinion of prompts."""
    from tests.helpers.hf_truth import load_model, score

    model = load_model(folder)
    with torch.no_grad():
        return [score(model, np.asarray(prompt), 1.0)[0].numpy() for prompt in prompts]
