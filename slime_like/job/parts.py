"""The parts of a run that start with it, and once more when a rank of its trainer is lost (trainer_restarts.py)."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Sequence

from slime_like.cluster.bundles import Bundles
from slime_like.cluster.engine_fleet import EngineFleet
from slime_like.cluster.ray_session import LifeWatch
from slime_like.cluster.reward_group import RewardGroup
from slime_like.cluster.train_group import TrainGroup
from slime_like.config.run import RunConfig
from slime_like.errors import CheckpointError, RunError
from slime_like.job.protocols import Watch
from slime_like.job.running import Job
from slime_like.observability.progress import Progress
from slime_like.planning.placement import PlacementPlan
from slime_like.rollout.manager import RolloutManager
from slime_like.rollout.service import EngineAccess

logger = logging.getLogger(__name__)

#: Roles that train or score log-probs, as the plan names them: the policy, its critic, its reference.
TRAINING_ROLES = ("actor", "critic", "ref")


class Clock:
    """Writes the seconds between laps into a dict."""

    def __init__(self, laps: dict[str, float], progress: Progress):
        self._laps, self._progress, self._last = laps, progress, time.monotonic()

    def lap(self, name: str) -> None:
        """A part of the start is over."""
        now = time.monotonic()
        self._laps[name], self._last = now - self._last, now
        self._progress.advanced(f"start, {name}")
        logger.info("start, %s: %.1f s", name, self._laps[name])


@dataclasses.dataclass
class Parts:
    """Of a job: where its processes lie, and those of its groups that are there."""

    job: Job
    bundles: Bundles
    plan: PlacementPlan
    logs: str
    roles: dict[str, TrainGroup] = dataclasses.field(default_factory=dict)
    reward: RewardGroup | None = None
    fleet: EngineFleet | None = None
    rollouts: RolloutManager | None = None

    # ------------------------------------------------------------------ start

    def begin_roles(self, config: RunConfig) -> None:
        """Begin to start every training role; `wait_for_roles` waits."""
        for name in reversed(TRAINING_ROLES):  # the last to start is the first to end
            if self.plan.has_processes(name):
                role = TrainGroup(config, self.plan, self.bundles, self.logs, name)
                before = self.roles.get(name)
                self.roles[name] = role
                self.job.closes(role, in_place_of=before)
                role.start()

    def wait_for_roles(self, clock: Clock) -> int | None:
        """Wait for every training role, and hear what the policy's checkpoint says; bytes of the policy's cards."""
        card_bytes, roles, job = None, self.roles, self.job
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
        return card_bytes

    def start_rollouts(self) -> None:
        """Start the rollout side over the engines that serve, in the place of one that was there."""
        fleet, job = self.fleet, self.job
        if fleet is None:
            return
        access = EngineAccess(
            router_url=fleet.router.url,
            router_api_key=fleet.router.api_key,
            num_engines=len(fleet.endpoints),
            endpoints=fleet.endpoints,
        )
        rollouts, before = RolloutManager(job.config, access, self.reward), self.rollouts
        job.closes(rollouts, in_place_of=before)
        # A user's data source has a state of its own, which is not taken back: it is made anew.
        rollouts.start(None if before is not None and job.config.data.data_source_path else job.resolved.data)
        job.rollouts = self.rollouts = rollouts

    def watch(self) -> None:
        """From now on a phase notices the death of a process that nobody calls."""
        self.job.watch = _watching(None if self.job.tend else self.fleet, list(self.roles.values()), self.reward)

    # ------------------------------------------------------------------ a rank is lost

    def lost_ranks(self) -> dict[str, RunError]:
        """Ranks of training roles whose process has ended, by name."""
        return {name: error for role in self.roles.values() for name, error in role.lost_ranks().items()}

    def lost_machines(self) -> list[str]:
        """Addresses of the run's machines that Ray has given up."""
        return self.bundles.lost_machines()

    def end_roles(self) -> None:
        """End what is left of the training roles, and all that was asked of engines, which stay and give their memory
        back, if they share the trainer's.
        """
        for role in self.roles.values():
            role.close()
        if self.rollouts is not None:
            self.rollouts.close()
        if self.fleet is not None:
            self.fleet.note_deaths()  # before they are asked for anything; who tends them comes to it
            if self.job.config.asynchrony.eval_num_engines:
                self.fleet.take_back()
            for client in self.fleet.clients:
                try:
                    client.abort_all()
                except RunError as error:  # whoever tends engines finds out whether it has died
                    logger.warning("engine %d: %s", client.endpoint.index, error)
            if self.job.config.offload_rollout:
                self.fleet.release_memory()


def _watching(
    fleet: EngineFleet | None, roles: Sequence[TrainGroup], reward: RewardGroup | None
) -> Callable[[str], Watch]:
    """What to ask each second during a phase: raises RunError if an engine, or a process that waits meanwhile, has
    died, or hangs.
    """
    groups: Sequence[TrainGroup | RewardGroup] = [*roles, *([reward] if reward else [])]
    life = LifeWatch(lambda: {name: ping for group in groups for name, ping in group.pings().items()})

    def watch(phase: str) -> Watch:
        def check() -> None:
            if fleet is not None:
                fleet.check_watch()
            life.check(phase)
            for role in roles:
                role.check_signs_of_life(phase)

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
