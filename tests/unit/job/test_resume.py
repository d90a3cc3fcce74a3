"""--resume auto: which checkpoint a run goes on from, and what its run directory says then."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from slime_like.config.checkpoint import CheckpointConfig
from slime_like.config.checkpoint_rules import resume_problems, with_own_checkpoints
from slime_like.config.loss import LossConfig
from slime_like.config.observability import ObservabilityConfig
from slime_like.config.run import RunConfig
from slime_like.errors import CheckpointError, UserError
from slime_like.job import resume
from slime_like.megatron_backend.checkpoint.folder import Draft
from slime_like.utils.files import RunDirectory, append_json_line, read_json_lines


def config(folder: Path, *, critic: bool = False, **options) -> RunConfig:
    loss = LossConfig(advantage_estimator="ppo") if critic else LossConfig()
    checkpoint = CheckpointConfig(resume="auto", save=str(folder), **options)
    return dataclasses.replace(RunConfig(), checkpoint=checkpoint, loss=loss)


def save_at(folder: Path, number: int) -> Path:
    draft = Draft(folder=str(folder), number=number, record={})
    draft.make()
    (Path(draft.path) / "shard").write_text("weights")
    draft.publish()
    return Path(draft.final_path)


def test_nothing_there_means_start(tmp_path):
    assert resume.resume_point(config(tmp_path / "never made")) is None
    (tmp_path / ".iter_0000001.tmp").mkdir()
    assert resume.resume_point(config(tmp_path)) is None


def test_the_newest_whole_checkpoint_counts_whatever_the_tracker_says(tmp_path):
    save_at(tmp_path, 1)
    save_at(tmp_path, 2)
    (save_at(tmp_path, 3) / "shard").write_text("torn")
    point = resume.resume_point(config(tmp_path))
    assert point is not None and point.num_rollouts_done == 2
    assert "iter_0000003/shard" in point.notes()[0] and "after 2 rollouts" in point.notes()[1]
    going_on = resume.going_on(config(tmp_path, finetune=True, hf_checkpoint="model"), point).checkpoint
    assert (going_on.load, going_on.ckpt_step, going_on.finetune) == (str(tmp_path), 2, False)
    assert going_on.problems() == []


def test_no_whole_checkpoint_is_an_error_and_no_fresh_start(tmp_path):
    (save_at(tmp_path, 1) / "shard").unlink()
    with pytest.raises(CheckpointError, match="no checkpoint in .* is whole"):
        resume.resume_point(config(tmp_path))


def test_policy_and_critic_go_on_together(tmp_path):
    for number in (1, 2):
        save_at(tmp_path / "critic", number)
    save_at(tmp_path, 1)  # the run was killed between the critic's and the policy's
    point = resume.resume_point(config(tmp_path, critic=True))
    assert point is not None and point.num_rollouts_done == 1


def metrics_of(run: RunDirectory, num_steps: int) -> None:
    """Lines as sync_loop.py writes them, with a sync and an evaluation after each step."""
    for kind in ("start", "sync", "eval"):
        append_json_line(run.metrics, {"kind": kind, "step": 0})
    for step in range(num_steps):
        for kind, number in (
            ("rollout", step),
            ("train", step),
            ("sync", step + 1),
            ("eval", step + 1),
            ("step", step),
        ):
            append_json_line(run.metrics, {"kind": kind, "step": number})


def test_what_is_done_again_is_told_once(tmp_path):
    run = RunDirectory(str(tmp_path))
    metrics_of(run, 3)
    assert resume.take_over(run, 2, 5) is False
    left = [(line["kind"], line["step"]) for line in read_json_lines(run.metrics)]
    assert ("train", 1) in left and ("sync", 1) in left and ("start", 0) in left
    assert not {("train", 2), ("sync", 2), ("eval", 2)} & set(left)  # they come again


def test_who_begins_anew_names_no_prompts_of_before(tmp_path):
    """Killed before its first checkpoint: the same prompts are drawn, and dropped, again."""
    run = RunDirectory(str(tmp_path))
    run.dropped.write_text('{"prompt": 3, "why": "stale"}\n')
    assert resume.take_over(run, 2, 5) is False and run.dropped.exists()
    assert resume.take_over(run, 0, 5) is False and not run.dropped.exists()


def test_a_run_that_was_over_stays_as_it_is(tmp_path):
    run = RunDirectory(str(tmp_path))
    metrics_of(run, 2)
    before = run.metrics.read_text()
    assert resume.take_over(run, 2, 2) is False and run.metrics.read_text() == before
    lines = before.splitlines(keepends=True)
    run.metrics.write_text("".join(lines[:-2]))  # killed before the last evaluation
    assert resume.take_over(run, 2, 2) is True
    assert [line for line in read_json_lines(run.metrics) if line["kind"] == "sync"] == [
        {"kind": "sync", "step": 0},
        {"kind": "sync", "step": 1},
    ]


def test_two_processes_never_drive_one_run(tmp_path):
    holds = (
        "import sys; from slime_like.job.resume import lock; from slime_like.utils.files import RunDirectory;"
        "lock(RunDirectory(sys.argv[1])); print('locked', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", holds, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "locked\n"
        with pytest.raises(UserError, match=f"process {other.pid} drives this run"):
            resume.lock(RunDirectory(str(tmp_path)))
        other.kill()
        other.wait()
        resume.lock(RunDirectory(str(tmp_path)))  # a process that is dead holds nothing
    assert json.loads((tmp_path / ".lock").read_text()) == os.getpid()


def test_checkpoints_lie_in_the_run_directory_unless_told_otherwise():
    run_dir = ObservabilityConfig(run_dir="runs/a")
    asks = dataclasses.replace(RunConfig(), checkpoint=CheckpointConfig(resume="auto"), observability=run_dir)
    assert with_own_checkpoints(asks).checkpoint.save == "runs/a/checkpoints"
    assert with_own_checkpoints(config(Path("elsewhere"))).checkpoint.save == "elsewhere"
    assert with_own_checkpoints(RunConfig()).checkpoint.save is None
    assert resume_problems(config(Path("elsewhere"))) == [
        "--resume auto needs --run-dir: the run that goes on. Fix: add it."
    ]
