"""Engines that join and leave a fleet while it is up: the real router before scripted engines, and a trainer that
steers them as a real one does.
"""
# Covers slime_like.cluster.fleet_router and cluster.engine_guests too.

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import requests

from slime_like.cluster.engine_care import EngineCare
from slime_like.cluster.engine_fleet import EngineFleet
from slime_like.cluster.engine_guests import EngineGuests
from slime_like.config.engine import EngineConfig
from slime_like.config.placement import PlacementConfig
from slime_like.config.rollout import RolloutConfig
from slime_like.config.run import RunConfig
from slime_like.config.sync import SyncConfig
from slime_like.errors import EngineError, WaitTimeout, WeightSyncError
from slime_like.planning.engines import EnginePlan
from slime_like.records import SyncReceipt, WeightsRef
from slime_like.rollout.generate import GenerationClient
from slime_like.rollout.policy import Policy
from slime_like.testing.scripted_engine import Fault, ScriptedEngine
from slime_like.utils.net import free_port, wait_until
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


@pytest.fixture
def world(tmp_path) -> Iterator[World]:
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
            engine=EngineConfig(engine_start_timeout_s=300.0, sglang_router_policy="round_robin"),
            sync=SyncConfig(update_weight_timeout_s=10.0),
        )
        plans = tuple(
            EnginePlan(index=i, bundles=(), tp=1, external_url=engine.url) for i, engine in enumerate(engines[:2])
        )
        fleet = EngineFleet(
            config, SimpleNamespace(mode="external", engines=plans, transport="broadcast"), None, str(tmp_path)
        )
        stack.callback(fleet.close)
        fleet.start()
        fleet.wait_started()
        yield World(fleet, engines)


def test_before_the_first_sync_one_more_serves_when_it_is_healthy(world):
    assert world.states() == {0: "serving", 1: "serving"} and world.routed() == [0, 1]
    member = world.fleet.add(world.third())
    assert (member.index, str(member.state), member.proven) == (2, "serving", None)
    assert world.routed() == [0, 1, 2] and world.trainer.orders == []


def test_after_a_sync_one_more_proves_the_same_weights_before_it_serves(world):
    receipt = world.fleet.sync(FIRST, world.trainer)
    assert (receipt.weights, receipt.engines_proven) == (FIRST, 2)
    assert [member.proven for member in world.fleet.members] == [FIRST, FIRST]
    seen: list = []
    world.trainer.during_send = lambda: seen.append((world.states()[2], world.routed()))
    member = world.fleet.add(world.third(), world.trainer)
    assert seen == [("starting", [0, 1])], "while it gets its weights nobody is sent to it"
    assert [endpoint.url for endpoint in world.trainer.orders[-1].endpoints] == [world.engines[2].url]
    assert (str(member.state), member.proven, world.routed()) == ("serving", FIRST, [0, 1, 2])
    assert world.engines[2].weight_version == "1"
    paths = [path for path, _ in world.engines[2].calls]
    assert paths.index("/update_weight_version") < paths.index("/continue_generation")
    assert world.fleet.sync(SECOND, world.trainer).engines_proven == 3


def test_weights_that_are_not_the_fleets_any_more_let_nobody_in(world):
    """The trainer has trained since the last sync: what it would send under that version is something else."""
    world.fleet.sync(FIRST, world.trainer)
    world.trainer.digest = "b"
    with pytest.raises(
        WeightSyncError,
        match="engine 2 at .* got weights with digest b, but base@1 of the fleet has a: the trainer has gone on since",
    ):
        world.fleet.add(world.third(), world.trainer)
    assert world.states() == {0: "serving", 1: "serving"} and world.routed() == [0, 1]


def test_without_a_trainer_the_next_sync_brings_it_in(world):
    world.fleet.sync(FIRST, world.trainer)
    assert str(world.fleet.add(world.third()).state) == "starting" and world.routed() == [0, 1]
    assert world.fleet.sync(SECOND, world.trainer).engines_proven == 3
    assert world.routed() == [0, 1, 2] and {member.proven for member in world.fleet.members} == {SECOND}


