"""A trainer's rank as a process: what it writes into its log file.

The calls between ranks are in tests/multiprocess and tests/e2e.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

#: A rank whose worker does nothing, in a process of its own: it redirects its output.
RANK = """
import dataclasses, types
from slime_like.cluster.train_group import TrainActor
from slime_like.config.run import RunConfig
config = RunConfig()
config = dataclasses.replace(config, observability=dataclasses.replace(config.observability, log_level={level!r}))
rank = TrainActor(config, 0, 1, {log!r}, {{"OMP_NUM_THREADS": "1"}})
rank._worker = types.SimpleNamespace(train=lambda step: step)
assert rank.call("train", 7) == 7
"""


@pytest.mark.parametrize(("level", "logged"), [("debug", True), ("info", False), (None, False)])
@pytest.mark.slow
def test_a_ranks_log_file_has_what_the_level_lets_through(
    repo_root: Path, tmp_path: Path, level: str | None, logged: bool
):
    log = tmp_path / "logs" / "actor-0.log"
    subprocess.run(
        [sys.executable, "-c", RANK.format(level=level, log=str(log))], check=True, cwd=repo_root, timeout=60
    )
    assert ("DEBUG slime_like.cluster.train_group: train took" in log.read_text()) is logged
