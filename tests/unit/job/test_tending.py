"""What a run does between two looks when engines die: over a job whose parts write down what they are told."""

from __future__ import annotations

import types

import pytest

from slime_like.cluster.engine_care import Tended
from slime_like.errors import EngineError
from slime_like.job import tending
from slime_like.job.tending import Tending


class World:
    """A job with engines that serve; `looks`: what is noticed at each look."""

    def __init__(self, *looks: Tended, tend: bool = True):
        self.looks, self.heard, self.sent, self.trainers = list(looks), [], 0, []
        self.engines = types.SimpleNamespace(endpoints=("one",), num_deaths=0)
        rollouts = types.SimpleNamespace(
            engines_changed=lambda serving, enough: self.heard.append((serving, enough)),
            engines_looked_at=self._looked,
        )
        self.num_looks = 0
        self.notes: list[str] = []
        console = types.SimpleNamespace(note=self.notes.append)
        self.asked: list[str] = []
        job = types.SimpleNamespace(
            tend=self._tend if tend else None,
            engines=self.engines,
            rollouts=rollouts,
            watch=lambda phase: lambda: self.asked.append(phase),
        )
        self.tending = Tending(job, console, self._after)

    def _tend(self, trainer):
        self.trainers.append(trainer)
        return self.looks.pop(0) if self.looks else Tended()

    def _looked(self):
        self.num_looks += 1

    def _after(self):
        self.sent += 1


def test_a_watch_looks_at_everything_else_and_then_after_engines():
    world = World(Tended(serving_changed=True, notes=("engine 0 died",)), Tended())
    watch = world.tending.watch("generate", lambda: "trainer")
    watch()
    watch()
    assert world.asked == ["generate", "generate"] and world.trainers == ["trainer", "trainer"]
    assert world.heard == [(("one",), True)] and world.notes == ["engine 0 died"] and world.sent == 1
    assert world.num_looks == 2, "requests that have failed wait for that"


def test_requests_wait_while_too_few_serve():
    world = World(Tended(serving_changed=True, enough=False, num_coming=1))
    assert not world.tending.look()
    assert world.heard == [(("one",), False)] and world.sent == 0, "nothing was sent"


def test_requests_that_wait_for_engines_that_wait_for_a_sync_end_the_run():
    world = World(Tended(enough=False, num_coming=1), Tended(enough=False, num_waiting=1))
    watch = world.tending.watch("generate", lambda: None)
    watch()
    with pytest.raises(EngineError, match="1 engines are up in the places of dead ones and need weights"):
        watch()
    World(Tended(num_waiting=1)).tending.watch("generate", lambda: None)()  # enough others serve


def test_where_the_trainer_may_send_newer_weights_it_does_instead():
    world, syncs = World(Tended(enough=False, num_waiting=1), Tended(), Tended(enough=False, num_waiting=1)), []
    watch = world.tending.watch("generate", lambda: None, lambda: not syncs.append(world.num_looks))
    watch()
    watch()
    assert syncs == [1], "once: at the second look enough serve"
    refused = world.tending.watch("generate", lambda: None, lambda: False)
    with pytest.raises(EngineError, match="need weights"):
        refused()


def test_a_sync_waits_for_those_that_come_and_is_begun_again_without_the_dead(monkeypatch):
    monkeypatch.setattr(tending, "_LOOK_S", 0.0)
    world = World(Tended(enough=False, num_coming=1), Tended(), Tended(enough=False, num_coming=0))
    tries = []

    def sync():
        tries.append(len(world.trainers))
        if len(tries) == 1:
            world.engines.num_deaths += 1
            raise EngineError("engine 0 ended with status 137")
        return "receipt"

    assert world.tending.retried(sync) == "receipt"
    assert tries == [2, 3]


@pytest.mark.parametrize("tend", [True, False])
def test_a_sync_that_fails_for_another_reason_is_not_begun_again(tend):
    world = World(tend=tend)

    def sync():
        raise EngineError("engine 0: model.norm.weight is not what was sent")

    with pytest.raises(EngineError, match="not what was sent"):
        world.tending.retried(sync)


def test_without_care_a_death_ends_the_run():
    world = World(tend=False)

    def sync():
        world.engines.num_deaths += 1
        raise EngineError("engine 0 ended with status 137")

    with pytest.raises(EngineError, match="137"):
        world.tending.retried(sync)
