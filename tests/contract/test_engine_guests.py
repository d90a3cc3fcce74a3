"""Engines that join a run by its engines.txt, and leave: over the real router and scripted engines."""
# Covers slime_like.cluster.engine_guests.

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Iterator

import pytest

from slime_like.cluster.engine_care import EngineCare
from slime_like.cluster.engine_guests import EngineGuests
from slime_like.config.rollout import RolloutConfig
from slime_like.config.run import RunConfig
from slime_like.utils.net import free_port, wait_until
from tests.contract.fleet_world import FIRST, SLOW, World, fleet_world


@pytest.fixture
def world(tmp_path) -> Iterator[World]:
    with fleet_world(tmp_path) as world:
        yield world


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


def test_a_file_that_is_no_text_is_named(world, file_of, tmp_path):
    path = tmp_path / "engines.txt"
    path.write_bytes(b"\xff\xfe\x00\n")
    path.chmod(0o600)
    os.utime(path, (0, 1))
    (note,) = file_of(None).notes
    assert "engines.txt: " in note and len(world.fleet.members) == 2


def test_an_engine_that_is_needed_stays(world, file_of):
    world.fleet.sync(FIRST, world.trainer)
    file_of(world.engines[2].url)
    file_of(None, world.trainer)
    assert world.routed() == [0, 1, 2]
    world.fleet.drain(0, timeout_s=5.0)
    world.fleet.drain(1, timeout_s=5.0)
    assert any("cannot leave: --min-engines 1 are to serve" in note for note in file_of("").notes)
    assert world.states()[2] == "serving"


def silent_address() -> str:
    return f"127.0.0.1:{free_port('127.0.0.1')}"