def test_one_that_does_not_hold_what_was_sent_never_serves(world):
    world.fleet.sync(FIRST, world.trainer)
    world.trainer.proves = False
    with pytest.raises(WeightSyncError, match="is not what was sent"):
        world.fleet.add(world.third(), world.trainer)
    assert world.states() == {0: "serving", 1: "serving"} and world.routed() == [0, 1]
    assert "/continue_generation" not in [path for path, _ in world.engines[2].calls]
    assert world.engines[2].calls[-1][0] == "/end_weight_update", "its session is closed"


def test_a_failed_sync_closes_sessions_and_leaves_the_proof_as_it_was(world):
    world.fleet.sync(FIRST, world.trainer)
    world.trainer.proves = False
    with pytest.raises(WeightSyncError, match="is not what was sent"):
        world.fleet.sync(SECOND, world.trainer)
    assert world.fleet.membership.present == FIRST
    assert all(
        engine.calls[-1][0] == "/end_weight_update" and engine.weight_version == "1" for engine in world.engines[:2]
    )


def test_drained_is_who_has_ended_what_it_began(world):
    answers: list = []
    # in turn: one to each
    threads = [threading.Thread(target=lambda: answers.append(world.ask(SLOW))) for _ in range(2)]
    for thread in threads:
        thread.start()
    busy = world.fleet.clients[0]
    wait_until(
        lambda: None if busy.num_requests() else "idle",
        deadline_s=10,
        who="test",
        whom="engine 0",
        phase="start",
        interval_s=0.02,
    )
    with pytest.raises(
        WaitTimeout, match="waited 0 s for engine 0 at .* during drain. Last heard: 1 requests are left"
    ):
        world.fleet.drain(0, timeout_s=0.2)
    assert world.states() == {0: "draining", 1: "serving"} and world.routed() == [1]
    wait_until(
        lambda: "busy" if busy.num_requests() else None, deadline_s=10, who="test", whom="engine 0", phase="drain"
    )
    before = len(world.engines[0].requests)
    assert [world.ask([1, 2]).status_code for _ in range(4)] == [200] * 4 and len(world.engines[0].requests) == before
    for thread in threads:
        thread.join()
    assert [answer.status_code for answer in answers] == [200, 200], "nothing that it had begun was lost"
    world.fleet.remove(0)
    assert world.states() == {1: "serving"}
    world.fleet.drain(1, timeout_s=5.0)
    assert world.states() == {1: "draining"} and world.routed() == []


def test_who_evaluates_is_out_of_the_router_and_of_syncs_until_it_has_proven_the_present_weights(world):
    fleet, trainer = world.fleet, world.trainer
    fleet.sync(FIRST, trainer)
    watch = fleet._vitals._watches[1]
    (chosen,) = fleet.set_aside(1)
    assert (
        chosen.url == world.engines[1].url
        and world.routed() == [0]
        and world.states() == {0: "serving", 1: "evaluating"}
    )
    before = len(world.engines[1].calls)
    assert fleet.sync(SECOND, trainer).engines_proven == 1
    assert [world.engines[0].weight_version, world.engines[1].weight_version] == ["2", "1"]
    assert len(world.engines[1].calls) == before, "the sync did not touch it"
    fleet.take_back()
    assert world.states() == {0: "serving", 1: "starting"} and world.routed() == [0], "it waits for weights"
    trainer.during_send = lambda: seen.append(world.routed())
    seen: list = []
    third = SECOND.next()
    assert fleet.sync(third, trainer).engines_proven == 2 and seen == [[0]]
    assert world.routed() == [0, 1] and {member.proven for member in fleet.members} == {third}
    fleet.set_aside(1)
    fleet.take_back()
    assert world.routed() == [0, 1], "no sync came between: at once"
    assert fleet._vitals._watches[1] is watch, "one watch, however often it is admitted"


def test_one_that_dies_while_it_evaluates_is_named(world):
    world.fleet.sync(FIRST, world.trainer)
    world.fleet.set_aside(1)
    world.engines[1].close()
    with pytest.raises(EngineError, match="external engine 1 at .* does not answer"):
        world.fleet.take_back()
    assert world.states() == {0: "serving", 1: "dead"} and world.routed() == [0]


