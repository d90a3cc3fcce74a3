"""train.py without Ray, Megatron and SGLang: the real loop, rollout side, fleet and router over scripted engines.

python tests/e2e/chaos/light.py JSON <flags of train.py>; JSON as of announcing.py. The trainer lives in the driver and
publishes as a real one does (weight_sync/session.py), to engines that take what comes.
"""

from __future__ import annotations

import json
import sys
import time
from types import SimpleNamespace

import train
from slime_like.cluster.engine_care import EngineCare
from slime_like.job import build, resolve
from slime_like.job.running import Job, ResolvedRun
from slime_like.loops import sync_loop
from slime_like.planning.engines import EnginePlan
from slime_like.records import StepReport, SyncReceipt
from slime_like.rollout import service
from slime_like.rollout.manager import RolloutManager
from slime_like.rollout.service import EngineAccess
from slime_like.weight_sync.session import run_session
from tests.e2e.chaos import announcing

TRAIN_S, SEND_S, SAVE_S = 0.2, 0.2, 0.1


class ScriptedTrainer:
    """One rank, whose weights are their version."""

    def put(self, samples):
        """Nothing is sent anywhere."""
        return samples

    def train(self, step, samples) -> StepReport:
        """It takes its time."""
        time.sleep(TRAIN_S)
        return StepReport(step=step, num_train_steps=1, num_samples=len(samples), num_tokens=1, metrics={})

    def release_memory(self, keep=()) -> None:
        """It has none."""

    def save(self, num_rollouts_done: int, state: dict) -> str:
        """It has nothing to keep."""
        time.sleep(SAVE_S)
        return "nowhere"

    def finish_save(self, *, wait: bool) -> bool:
        """None is under way."""
        return True

    def publish(self, order, watch=None) -> SyncReceipt:
        """One whole weight sync."""
        return run_session(order, self)

    def on_lead(self, phase, act, *, longest_s) -> None:
        """There is one rank."""
        act()

    def connect(self) -> None:
        """Engines are asked over HTTP."""

    def send(self, weights) -> SyncReceipt:
        """The transport."""
        time.sleep(SEND_S)
        return SyncReceipt(
            weights=weights, transport="broadcast", num_tensors=1, num_bytes=4, seconds=SEND_S, digest=str(weights)
        )

    def prove(self, endpoints) -> tuple[int, int]:
        """Whoever told its version holds it."""
        return len(endpoints), 0


def light_build(resolved: ResolvedRun) -> Job:
    """As job/build.py, with external engines and no processes."""
    job = Job(resolved=resolved)
    try:
        config = resolved.config
        urls = config.placement.rollout_external_engine_addrs or []
        engines = tuple(EnginePlan(index=i, bundles=(), tp=1, external_url=url) for i, url in enumerate(urls))
        plan = SimpleNamespace(mode="external", engines=engines, transport="broadcast")
        fleet = announcing.AnnouncingFleet(config, plan, None, resolved.run.path)
        job.closing.insert(0, fleet)
        fleet.start()
        fleet.wait_started()
        assert fleet.router is not None, "wait_started() made it"
        access = EngineAccess(
            router_url=fleet.router.url, router_api_key=fleet.router.api_key, num_engines=2, endpoints=fleet.endpoints
        )
        rollouts = RolloutManager(config, access)
        job.closing.insert(0, rollouts)
        rollouts.start(resolved.data)
        job.engines, job.rollouts, job.trainer = fleet, rollouts, ScriptedTrainer()
        job.tend = EngineCare(fleet, config.engine).tend
    except BaseException:
        job.close()
        raise
    return job


if __name__ == "__main__":
    announcing.ORDER.update(json.loads(sys.argv[1]))
    announcing.BLOWS = announcing.Blows(announcing.ORDER["blows"])
    resolve.with_servers = lambda config, plan, data: (config, plan)
    build.build = light_build
    sync_loop.Phases = announcing.AnnouncingPhases
    service.GenerationClient = announcing.AnnouncingClient
    service.RewardScorer = announcing.AnnouncingScorer
    sys.exit(train.main(sys.argv[2:]))
