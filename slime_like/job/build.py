"""A resolved run -> placement group -> running job. Whatever fails on the way, what was started is ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

from slime_like.cluster.bundles import reserve
from slime_like.cluster.engine_care import EngineCare
from slime_like.cluster.engine_fleet import EngineFleet
from slime_like.cluster.engine_processes import EngineProcesses
from slime_like.cluster.ray_session import LifeWatch, connect, disconnect
from slime_like.cluster.reward_group import RewardGroup
from slime_like.cluster.train_group import TrainGroup
from slime_like.errors import CheckpointError
from slime_like.job.protocols import Watch
from slime_like.job.running import Job, ResolvedRun
from slime_like.observability.progress import Progress
from slime_like.planning.memory.engine_share import with_engine_share
from slime_like.rollout.manager import RolloutManager
from slime_like.rollout.service import EngineAccess

logger = logging.getLogger(__name__)

#: Roles that train or score log-probs, as the plan names them: the policy, its critic, its reference.
TRAINING_ROLES = ("actor", "critic", "ref")


def build(resolved: ResolvedRun) -> Job:
    """Start every part of a run; returns when all are healthy. Whatever fails on the way, what was started is ended."""
    job = Job(resolved=resolved)
    try:
        _start(job, resolved)
    except BaseException:
        job.close()
        raise
    return job


class _Session:
    """The connection to Ray, as something that ends."""

    def close(self) -> None:
        disconnect()


def _start(job: Job, resolved: ResolvedRun) -> None:
    config, plan, logs = resolved.config, resolved.plan, str(resolved.run.logs)
    clock = _Clock(job.start_seconds, resolved.progress)
    connect(plan.num_gpus)
    job.closing.append(_Session())
    clock.lap("ray")
    bundles = reserve(plan, config.placement.placement_timeout)
    job.closing.insert(0, bundles)
    clock.lap("placement")
    roles: dict[str, TrainGroup] = {}
    for name in reversed(TRAINING_ROLES):  # the last to start is the first to end
        if plan.has_processes(name):
            roles[name] = TrainGroup(config, plan, bundles, logs, name)
            job.closing.insert(0, roles[name])
            roles[name].start()
    reward = None
    if plan.has_processes("reward"):
        reward = RewardGroup(config, plan, bundles, logs)
        job.closing.insert(0, reward)
        reward.start()
    in_turn = config.starts_in_turn(on_gpu=bundles.have_cuda)
    if in_turn:
        # Trainers first: how much they leave is known exactly once they are up, whereas SGLang fixes the size of its
        # cache when it starts.
        card_bytes = _wait_for_others(job, roles, reward, clock)
        for role in roles.values():
            role.release_memory()
        if bundles.have_cuda:
            config = with_engine_share(config, plan, card_bytes)
    fleet = None
    if plan.engines:
        fleet = EngineFleet(config, plan, EngineProcesses(config, plan, bundles, resolved.run.path), resolved.run.path)
        job.closing.insert(0, fleet)
        fleet.start()
        fleet.wait_started()
        if in_turn and config.offload_rollout:
            fleet.release_memory()  # the first sync finds the card as every later one does
        job.engines = fleet
        clock.lap("engines")
        rollouts = _rollouts(resolved, fleet, reward)
        job.closing.insert(0, rollouts)
        rollouts.start(resolved.data)
        job.rollouts = rollouts
        clock.lap("rollout manager")
    if not in_turn:
        _wait_for_others(job, roles, reward, clock)
    if fleet is not None and config.engine.max_engine_restarts:
        job.tend = EngineCare(fleet, config.engine).tend
    job.watch = _watching(None if job.tend else fleet, [*roles.values(), *([reward] if reward is not None else [])])


def _rollouts(resolved: ResolvedRun, fleet: EngineFleet, reward: RewardGroup | None) -> RolloutManager:
    assert fleet.router is not None, "wait_started() made it"
    access = EngineAccess(
        router_url=fleet.router.url,
        router_api_key=fleet.router.api_key,
        num_engines=len(fleet.endpoints),
        endpoints=fleet.endpoints,
    )
    return RolloutManager(resolved.config, access, reward)


def _wait_for_others(job: Job, roles: dict[str, TrainGroup], reward: RewardGroup | None, clock: _Clock) -> int | None:
    """Wait for every part but the engines, and hear what the policy's checkpoint says; bytes of the policy's cards."""
    card_bytes = None
    job.trainer, job.critic, job.reference = (roles.get(name) for name in TRAINING_ROLES)
    if "actor" in roles:
        report = roles["actor"].wait_started()
        job.num_rollouts_done, job.client_state = report["num_rollouts_done"], report["client_state"]
        job.bf16, card_bytes = report["bf16"], report["card_bytes"]
        job.start_seconds |= {f"trainer {part}": seconds for part, seconds in report["seconds"].items()}
        clock.lap("waiting for the trainer")
    if "critic" in roles:
        _check_together(roles["critic"].wait_started()["num_rollouts_done"], job)
        clock.lap("waiting for the critic")
    if "ref" in roles:
        roles["ref"].wait_started()
        clock.lap("waiting for the reference")
    if reward is not None:
        reward.wait_started()
        clock.lap("waiting for the reward model")
    return card_bytes


def _watching(fleet: EngineFleet | None, groups: Sequence[TrainGroup | RewardGroup]) -> Callable[[str], Watch]:
    """What to ask each second during a phase: raises RunError if an engine, or a process that waits meanwhile, has
    died.
    """
    life = LifeWatch(lambda: {name: ping for group in groups for name, ping in group.pings().items()})

    def watch(phase: str) -> Watch:
        def check() -> None:
            if fleet is not None:
                fleet.check_watch()
            life.check(phase)

        return check

    return watch


def _check_together(critic_rollouts: int, job: Job) -> None:
    """A resumed critic must be as old as the policy; a fresh one goes with any. Raises CheckpointError."""
    done, load = job.num_rollouts_done, job.config.checkpoint.load
    if critic_rollouts not in (0, done):
        raise CheckpointError(
            f"--load {load}: the policy has done {done} rollouts and the critic in {load}/critic {critic_rollouts}."
            " Fix: write the same number into both latest_checkpointed_iteration.txt."
        )


class _Clock:
    """Writes the seconds between laps into a dict."""

    def __init__(self, laps: dict[str, float], progress: Progress):
        self._laps, self._progress, self._last = laps, progress, time.monotonic()

    def lap(self, name: str) -> None:
        now = time.monotonic()
        self._laps[name], self._last = now - self._last, now
        self._progress.advanced(f"start, {name}")
        logger.info("start, %s: %.1f s", name, self._laps[name])