def test_one_that_is_gone_is_dead_and_named(world):
    world.fleet.sync(FIRST, world.trainer)
    world.engines[1].close()
    with pytest.raises(EngineError, match="external engine 1 at .* does not answer"):
        world.fleet.check()
    assert world.states() == {0: "serving", 1: "dead"} and world.routed() == [0] and world.fleet.num_deaths == 1
    assert world.fleet.membership[1].proven is None and "does not answer" in world.fleet.membership[1].why
    assert world.fleet.sync(SECOND, world.trainer).engines_proven == 1


def killed_router(world) -> None:
    """It has ended, and that is seen."""
    router = world.fleet.router._router
    os.kill(router._process.pid, signal.SIGKILL)
    wait_until(
        lambda: None if world.fleet.router.failure() else "it runs",
        deadline_s=10, who="test", whom="the router", phase="its end",
    )  # fmt: skip


def test_a_router_that_died_is_followed_by_one_of_the_same_address_and_key_with_who_serves_then(world):
    world.fleet.sync(FIRST, world.trainer)
    url, key = world.fleet.router.url, world.fleet.router.api_key
    killed_router(world)
    with pytest.raises(EngineError, match="(?s)the router at .* ended with status 137. End of .*router-0.log"):
        world.fleet.check()
    world.engines[1].close()
    world.fleet.mark_dead(1, "it does not answer")  # nobody is there to be told
    assert world.fleet.router.restart() < 200 and world.fleet.router.failure() is None
    assert (world.fleet.router.url, world.fleet.router.api_key) == (url, key)
    assert world.routed() == [0] and world.ask([1, 2]).status_code == 200


def test_who_joins_finds_a_router_that_died_a_moment_ago_running(world):
    world.fleet.sync(FIRST, world.trainer)
    killed_router(world)
    world.fleet.add(world.third(), world.trainer)
    assert world.routed() == [0, 1, 2]


def test_requests_outlive_the_router(world):
    """Those that are under way when it is killed, and those that begin while none runs: all are answered."""
    world.fleet.sync(FIRST, world.trainer)
    care = EngineCare(world.fleet, world.fleet._config.engine)
    policy, notes = Policy(), []

    async def look_after() -> None:
        while True:
            changes = await asyncio.to_thread(care.tend, world.trainer)
            notes.extend(changes.notes)
            if changes.serving_changed:
                policy.engines_changed(enough=changes.enough)
            await asyncio.sleep(0.3)

    async def run() -> list:
        router = world.fleet.router
        client = GenerationClient(router.url, router.api_key, RolloutConfig(), concurrency=64, weight_version=lambda: 0)
        client.wait_for_engines(policy)
        care_task = asyncio.create_task(look_after())
        before = [asyncio.create_task(client.generate(SLOW, {"max_new_tokens": 4})) for _ in range(4)]
        await asyncio.sleep(SLOW_S / 2)
        os.kill(router._router._process.pid, signal.SIGKILL)
        after = [asyncio.create_task(client.generate([1, number], {"max_new_tokens": 4})) for number in range(4)]
        try:
            return await asyncio.gather(*before, *after)
        finally:
            care_task.cancel()
            await client.close()

    assert [answer.tokens for answer in asyncio.run(run())] == [[7]] * 8
    assert "ended with status 137" in notes[0] and "with 2 engines" in notes[1] and len(notes) == 2


@pytest.fixture
def file_of(world, tmp_path):
    """What is written into the run directory's file, and one look after engines: its notes."""
    guests = EngineGuests(world.fleet, with_checkpoint(world.fleet._config, tmp_path), str(tmp_path), "broadcast")
    care = EngineCare(world.fleet, world.fleet._config.engine, guests)
    path, looks = tmp_path / "engines.txt", []

    def write(text: str | None, trainer=None, mode: int = 0o600):
        if text is not None:
            path.write_text(text)
            path.chmod(mode)
            os.utime(path, (0, 1 + len(looks)))  # not just now
        looks.append(care.tend(trainer))
        return looks[-1]

    return write


