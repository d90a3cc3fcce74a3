"""A save that fails costs no run and no earlier checkpoint, up to a bound, and the last rollout's must succeed."""

from __future__ import annotations

import dataclasses
import os
import re

import pytest

from slime_like.config.checkpoint import CheckpointConfig
from slime_like.config.model import ModelConfig
from slime_like.errors import SaveError
from slime_like.job import saving
from slime_like.loops import sync_loop
from slime_like.observability.console import ProgressConsole
from slime_like.records import StepReport
from slime_like.utils.files import read_json_lines
from tests.unit.job.recorded_run import Run, config


def run_of(
    folder, *, fails=(), in_background=False, hf_fails=(), num_rollout=4, most=3, in_step=True, **options
) -> Run:
    """A run that saves after each rollout; the saves after the rollouts in `fails` find a full disk."""

    def save(done: int, state: dict) -> str:
        if done in fails and not in_background:
            raise SaveError(f"no room for {done}")
        saved.append(done)
        return str(folder / f"iter_{done}")

    def finish_save() -> bool:
        if saved and saved[-1] in fails:
            raise SaveError(f"no room for {saved.pop()}")
        return True

    def save_hf(path: str) -> None:
        if int(os.path.basename(path)) in hf_fails:
            raise SaveError(f"no room for {path}")

    saved: list[int] = []
    trainer = {"save": save, "finish_save": finish_save, "save_hf": save_hf, "in_step": in_step}
    checkpoint = CheckpointConfig(
        save=str(folder),
        save_interval=1,
        save_hf=str(folder / "{rollout_id}") if hf_fails else None,
        async_save=in_background,
        max_failed_saves=most,
    )
    return Run(folder, config(checkpoint=checkpoint), num_rollout=num_rollout, trainer=trainer, **options)


def said(run: Run, folder) -> list[str]:
    """What the console says of saves."""
    with open(folder / "console", "w") as file:
        sync_loop.run(run.job, run.log, ProgressConsole(run.job.num_rollout, file))
    lines = [line.strip() for line in (folder / "console").read_text().splitlines()]
    return [line for line in lines if any(word in line for word in ("save", "newest", "room"))]


@pytest.mark.parametrize("in_background", [False, True])
def test_the_run_goes_on_and_says_so(tmp_path, in_background):
    run = run_of(tmp_path, fails=(2, 3), in_background=in_background)
    lines = said(run, tmp_path)
    assert [line for line in lines if "not saved" in line or "newest" in line] == [
        "not saved after 2 rollouts (1 of 3 in a row): no room for 2",
        "the run goes on; the newest checkpoint is that after 1 rollouts",
        "not saved after 3 rollouts (2 of 3 in a row): no room for 3",
        "the run goes on; the newest checkpoint is that after 1 rollouts",
    ]
    assert lines[-1] == f"saved {tmp_path / 'iter_4'}"
    steps = [line for line in read_json_lines(tmp_path / "metrics.jsonl") if line["kind"] == "step"]
    assert [line.get("step/failed_saves", 0) for line in steps] == ([0, 0, 1, 2] if in_background else [0, 1, 2, 2])


def test_too_many_in_a_row_end_the_run(tmp_path):
    with pytest.raises(SaveError, match="no room for 3") as caught:
        run_of(tmp_path, fails=(2, 3), most=2).go()
    assert caught.value.__notes__ == [
        "2 saves in a row failed (--max-failed-saves 2); the newest checkpoint is that after 1 rollouts."
    ]


def test_those_between_which_one_succeeds_are_not_in_a_row(tmp_path):
    run_of(tmp_path, fails=(1, 3), most=2).go()


@pytest.mark.parametrize("in_background", [False, True])
def test_the_last_one_must_succeed(tmp_path, in_background):
    with pytest.raises(SaveError, match="no room for 4") as caught:
        run_of(tmp_path, fails=(4,), in_background=in_background).go()
    assert "the newest checkpoint is that after 3 rollouts" in caught.value.__notes__[0]


def test_ranks_that_are_not_together_any_more_end_the_run(tmp_path):
    with pytest.raises(SaveError, match="no room for 1"):
        run_of(tmp_path, fails=(1,), in_step=False).go()


def test_a_folder_for_others_costs_no_checkpoint(tmp_path):
    run = run_of(tmp_path, hf_fails=(1,), num_rollout=2)
    assert [call for call in run.go() if call.startswith("trainer.save ")] == ["trainer.save 1", "trainer.save 2"]
    with pytest.raises(SaveError, match="no room for .*/2") as caught:  # but a run whose last one is missing has failed
        run_of(tmp_path, hf_fails=(2,), num_rollout=2).go()
    assert "The checkpoint is there" in caught.value.__notes__[0]


def test_a_critics_checkpoint_goes_with_the_policys(tmp_path):
    """It would else drive out the one that stands beside the policy's newest."""
    report = StepReport(step=0, num_train_steps=1, num_samples=4, num_tokens=8, metrics={"train/value_loss": 1.0})
    critic = {"with_values": lambda samples: samples, "train": lambda step, samples: report, "in_step": True}
    run = run_of(tmp_path, fails=(2,), num_rollout=3, parts=("trainer", "critic", "engines", "rollouts"), critic=critic)
    calls = [call for call in run.go() if call.startswith(("critic.save", "critic.discard", "trainer.save"))]
    assert calls == [
        *("critic.save 1", "trainer.save 1"),
        *("critic.save 2", "trainer.save 2", "critic.discard_save 2"),
        *("critic.save 3", "trainer.save 3"),
    ]


def test_it_is_said_in_time_that_the_next_one_will_not_fit(tmp_path):
    checkpoint = tmp_path / "iter_1"
    checkpoint.mkdir()
    free = os.statvfs(tmp_path).f_bavail * os.statvfs(tmp_path).f_frsize
    with open(checkpoint / "shard", "wb") as file:
        file.truncate(2 * free)  # takes no room, and says that it is so long
    lines = said(run_of(tmp_path, num_rollout=2), tmp_path)
    assert [line for line in lines if "no room" in line] == [
        line for line in lines if line.startswith("the next checkpoint will find no room beside")
    ]
    assert f"it takes {2 * free} bytes" in next(line for line in lines if "no room" in line)
    assert saving.room_for_another(str(tmp_path / "elsewhere")) is None


def test_the_first_one_is_looked_at_before_the_start(tmp_path):
    def noted(num_layers: int, **checkpoint) -> tuple[str, ...]:
        sizes = {"num_layers": num_layers, "hidden_size": 65536, "num_attention_heads": 64, "vocab_size": 1000}
        options = CheckpointConfig(save=str(tmp_path / "not" / "there"), **checkpoint)
        return saving.room_at_start(dataclasses.replace(config(), checkpoint=options, model=ModelConfig(**sizes)))

    assert noted(0) == ()
    (note,) = noted(10_000)  # more parameters than any disk has bytes
    assert note.startswith(f"--save {tmp_path}/not/there: a checkpoint takes about ") and note.endswith("are free")
    (weights_only,) = noted(10_000, no_save_optim=True)
    takes, takes_less = (float(re.search(r"([\d.]+) GB", text)[1]) for text in (note, weights_only))
    assert takes / takes_less == pytest.approx(7)
