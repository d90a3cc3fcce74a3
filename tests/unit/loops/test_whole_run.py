"""What the end of a run means: its status, and what to do. Whole runs: tests/e2e."""

from __future__ import annotations

import dataclasses
import errno
from pathlib import Path
from types import SimpleNamespace

import pytest

from slime_like.config.checkpoint import CheckpointConfig
from slime_like.config.observability import ObservabilityConfig
from slime_like.errors import ConfigError, ProcessLost
from slime_like.loops import whole_run
from slime_like.loops.whole_run import advice, exit_status
from slime_like.megatron_backend.checkpoint.folder import Draft
from tests.unit.job.recorded_run import config


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (SystemExit(143), 143),
        (KeyboardInterrupt(), 130),
        (ConfigError(["x"]), 2),
        (ProcessLost("x"), 1),
        (KeyError(), 1),
    ],
)
def test_the_status_is_that_of_train_py(error, status):
    assert exit_status(error) == status


def saving(tmp_path: Path):
    observability = ObservabilityConfig(run_dir=str(tmp_path))
    return config(checkpoint=CheckpointConfig(save=str(tmp_path / "saved")), observability=observability)


def test_a_run_goes_on_from_what_was_saved(tmp_path):
    options, lost = saving(tmp_path), ProcessLost("trainer rank 0 died")
    again = f"the same command with --run-dir {tmp_path} --resume auto"
    assert advice(lost, options) == f"{again} starts anew: no checkpoint was written yet"
    unsaved = dataclasses.replace(options, checkpoint=CheckpointConfig())
    assert advice(lost, unsaved) == f"{again} starts anew: nothing was saved (--save-interval)"
    saved = Draft(folder=str(tmp_path / "saved"), number=4, record={})
    saved.make()
    (Path(saved.path) / "shard").write_text("weights")
    saved.publish()
    assert advice(lost, options) == f"{again} goes on after 4 rollouts"
    (Path(saved.final_path) / "shard").write_text("torn")
    assert "no checkpoint in" in advice(lost, options)
    assert "mend" in advice(ConfigError(["x"]), options)


def test_a_full_disk_fails_no_run_that_is_done(monkeypatch, tmp_path, caplog):
    run = SimpleNamespace(path=str(tmp_path), config=tmp_path / "config.json", plan=tmp_path / "plan.json")
    progress = SimpleNamespace(to_json=dict, keep=None)
    config = SimpleNamespace(observability=SimpleNamespace(share_run_dir=False), to_json=str)
    resolved = SimpleNamespace(run=run, plan=None, config=config, progress=progress, num_rollout=1, notes=())

    def full(*args):
        raise OSError(errno.ENOSPC, "No space left on device")

    named = {"resolve": lambda *_: resolved, "as_json": str, "render_plan": str, "_drive": lambda *_: None}
    for name, function in named.items():
        monkeypatch.setattr(whole_run, name, function)
    for name in ("keep_run_dir", "keep_state", "keep_files_private"):
        monkeypatch.setattr(whole_run, name, lambda *_, **__: None)
    monkeypatch.setattr(whole_run.dataclasses, "replace", lambda report, **_: report)
    monkeypatch.setattr(whole_run.ending, "ending_of", lambda *_: SimpleNamespace(write=full))
    assert whole_run.whole_run(SimpleNamespace(config=config, notes=()), SimpleNamespace(plan=None)) == 0
    assert "end.json: No space left on device" in caplog.text
