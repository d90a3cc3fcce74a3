"""A fleet before scripted engines: the real router, and a trainer that steers them as a real one does."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import requests

from slime_like.cluster.engine_fleet import EngineFleet
from slime_like.config.engine import EngineConfig
from slime_like.config.placement import PlacementConfig
from slime_like.config.run import RunConfig
from slime_like.config.sync import SyncConfig
from slime_like.errors import WeightSyncError
from slime_like.planning.engines import EnginePlan
from slime_like.records import SyncReceipt, WeightsRef
from slime_like.testing.scripted_engine import Fault, ScriptedEngine
from slime_like.weight_sync.session import PublishOrder, run_session

FIRST, SECOND = WeightsRef(version=1), WeightsRef(version=2)
#: Prompt of a request that the engines think about.
SLOW = [9, 9, 9]
SLOW_S = 1.5


@dataclasses.dataclass
class Trainer:
    """One rank; weights are what their digest says. `during_send` is called between pause and proof."""

    digest: str = "a"
    proves: bool = True
    during_send: object = None
    orders: list[PublishOrder] = dataclasses.field(default_factory=list)

    def publish(self, order, watch=None):
        self.orders.append(order)
        return run_session(order, self)

    def on_lead(self, phase, act, *, longest_s):
        act()

    def connect(self):
        pass

    def send(self, weights):
        if self.during_send is not None:
            self.during_send()
        return SyncReceipt(
            weights=weights, transport="broadcast", num_tensors=1, num_bytes=4, seconds=0.1, digest=self.digest
        )

    def prove(self, endpoints):
        if not self.proves:
            raise WeightSyncError("model.norm.weight is not what was sent")
        return len(endpoints), 0


@dataclasses.dataclass
class World:
    """Three engines, of which a fleet has the first two."""

    fleet: EngineFleet
    engines: list[ScriptedEngine]
    trainer: Trainer = dataclasses.field(default_factory=Trainer)

    def third(self) -> EnginePlan:
        return EnginePlan(index=self.fleet.membership.next_index, bundles=(), tp=1, external_url=self.engines[2].url)

    def routed(self) -> list[int]:
        urls = self.fleet.router.engine_urls()
        return [number for number, engine in enumerate(self.engines) if engine.url in urls]

    def states(self) -> dict[int, str]:
        return {member.index: str(member.state) for member in self.fleet.members}

    def ask(self, prompt) -> requests.Response:
        session = requests.Session()
        session.trust_env = False
        headers = {"Authorization": f"Bearer {self.fleet.router.api_key}"}
        return session.post(
            f"{self.fleet.router.url}/generate",
            json={"input_ids": prompt, "sampling_params": {}},
            headers=headers,
            timeout=30,
        )


@contextlib.contextmanager
def fleet_world(folder: Path) -> Iterator[World]:
    """A fleet of the first two, and its router, while the block runs."""
    with contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(
                ScriptedEngine(
                    lambda _: ([7], [-0.1]),
                    fault_for=lambda body: Fault(delay_s=SLOW_S) if body["input_ids"] == SLOW else None,
                )
            )
            for _ in range(3)
        ]
        config = RunConfig(
            placement=PlacementConfig(
                rollout_external=True, rollout_external_engine_addrs=[engine.url for engine in engines[:2]]
            ),
            engine=EngineConfig(engine_start_timeout_s=20.0, sglang_router_policy="round_robin"),
            sync=SyncConfig(update_weight_timeout_s=10.0),
        )
        plans = tuple(
            EnginePlan(index=i, bundles=(), tp=1, external_url=engine.url) for i, engine in enumerate(engines[:2])
        )
        fleet = EngineFleet(
            config, SimpleNamespace(mode="external", engines=plans, transport="broadcast"), None, str(folder)
        )
        stack.callback(fleet.close)
        fleet.start()
        fleet.wait_started()
        yield World(fleet, engines)
