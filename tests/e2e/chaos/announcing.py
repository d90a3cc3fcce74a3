"""train.py that says when it is where, and waits until somebody has struck.

python tests/e2e/chaos/announcing.py JSON <flags of train.py>

JSON: {"folder": where it says so, "blows": [{"number", "phase", "step", "fault", "whom"}]}. A blow is due when the run
is in its phase of its step: due-<number> comes to be in the folder, and the run goes on when struck-<number> does.
What no signal can do is done here: where there is a file TEAR, it goes, and half of an engine's next answer with it.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import train
from slime_like.cluster import train_group
from slime_like.job import build
from slime_like.job.phases import Phases
from slime_like.loops import sync_loop
from slime_like.rollout import service
from slime_like.rollout.generate import GenerationClient
from slime_like.rollout.rewards.scorer import RewardScorer
from slime_like.utils.files import write_atomic
from tests.e2e.chaos.strikes import TEAR
from tests.e2e.faulty_train import FaultyActor

ORDER = json.loads(sys.argv[1]) if __name__ == "__main__" else {"folder": "", "blows": []}
#: The request, or the reward, of a phase that comes with the blow: some are answered before, some are not.
NUMBER = 3
#: From the beginning of a call to the trainer until the blow, while it works.
INSIDE_S = {"train": 0.05, "sync": 0.02, "save": 0.01}
#: How long somebody may take to strike.
STRIKE_S = 120.0
#: Half an answer, as of a connection that a proxy has cut.
TORN = b'{"text": "x", "output_ids": [1, 2'


class Blows:
    """Which blows are still to come; one at a time is due. Called by the driver's threads."""

    def __init__(self, blows: list[dict]):
        self._left, self._lock = list(blows), threading.Lock()
        self.all_serve: Callable[[], bool] = lambda: True
        self.phase = ""  # that the driver is in; the rollout side may work beside it

    def take(self, phase: str, step: int) -> dict | None:
        """The next blow, if it is of this phase, and of this step or one before; engines die one at a time."""
        with self._lock:
            first = self._left[0] if self._left else None
            if first is None or first["phase"] != phase or step < first["step"]:
                return None
            if first["whom"] == "engine" and first["fault"] in ("kill", "stall") and phase != "start":
                return self._left.pop(0) if self.all_serve() else None
            return self._left.pop(0)

    def at(self, phase: str, step: int, *, within: str | None = None) -> bool:
        """Be struck now, if that is due. within: the phase that the driver is still in if the blow comes in time."""
        blow = self.take(phase, step)
        if blow is None:
            return False
        folder, number = Path(ORDER["folder"]), blow["number"]
        write_atomic(folder / f"due-{number}", json.dumps(blow | {"time": time.time(), "driver": os.getpid()}))
        deadline = time.monotonic() + STRIKE_S
        while not (folder / f"struck-{number}").exists():
            assert time.monotonic() < deadline, f"nobody struck: {blow}"
            time.sleep(0.002)
        if within is not None and self.phase != within:
            (folder / f"late-{number}").write_text(self.phase)
        return True

    def beside(self, phase: str, step: int) -> None:
        """Be struck while the call that follows goes on."""
        self.phase = phase
        threading.Timer(INSIDE_S[phase], self.at, (phase, step), {"within": phase}).start()


BLOWS = Blows(ORDER["blows"])


class AnnouncingPhases(Phases):
    """Phases that know when."""

    def restore(self) -> int:
        """As Phases."""
        AnnouncingClient.count_from("generate", 0)
        if (engines := self.job.engines) is not None:
            num_all = engines.num_members
            BLOWS.all_serve = lambda: engines.num_members == num_all
        return super().restore()

    def generate(self, step):
        """As Phases."""
        BLOWS.phase = "generate"
        AnnouncingClient.count_from("generate", step)
        return super().generate(step)

    def train(self, step, samples):
        """As Phases; struck while it works."""
        AnnouncingClient.count_from("generate", step + 1)
        BLOWS.beside("train", step)
        done = super().train(step, samples)
        BLOWS.phase = ""
        return done

    def save(self, *args, **options):
        """As Phases; struck while it works."""
        BLOWS.beside("save", self.num_done - 1)
        super().save(*args, **options)
        BLOWS.phase = ""

    def _sync(self, *args, **options):
        """As Phases; while the weights are on their way."""
        BLOWS.beside("sync", self.num_done - 1)
        receipt = super()._sync(*args, **options)
        BLOWS.phase = ""
        return receipt

    def _evaluate(self, step):
        """As Phases."""
        AnnouncingClient.count_from("eval", step - 1)
        super()._evaluate(step)
        AnnouncingClient.count_from("generate", step)


class AnnouncingClient(GenerationClient):
    """Counts requests and rewards of a phase."""

    phase, step, num_requests, num_rewards = "generate", 0, 0, 0

    @classmethod
    def count_from(cls, phase: str, step: int) -> None:
        """Requests from now on are of this phase of this step."""
        if (phase, step) != (cls.phase, cls.step):
            cls.phase, cls.step, cls.num_requests, cls.num_rewards = phase, step, 0, 0

    async def _post(self, *args, **options):
        """As GenerationClient; a torn answer where one is due."""
        counts = AnnouncingClient
        counts.num_requests += 1
        if counts.num_requests >= NUMBER:
            BLOWS.at(counts.phase, counts.step)
        body, status = await super()._post(*args, **options)
        try:
            os.unlink(f"{ORDER['folder']}/{TEAR}")
        except FileNotFoundError:
            return body, status
        return TORN, 200


class AnnouncingScorer(RewardScorer):
    """Is struck when it is asked."""

    async def score(self, sample, prompt, *, evaluation: bool = False):
        """As RewardScorer."""
        counts = AnnouncingClient
        counts.num_rewards += 1
        if counts.num_rewards >= NUMBER:
            BLOWS.at("eval rewards" if evaluation else "score", counts.step)
        return await super().score(sample, prompt, evaluation=evaluation)


class AnnouncingFleet(build.EngineFleet):
    """Is struck while engines and trainers start."""

    def wait_started(self):
        """As EngineFleet."""
        time.sleep(2.0)
        while BLOWS.at("start", 0):
            pass
        return super().wait_started()


class ChaosActor(FaultyActor):
    """A trainer rank whose weights are changed on their way in one sync; goes to Ray by value."""

    order: dict = ORDER.get("sync_fault") or {"version": -1, "rank": 0}


if __name__ == "__main__":
    train_group.TrainActor = ChaosActor
    sync_loop.Phases = AnnouncingPhases
    service.GenerationClient = AnnouncingClient
    service.RewardScorer = AnnouncingScorer
    build.EngineFleet = AnnouncingFleet
    sys.exit(train.main(sys.argv[2:]))
