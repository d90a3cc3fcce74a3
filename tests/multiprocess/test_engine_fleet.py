"""A fleet of real engines under Ray: one that is killed is dead, with its log's end; the one in its place serves when
it has proven the weights.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray

from slime_like.cluster.bundles import reserve
from slime_like.cluster.engine_fleet import EngineFleet
from slime_like.cluster.engine_processes import EngineProcesses
from slime_like.cluster.ray_session import connect
from slime_like.cluster.train_group import TrainGroup
from slime_like.config.engine import EngineConfig
from slime_like.config.placement import PlacementConfig
from slime_like.config.sync import SyncConfig
from slime_like.errors import EngineError
from slime_like.planning.placement import make_plan
from slime_like.records import WeightsRef
from slime_like.utils.net import wait_until
from tests.helpers.sync_world import START_S, hf_log_probs
from tests.helpers.tiny_models import make_tiny_model
from tests.helpers.train_world import make_config, make_samples

pytestmark = [pytest.mark.multiprocess, pytest.mark.long_run]

PROMPTS = [[5, 17, 3, 44, 9, 60, 21, 8], [71, 2, 2, 90, 33]]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> Iterator[SimpleNamespace]:
    """One trainer rank, and a fleet of two engines beside it."""
    root = tmp_path_factory.mktemp("fleet")
    folder = make_tiny_model(str(root / "model"), "qwen3", num_layers=2)
    base = make_config(folder, num_ranks=1, num_samples=4)
    config = dataclasses.replace(
        base,
        placement=PlacementConfig(actor_num_gpus_per_node=1, rollout_num_gpus=2, rollout_num_gpus_per_engine=1),
        sync=SyncConfig(update_weight_transport="broadcast", update_weight_timeout_s=30.0, verify_weight_sync="full"),
        engine=EngineConfig(engine_start_timeout_s=START_S, sglang={"skip_tokenizer_init": True}),
        observability=dataclasses.replace(base.observability, run_dir=str(root)),
    )
    os.environ["RAY_ADDRESS"] = "local"
    plan = make_plan(config)
    assert not plan.problems, plan.problems
    connect(plan.num_gpus)
    bundles = reserve(plan, START_S)
    train = TrainGroup(config, plan, bundles, str(root / "logs"))
    fleet = EngineFleet(config, plan, EngineProcesses(config, plan, bundles, str(root)), str(root))
    try:
        train.start()
        fleet.start()
        fleet.wait_started()
        train.wait_started()
        yield SimpleNamespace(config=config, train=train, fleet=fleet, root=root)
    finally:
        fleet.close()
        train.close()
        bundles.close()
        ray.shutdown()


def server_of(url: str) -> psutil.Process:
    """The server process that listens at this URL."""
    port = f"--port={url.rpartition(':')[2]}"
    return next(
        process
        for process in psutil.process_iter()
        if port in _command(process) and "cpu_server" in " ".join(_command(process))
    )


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return []


def export(world, name: str) -> str:
    folder = str(Path(world.root) / name)
    world.train.save_hf(folder)
    return folder


def agrees(client, truth) -> bool:
    return all(
        max(abs(a - b) for a, b in zip(mine, theirs, strict=True)) < 1e-4
        for mine, theirs in zip(client.prompt_log_probs(PROMPTS), truth, strict=True)
    )


def test_a_killed_engine_is_dead_and_another_takes_its_place_with_the_same_weights(world):
    fleet, first, second = world.fleet, WeightsRef(version=1), WeightsRef(version=2)
    assert fleet.sync(first, world.train).engines_proven == 2
    world.train.train(0, world.train.put(make_samples(4, seed=1)))
    assert fleet.sync(second, world.train).engines_proven == 2
    truth = hf_log_probs(export(world, "second"), PROMPTS)
    assert all(agrees(client, truth) for client in fleet.clients)

    server = server_of(fleet.clients[1].url)
    os.kill(server.pid, signal.SIGKILL)
    deadline = time.monotonic() + 20
    with pytest.raises(EngineError, match="(?s)engine 1 .* ended with status .*End of .*engine-1.log"):
        while time.monotonic() < deadline:
            fleet.check()
            time.sleep(0.2)
    dead = fleet.membership[1]
    assert (str(dead.state), dead.proven) == ("dead", None) and "engine-1.log" in dead.why
    assert fleet.router.engine_urls() == [fleet.clients[0].url]
    fleet.check()  # what is known to be dead is not told again

    routed: list = []
    publish = world.train.publish

    def watched(order, watch=None):
        routed.append(
            (
                fleet.membership[2].state,
                len(fleet.router.engine_urls()),
                [endpoint.index for endpoint in order.endpoints],
            )
        )
        return publish(order, watch)

    coming = fleet.begin_replacement(1)
    wait_until(
        lambda: None if fleet.started(coming) else "it starts",
        deadline_s=START_S,
        who="the test",
        whom="engine 2",
        phase="start",
    )
    fleet.bring_up(coming, SimpleNamespace(publish=watched))
    member = fleet.membership[coming]
    assert [(str(state), count, indices) for state, count, indices in routed] == [("starting", 1, [2])], (
        "it gets weights before it serves"
    )
    assert (member.index, str(member.state), member.proven) == (2, "serving", second)
    assert len(fleet.router.engine_urls()) == 2
    joined = next(client for client in fleet.clients if client.endpoint.index == 2)
    assert joined.weight_version() == "2" and agrees(joined, truth), "not the weights that it was started with"

    world.train.train(1, world.train.put(make_samples(4, seed=2)))
    assert fleet.sync(second.next(), world.train).engines_proven == 2
    assert {member.proven for member in fleet.members} == {second.next()}
    truth = hf_log_probs(export(world, "third"), PROMPTS)
    assert all(agrees(client, truth) for client in fleet.clients)


def test_a_drained_engine_is_ended_and_the_other_goes_on(world):
    fleet = world.fleet
    index, server = fleet.clients[0].endpoint.index, server_of(fleet.clients[0].url)
    fleet.drain(index, timeout_s=20.0)
    fleet.remove(index)
    assert not server.is_running() or server.status() == psutil.STATUS_ZOMBIE
    assert len(fleet.members) == 1 and fleet.sync(WeightsRef(version=9), world.train).engines_proven == 1
