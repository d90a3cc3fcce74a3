"""Config -> plan -> placement group -> running job. Whatever fails on the way, what was started is ended."""

from __future__ import annotations

import dataclasses
import logging
import os
import time
from collections.abc import Callable

import ray

from slime_like.algorithms.plugins import load_loss_plugins
from slime_like.cluster.bundles import Bundles, reserve
from slime_like.cluster.external import with_servers
from slime_like.cluster.ray_session import LifeWatch, connect
from slime_like.cluster.reward_group import RewardGroup
from slime_like.cluster.rollout_group import RolloutGroup
from slime_like.cluster.train_group import TrainGroup
from slime_like.config.run import RunConfig
from slime_like.errors import CheckpointError, ConfigError
from slime_like.planning.placement import PlacementPlan
from slime_like.rollout.data_source import DataSource, check_data
from slime_like.rollout.manager import RolloutManager
from slime_like.utils.files import RunDirectory
from slime_like.weight_sync.transform import load_transform

logger = logging.getLogger(__name__)


@dataclasses.dataclass
class Job:
    """A run that is up: what the loops drive. `train` or `engines` is None where the mode has none."""

    config: RunConfig
    plan: PlacementPlan
    run: RunDirectory
    data: DataSource | None
    train: TrainGroup | None = None
    critic: TrainGroup | None = None  # with --advantage-estimator ppo
    reference: TrainGroup | None = None  # on GPUs of its own; else it lives in the trainer's processes
    reward: RewardGroup | None = None  # with --reward-load
    engines: RolloutGroup | None = None
    manager: RolloutManager | None = None
    bundles: Bundles | None = None
    num_rollouts_done: int = 0
    client_state: dict = dataclasses.field(default_factory=dict)
    start_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    bf16: bool = False  # whether the trainer's weights are
    life: LifeWatch | None = None

    def watch(self, phase: str) -> Callable[[], None]:
        """What to ask each second while the engines generate: raises RunError if one of them, or a trainer that waits meanwhile, has died."""
        groups = [group for group in (self.train, self.critic, self.reference, self.reward) if group is not None]
        self.life = self.life or LifeWatch(lambda: {name: ping for group in groups for name, ping in group.pings().items()})

        def check() -> None:
            assert self.engines is not None and self.life is not None
            self.engines.check_watch()
            self.life.check(phase)

        return check

    def close(self) -> None:
        """End everything in the order that lets each part end cleanly."""
        for part in (self.manager, self.engines, self.reward, self.train, self.critic, self.reference):
            if part is not None:
                part.close()
        if self.bundles is not None:
            self.bundles.remove()
        ray.shutdown()


def resolve(config: RunConfig, plan: PlacementPlan, run: RunDirectory, data: DataSource | None) -> RunConfig:
    """The config as every process will see it: rollout count, transport and paths filled in."""
    data_config, sync = config.data, dataclasses.replace(config.sync, update_weight_transport=plan.transport)
    if data is not None:
        data_config = dataclasses.replace(data_config, num_rollout=data.num_rollouts(config.rollout.rollout_batch_size), num_epoch=None)
    if plan.transport == "disk":
        sync = dataclasses.replace(sync, update_weight_disk_dir=os.path.abspath(sync.update_weight_disk_dir or os.path.join(run.path, "weights")))
    observability = dataclasses.replace(config.observability, run_dir=run.path)
    return dataclasses.replace(config, data=data_config, sync=sync, observability=observability)


@dataclasses.dataclass(frozen=True)
class Checked:
    """A run that can start: config and plan with the sizes of external engines, and the data, read once."""

    config: RunConfig
    plan: PlacementPlan
    data: DataSource | None


def check_everything(config: RunConfig, plan: PlacementPlan) -> Checked:
    """What can be known to be wrong before any process starts: data files, keys, templates, plugins, external engines."""
    data = None
    load_loss_plugins(config.loss)
    load_transform(config.sync)
    if not config.observability.load_debug_rollout_data:
        data = check_data(config)
    elif config.data.num_rollout is None:
        raise ConfigError(["--load-debug-rollout-data needs --num-rollout: how many saved rollouts to train on."])
    return Checked(*with_servers(config, plan, data), data)


def build(config: RunConfig, plan: PlacementPlan, run: RunDirectory, data: DataSource | None) -> Job:
    """Start every part of a run; returns when all are healthy. `config` must be resolved."""
    job = Job(config=config, plan=plan, run=run, data=data)
    try:
        clock = _Clock(job.start_seconds)
        connect(plan.num_gpus)
        clock.lap("ray")
        job.bundles = reserve(plan, config.placement.placement_timeout)
        clock.lap("placement")
        if "actor" in plan.roles:
            job.train = TrainGroup(config, plan, job.bundles, str(run.logs))
            job.train.start()
        if plan.has_processes("critic"):
            job.critic = TrainGroup(config, plan, job.bundles, str(run.logs), "critic")
            job.critic.start()
        if plan.has_processes("ref"):
            job.reference = TrainGroup(config, plan, job.bundles, str(run.logs), "ref")
            job.reference.start()
        if plan.has_processes("reward"):
            job.reward = RewardGroup(config, plan, job.bundles, str(run.logs))
            job.reward.start()
        if plan.engines:
            job.engines = RolloutGroup(config, plan, job.bundles, run.path)
            job.engines.start()
            job.engines.wait_started()
            clock.lap("engines")
            job.manager = RolloutManager(
                config,
                router_url=job.engines.router.url,
                router_api_key=job.engines.router.api_key,
                num_engines=len(job.engines.endpoints),
                reward_model=job.reward,
                endpoints=job.engines.endpoints,
            )
            job.manager.start(data)
            clock.lap("rollout manager")
        if job.train is not None:
            report = job.train.wait_started()
            job.num_rollouts_done, job.client_state = report["num_rollouts_done"], report["client_state"]
            job.bf16 = report["bf16"]
            job.start_seconds |= {f"trainer {part}": seconds for part, seconds in report["seconds"].items()}
            clock.lap("waiting for the trainer")
        if job.critic is not None:
            _check_together(job.critic.wait_started()["num_rollouts_done"], job)
            clock.lap("waiting for the critic")
        if job.reference is not None:
            job.reference.wait_started()
            clock.lap("waiting for the reference")
        if job.reward is not None:
            job.reward.wait_started()
            clock.lap("waiting for the reward model")
        return job
    except BaseException:
        job.close()
        raise


def _check_together(critic_rollouts: int, job: Job) -> None:
    """A resumed critic must be as old as the policy; a fresh one goes with any. Raises CheckpointError."""
    done, load = job.num_rollouts_done, job.config.checkpoint.load
    if critic_rollouts not in (0, done):
        raise CheckpointError(
            f"--load {load}: the policy has done {done} rollouts and the critic in {load}/critic {critic_rollouts}. Fix: write the same number into both "
            "latest_checkpointed_iteration.txt."
        )


class _Clock:
    """Writes the seconds between laps into a dict."""

    def __init__(self, laps: dict[str, float]):
        self._laps, self._last = laps, time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self._laps[name], self._last = now - self._last, now
        logger.info("start, %s: %.1f s", name, self._laps[name])
