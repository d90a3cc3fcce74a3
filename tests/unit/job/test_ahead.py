"""The rollout that was generated beside the last train step goes on with the run that is resumed."""

from __future__ import annotations

import dataclasses
import os
import signal
import types

import numpy as np
import pytest

from slime_like.config.asynchrony import AsyncConfig
from slime_like.config.checkpoint import CheckpointConfig
from slime_like.errors import CheckpointError
from slime_like.job import ahead, resume
from slime_like.job.phases import Phases
from slime_like.megatron_backend.checkpoint.folder import Draft, file_digest
from slime_like.observability.console import ProgressConsole
from slime_like.observability.tracing import PhaseTrace
from slime_like.rollout.ledger import IN_FLIGHT, READY, TAKEN, Ledger
from tests.unit.job.recorded_run import Run, config, group

METRICS = {"rollout/reward_mean": 0.25}


def rollout_ahead():
    return types.SimpleNamespace(groups=(group(4), group(5)), metrics=METRICS, busy=())


def phases_of(run: Run) -> Phases:
    return Phases(run.job, run.log, ProgressConsole(1), PhaseTrace(run.job.run.trace))


def test_it_is_written_before_the_checkpoint_and_read_after_a_resume(tmp_path):
    save = tmp_path / "save"
    one_step = {
        "checkpoint": CheckpointConfig(save=str(save), load=str(save)),
        "asynchrony": AsyncConfig(async_mode="one-step"),
    }
    states = []
    trainer = {"save": lambda done, state: states.append(state) or "folder"}
    first = phases_of(
        Run(tmp_path, config(**one_step), rollouts={"ahead": rollout_ahead(), "snapshot": ({}, None)}, trainer=trainer)
    )
    first.save(2)
    file = save / "ahead" / "0000002.npz"
    size, digest = file.stat().st_size, file_digest(str(file))
    assert states[0]["ahead"] == {"bytes": size, "digest": digest, "metrics": METRICS}

    taken = []
    resumed = Run(tmp_path, config(**one_step), rollouts={"put_ahead": lambda *args: taken.append(args)})
    resumed.job.num_rollouts_done, resumed.job.client_state = 2, states[0]
    assert phases_of(resumed).restore() == 2
    ((step, groups, metrics),) = taken
    assert (step, metrics) == (2, METRICS) and [one.prompt.index for one in groups] == [4, 5]
    assert np.array_equal(groups[1].samples[0].engine_logprobs, group(5).samples[0].engine_logprobs)

    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"0000002.npz is not what was written"):
        phases_of(resumed).restore()
    file.write_bytes(b"torn")
    with pytest.raises(CheckpointError, match=r"0000002.npz is 4 bytes long, but was written with \d+"):
        phases_of(resumed).restore()


def test_files_of_checkpoints_that_are_gone_go_too(tmp_path):
    for number in (1, 2, 3):
        (tmp_path / f"iter_{number:07d}").mkdir()
        ahead.kept(str(tmp_path), number, rollout_ahead(), None)
    (tmp_path / "iter_0000001").rmdir()
    ahead.kept(str(tmp_path), 4, rollout_ahead(), None)
    assert sorted(path.name for path in (tmp_path / "ahead").iterdir()) == [f"{n:07d}.npz" for n in (2, 3, 4)]


def test_its_prompts_are_neither_asked_again_nor_lost():
    ledger = Ledger()
    for prompt in ledger.draw(5):
        ledger.move(prompt, IN_FLIGHT)
    for prompt in (0, 1, 2, 3):
        ledger.move(prompt, READY)
        ledger.move(prompt, TAKEN)
    ledger.trained([0, 1])
    resumed = Ledger()
    resumed.load_state_dict(ledger.state_dict())
    resumed.take_again([2, 3])
    assert resumed.draw(2) == [4, 5]
    resumed.trained([2, 3])
    with pytest.raises(CheckpointError, match=r"groups of prompts \[0\] were saved"):
        resumed.take_again([0])


@pytest.mark.parametrize("when", ["generate", "train"])
def test_a_preempted_run_saves_what_is_trained_and_ends_with_143(tmp_path, when):
    """While it waits for answers it gives up at once; a train step is done first. Either way the sync of the run that
    goes on has the version of the one that brought, or would have brought, these weights.
    """
    versions = []

    def save(num_done, state):
        versions.append(state["weight_version"])
        return str(tmp_path)

    def train(step, samples):
        if when == "train" and step == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return types.SimpleNamespace(metrics={}, num_tokens=4)

    def generate(step, watch):
        if when == "generate" and step == 2:
            os.kill(os.getpid(), signal.SIGUSR1)
            raise AssertionError("the signal is heard first")
        return rollout_ahead()

    run = Run(
        tmp_path, config(checkpoint=CheckpointConfig(save=str(tmp_path / "save"))), num_rollout=5,
        trainer={"train": train, "save": save}, rollouts={"generate": generate},
    )  # fmt: skip
    with pytest.raises(SystemExit) as end:
        run.go()
    assert end.value.code == 143 and versions == [2]
    assert [call for call in run.calls if call.startswith("trainer.save")] == ["trainer.save 2"]
    assert run.calls[-1] == "trainer.save 2" and "trainer.train 2" not in run.calls


def test_a_checkpoint_whose_file_is_torn_is_left_out(tmp_path):
    """By --resume auto, which then goes on from the one before."""
    for number in (1, 2):
        state, _ = ahead.kept(str(tmp_path), number, rollout_ahead(), None)
        draft = Draft(folder=str(tmp_path), number=number, record={"client_state": state})
        draft.make()
        draft.publish()
    resuming = config(checkpoint=CheckpointConfig(resume="auto", save=str(tmp_path)))
    assert resume.resume_point(resuming).num_rollouts_done == 2
    (tmp_path / "ahead" / "0000002.npz").write_bytes(b"torn")
    point = resume.resume_point(resuming)
    assert point.num_rollouts_done == 1 and "0000002.npz is 4 bytes long" in point.notes()[0]


def test_groups_that_no_file_can_hold_are_said_to_be_asked_again(tmp_path):
    """A user's metadata may be anything; the checkpoint is written all the same."""
    odd = group(4)
    samples = tuple(dataclasses.replace(sample, metadata={"a set": {1}}) for sample in odd.samples)
    rollout = types.SimpleNamespace(groups=(dataclasses.replace(odd, samples=samples),), metrics={}, busy=())
    state, (note,) = ahead.kept(str(tmp_path), 1, rollout, None)
    assert state == {} and "no JSON value" in note and "asked again" in note
