"""What the end of a run means: its status, and what to do. Whole runs: tests/e2e."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from slime_like.config.checkpoint import CheckpointConfig
from slime_like.config.observability import ObservabilityConfig
from slime_like.errors import ConfigError, ProcessLost
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
