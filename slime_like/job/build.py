"""A resolved run -> placement group -> running job. Whatever fails on the way, what was started is ended."""

from __future__ import annotations

from slime_like.cluster.bundles import reserve
from slime_like.cluster.engine_care import EngineCare
from slime_like.cluster.engine_fleet import EngineFleet
from slime_like.cluster.engine_guests import EngineGuests
from slime_like.cluster.engine_processes import EngineProcesses
from slime_like.cluster.ray_session import connect, disconnect
from slime_like.cluster.reward_group import RewardGroup
from slime_like.job.parts import Clock, Parts
from slime_like.job.running import Job, ResolvedRun
from slime_like.job.trainer_restarts import TrainerRestarts
from slime_like.planning.memory.engine_share import with_engine_share


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
    clock = Clock(job.start_seconds, resolved.progress)
    connect(plan.num_gpus)
    job.closes(_Session())
    clock.lap("ray")
    bundles = reserve(plan, config.placement.placement_timeout)
    job.closes(bundles)
    clock.lap("placement")
    parts = Parts(job, bundles, plan, logs)
    parts.begin_roles(config)
    if plan.has_processes("reward"):
        parts.reward = RewardGroup(config, plan, bundles, logs)
        job.closes(parts.reward)
        parts.reward.start()
    in_turn = config.starts_in_turn(on_gpu=bundles.have_cuda)
    if in_turn:
        # Trainers first: how much they leave is known exactly once they are up, whereas SGLang fixes the size of its
        # cache when it starts.
        card_bytes = _wait_for_others(parts, clock)
        for role in parts.roles.values():
            role.release_memory()
        if bundles.have_cuda:
            config = with_engine_share(config, plan, card_bytes)
    if plan.engines:
        fleet = EngineFleet(config, plan, EngineProcesses(config, plan, bundles, resolved.run.path), resolved.run.path)
        job.closes(fleet)
        fleet.start()
        fleet.wait_started()
        if in_turn and config.offload_rollout:
            fleet.release_memory()  # the first sync finds the card as every later one does
        job.engines = parts.fleet = fleet
        clock.lap("engines")
        parts.start_rollouts()
        clock.lap("rollout manager")
    if not in_turn:
        _wait_for_others(parts, clock)
    if parts.fleet is not None and config.engine.outlives_faults:
        guests = EngineGuests(parts.fleet, config, resolved.run.path, plan.transport)
        job.tend = EngineCare(parts.fleet, config.engine, guests).tend
    parts.watch()
    if parts.roles:
        job.restart_trainer = TrainerRestarts(job, parts).after


def _wait_for_others(parts: Parts, clock: Clock) -> int | None:
    """Wait for every part but the engines; bytes of the policy's cards."""
    card_bytes = parts.wait_for_roles(clock)
    if parts.reward is not None:
        parts.reward.wait_started()
        clock.lap("waiting for the reward model")
    return card_bytes