def with_checkpoint(config: RunConfig, folder) -> RunConfig:
    """Of a model that a scripted engine, which says nothing of its own, does not contradict."""
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text('{"model_type": "qwen3"}')
    return dataclasses.replace(
        config,
        checkpoint=dataclasses.replace(config.checkpoint, hf_checkpoint=str(folder / "model")),
        rollout=RolloutConfig(rollout_request_timeout_s=30.0),
    )


def test_an_engine_that_the_file_names_gets_the_present_weights_serves_and_leaves_when_its_line_goes(world, file_of):
    world.fleet.sync(FIRST, world.trainer)
    url = world.engines[2].url
    changes = file_of(f"# more hands\n{url}  # here")
    assert "engine 2 at" in changes.notes[0] and "joins, and waits for its weights" in changes.notes[0]
    assert (changes.num_waiting, world.routed()) == (1, [0, 1]), "the trainer may not send now"
    changes = file_of(None, world.trainer)
    assert changes.serving_changed and "engine 2 has its weights after" in changes.notes[0]
    assert world.routed() == [0, 1, 2] and world.fleet.membership[2].proven == FIRST
    assert file_of(None, world.trainer).notes == ()
    busy = [threading.Thread(target=world.ask, args=(SLOW,)) for _ in range(3)]  # in turn: one to each
    for thread in busy:
        thread.start()
    wait_until(
        lambda: None if world.fleet.num_requests(2) else "idle",
        deadline_s=10, who="test", whom="engine 2", phase="start", interval_s=0.02,
    )  # fmt: skip
    changes = file_of("# nobody any more")
    assert changes.serving_changed and "leaves: it takes no more requests" in changes.notes[0]
    assert world.states()[2] == "draining" and world.routed() == [0, 1]
    for thread in busy:
        thread.join()
    assert "has left" in file_of(None).notes[0] and world.states() == {0: "serving", 1: "serving"}
    file_of(url)
    assert world.states()[3] == "starting", "and it may come again"


def test_one_that_cannot_join_is_named_once_and_the_run_goes_on(world, file_of):
    world.fleet.sync(FIRST, world.trainer)
    (note,) = file_of(f"{silent_address()}\nnonsense").notes[1:]
    assert "cannot join" in note and "cannot be reached" in note
    assert file_of(None).notes == ()
    world.trainer.proves = False
    file_of(world.engines[2].url)
    assert "engine 2 cannot join: model.norm.weight is not what was sent" in file_of(None, world.trainer).notes[0]
    assert world.states() == {0: "serving", 1: "serving"} and world.routed() == [0, 1]


def test_a_file_that_others_may_write_is_not_read(world, file_of):
    (note,) = file_of(world.engines[2].url, mode=0o620).notes
    assert "engines.txt is not read: others may write it" in note and len(world.fleet.members) == 2


def test_an_engine_that_is_needed_stays(world, file_of):
    world.fleet.sync(FIRST, world.trainer)
    file_of(world.engines[2].url)
    file_of(None, world.trainer)
    assert world.routed() == [0, 1, 2]
    world.fleet.mark_dead(1, "gone")
    world.fleet.mark_dead(0, "gone")
    assert any("cannot leave: --min-engines 1 are to serve" in note for note in file_of("").notes)
    assert world.states()[2] == "serving"


def silent_address() -> str:
    return f"127.0.0.1:{free_port('127.0.0.1')}"


def test_what_cannot_join_leaves_the_others_alone(world):
    with pytest.raises(EngineError, match="engine 1 cannot join under this number: the next one is 2"):
        world.fleet.add(dataclasses.replace(world.third(), index=1))
    with pytest.raises(EngineError, match="engine 2 cannot join at .*: engine 0 is serving there"):
        world.fleet.add(dataclasses.replace(world.third(), external_url=world.engines[0].url))
    assert world.states() == {0: "serving", 1: "serving"} and world.routed() == [0, 1]


def test_one_cannot_join_while_the_others_have_no_memory(world):
    placement = PlacementConfig(offload_rollout=True)  # of engines of ours, as external ones give nothing back
    world.fleet._config = dataclasses.replace(world.fleet._config, placement=placement)
    world.fleet.release_memory()
    with pytest.raises(EngineError, match="engine 2: no engine can join while the others have given their memory back"):
        world.fleet.add(world.third())
