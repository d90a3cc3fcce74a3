"""The trainer's ranks and the engines of a server, on the cluster: started, started anew, ended."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence

from slime_like.cluster.bundles import Bundles, reserve
from slime_like.cluster.engine_care import take_place
from slime_like.cluster.engine_fleet import EngineFleet
from slime_like.cluster.engine_processes import EngineProcesses
from slime_like.cluster.members import MemberState
from slime_like.cluster.ray_session import connect, disconnect
from slime_like.cluster.train_group import TrainGroup
from slime_like.config.run import RunConfig
from slime_like.config.tree import TENANTS
from slime_like.errors import EngineError
from slime_like.planning.memory.adapters import TenantRoom
from slime_like.planning.memory.engine_share import with_engine_share
from slime_like.planning.placement import PlacementPlan
from slime_like.records import EngineEndpoint
from slime_like.utils.files import RunDirectory

logger = logging.getLogger(__name__)


class ServingFleet:
    """The fleet, as samples need it (engines.Fleet)."""

    def __init__(self, fleet: EngineFleet, start_timeout_s: float):
        self._fleet, self._start_timeout_s = fleet, start_timeout_s

    @property
    def endpoints(self) -> Sequence[EngineEndpoint]:
        """Of the engines that serve."""
        return self._fleet.endpoints

    def revive(self) -> list[str]:
        """Start new engines in the place of dead ones; why each has died. Raises RunError where one does not start."""
        try:
            self._fleet.check_after_failure()
        except EngineError as error:
            logger.warning("%s", error)
        deaths = []
        for member in [member for member in self._fleet.members if member.state is MemberState.DEAD]:
            take_place(self._fleet, member.index, self._start_timeout_s)
            deaths.append(f"{member.name}: {member.why.splitlines()[0] if member.why else 'it has ended'}")
        return deaths

    def close(self) -> None:
        """End router and engines."""
        self._fleet.close()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """What a server runs on. start_trainer: makes ranks and waits until they are up; again after they have died."""

    fleet: ServingFleet
    first_trainer: TrainGroup
    start_trainer: Callable[[], TrainGroup]
    bundles: Bundles

    def close(self) -> None:
        """Give the GPUs back and leave Ray; trainer and engines have ended."""
        self.bundles.close()
        disconnect()


def start_cluster(config: RunConfig, plan: PlacementPlan, run: RunDirectory, tenants: TenantRoom) -> Cluster:
    """Start trainer and engines, and wait until all are healthy. Whatever fails, what was started is ended.

    tenants: whom engines on the trainer's cards leave room for.
    """
    connect(plan.num_gpus)
    closing: list[Callable[[], None]] = [disconnect]
    try:
        bundles = reserve(plan, config.placement.placement_timeout)
        closing.append(bundles.close)
        trainer = TrainGroup(config, plan, bundles, str(run.logs), TENANTS)
        closing.append(trainer.close)
        trainer.start()
        if config.starts_in_turn(on_gpu=bundles.have_cuda):
            # How much trainers leave is known once they are up, and SGLang fixes the size of its cache as it starts.
            card_bytes = trainer.wait_started()["card_bytes"]
            if bundles.have_cuda:
                config = with_engine_share(config, plan, card_bytes, tenants)
        fleet = EngineFleet(config, plan, EngineProcesses(config, plan, bundles, run.path), run.path)
        closing.append(fleet.close)
        fleet.start()
        fleet.wait_started()
        trainer.wait_started()
    except BaseException:
        for close in reversed(closing):
            close()
        raise

    def start_trainer() -> TrainGroup:
        group = TrainGroup(config, plan, bundles, str(run.logs), TENANTS)
        try:
            group.start()
            group.wait_started()
        except BaseException:
            group.close()
            raise
        return group

    serving = ServingFleet(fleet, config.engine.engine_start_timeout_s)
    return Cluster(fleet=serving, first_trainer=trainer, start_trainer=start_trainer, bundles=bundles)
