"""train.py in which somebody is killed (SIGKILL) at one point of a step: python tests/e2e/killed_train.py JSON <flags>.

JSON: {"who": one of KILLED, or a signal that train.py gets, "at": one of POINTS, "step": rollouts done at that point,
"mark": a file that comes to be just before, "which": of several processes, by age}, or a list of these. Where the mark
is there already nothing happens: the same command line is the one that resumes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import psutil

import train
from slime_like.cluster import train_group
from slime_like.job import build
from slime_like.job.phases import Phases
from slime_like.loops import sync_loop
from slime_like.rollout import service
from slime_like.rollout.continuing import ContinuingClient
from slime_like.rollout.generate import GenerationClient

GIVEN = json.loads(sys.argv[1]) if __name__ == "__main__" else []
ORDERS: list[dict] = GIVEN if isinstance(GIVEN, list) else [GIVEN]
#: The request, or the reward, of a rollout that comes after the blow: some are answered before, some are not.
NUMBER = 6
#: Who -> what the command line of a process of the run has one of; SGLang and Ray give theirs a title.
KILLED = {
    "trainer": ("ray::StrickenActor",),
    "engine": ("sglang::scheduler",),
    "engine server": ("slime_like.sglang_backend.cpu_server",),
    "router": ("router_server", "sglang::router"),
    "reward process": ("slime_like.rollout.rewards.worker",),
    "raylet": ("raylet/raylet",),
    "gcs": ("gcs_server",),
}
#: Within this time, in seconds, a run must end whose Ray has no control server any more.
GCS_NOTICED_S = 40.0
POINTS = (
    *("build", "start", "take", "generate", "score", "train", "trained"),
    *("publish checkpoint", "saved", "sync", "synced", "eval"),
)


def due(orders: list[dict], point: str, step: int) -> dict | None:
    """The order whose time is now."""
    for order in orders:
        if (point, step) == (order.get("at"), order.get("step")) and not os.path.exists(order["mark"]):
            return order
    return None


def is_due(point: str, step: int) -> bool:
    """Whether now is the time."""
    return due(ORDERS, point, step) is not None


def strike(point: str, step: int) -> None:
    """Kill whoever is to be killed at this point; nothing at another one."""
    order = due(ORDERS, point, step)
    if order is None:
        return
    Path(order["mark"]).write_text(str(time.time()))
    supervisor, who = psutil.Process(os.getppid()), order["who"]
    if who in ("driver", "supervisor"):
        os.kill(os.getpid() if who == "driver" else supervisor.pid, signal.SIGKILL)
        time.sleep(30)
    if who.startswith("SIG"):
        os.kill(supervisor.pid, signal.Signals[who])
        return
    words = KILLED[who]
    victims = [
        process
        for process in supervisor.children(recursive=True)
        if any(word in " ".join(process.cmdline()) for word in words)
    ]
    assert victims, f"no {who} is running"
    sorted(victims, key=lambda victim: victim.create_time())[order.get("which", 0)].kill()
    if who == "gcs":  # a run works on without it until Ray ends the driver, which is to be here
        time.sleep(GCS_NOTICED_S)
        raise AssertionError(f"the driver outlives a killed GCS by {GCS_NOTICED_S:.0f} s")


class StrikingPhases(Phases):
    """Phases that know when."""

    def restore(self) -> int:
        """As Phases."""
        first = super().restore()
        strike("start", first)
        return first

    def begin_generate(self, step):
        """As Phases: one step ahead, requests of a rollout are sent from here on."""
        StrikingClient.watch("generate", step)
        super().begin_generate(step)

    def generate(self, step):
        """As Phases. At "take" whoever is killed dies while groups are awaited, whether or not requests are sent."""
        if is_due("take", step):
            threading.Timer(0.02, strike, ("take", step)).start()
        StrikingClient.watch("generate", step)
        StrikingClient.rewards = 0
        StrikingClient.scored = step
        groups = super().generate(step)
        StrikingClient.watch(None, step)
        return groups

    def train(self, step, samples):
        """As Phases; the trainer is struck while it works."""
        if is_due("train", step):
            threading.Timer(0.05, strike, ("train", step)).start()
        done = super().train(step, samples)
        strike("trained", step)
        return done

    def save(self, num_rollouts_done, state=None):
        """As Phases."""
        super().save(num_rollouts_done, state)
        strike("saved", num_rollouts_done)

    def sync(self, step):
        """As Phases; at "synced" engines hold the weights, and generate on."""
        receipt = super().sync(step)
        if is_due("synced", step):
            time.sleep(0.3)
            strike("synced", step)
        return receipt

    def _sync(self, weights, in_use):
        """As Phases; while the weights are on their way."""
        if is_due("sync", self.num_done):
            threading.Timer(0.02, strike, ("sync", self.num_done)).start()
        return super()._sync(weights, in_use)

    def _evaluate(self, step):
        """As Phases."""
        StrikingClient.watch("eval", step)
        super()._evaluate(step)
        StrikingClient.watch(None, step)


class StrikingClient(GenerationClient):
    """Counts requests, of whichever client."""

    point: str | None = None
    step = scored = rewards = requests = 0

    @classmethod
    def watch(cls, point: str | None, step: int) -> None:
        """Requests from now on are of this phase."""
        cls.point, cls.step, cls.requests = point, step, 0

    async def _exchange(self, asked, session):
        """As GenerationClient."""
        StrikingClient.requests += 1
        if StrikingClient.point is not None and StrikingClient.requests == NUMBER:
            strike(StrikingClient.point, StrikingClient.step)
        return await super()._exchange(asked, session)


class StrikingContinuingClient(StrikingClient, ContinuingClient):
    """The same, where answers outlive being ended by us."""


class StrikingFleet(build.EngineFleet):
    """Is struck while engines start."""

    def wait_started(self):
        """As EngineFleet."""
        time.sleep(2.0)
        strike("build", 0)
        return super().wait_started()


class StrickenActor(train_group.TrainActor):
    """A trainer rank that is killed when its checkpoint is written and has no name yet; goes to Ray by value."""

    orders: list[dict] = ORDERS

    def build(self, *meeting) -> dict:
        """As TrainActor."""
        report = super().build(*meeting)
        orders = [order for order in self.orders if order.get("at") == "publish checkpoint"]
        if orders:
            from slime_like.megatron_backend.checkpoint import folder

            publish = folder.Draft.publish

            def stricken(draft, *given, **named):
                for order in orders:
                    if draft.number == order["step"] and not os.path.exists(order["mark"]):
                        Path(order["mark"]).write_text(str(time.time()))
                        os.kill(os.getpid(), signal.SIGKILL)
                publish(draft, *given, **named)

            folder.Draft.publish = stricken
        return report


def even_tokens(args, sample) -> float:
    """The reward of these runs, in the driver."""
    from tests.e2e import rewards

    main = sys.modules["__main__"]
    counter = getattr(main, "StrikingClient", None)
    if counter is not None:
        counter.rewards += 1
        if counter.rewards == NUMBER:
            main.strike("score", counter.scored)
    return rewards.even_tokens(args, sample)


if __name__ == "__main__":
    train_group.TrainActor = StrickenActor
    sync_loop.Phases = StrikingPhases
    service.GenerationClient, service.ContinuingClient = StrikingClient, StrikingContinuingClient
    build.EngineFleet = StrikingFleet
    sys.exit(train.main(sys.argv[2:]))
