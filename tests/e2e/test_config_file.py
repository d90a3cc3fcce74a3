"""A run from config files: --log-level reaches every process, and the run's config.json gives the same run again."""

from __future__ import annotations

import json

import pytest

from tests.e2e.runs import SMALL_RUN, assert_nothing_left, our_processes, run_train

pytestmark = [pytest.mark.e2e, pytest.mark.long_run]

#: What SGLang writes at info when a server is up.
READY = "ready to roll"


def test_log_level_and_a_config_given_back(tiny_model_dir, tiny_data_dir, tmp_path):
    before = our_processes()
    (tmp_path / "run.toml").write_text(
        f'[checkpoint]\nhf-checkpoint = "{tiny_model_dir}"\n[data]\nprompt-data ='
        f' "{tiny_data_dir}/train.jsonl"\nnum-rollout = 9\n[placement]\nactor-num-gpus-per-node = 1\ncolocate ='
        ' true\n[observability]\nlog-level = "debug"\n'
    )
    flags = [*SMALL_RUN, "--config", tmp_path / "run.toml"]
    flags[flags.index("--num-rollout") + 1] = "1"
    first = run_train(*flags, run_dir=tmp_path / "first")
    assert first.returncode == 0, first.logs()
    logs = tmp_path / "first/logs"
    assert "INFO slime_like.sglang_backend.router: router at http" in first.output
    actor = (logs / "actor-0.log").read_text()
    assert "INFO slime_like.cluster.train_group: trainer rank 0 of 1 is up after" in actor
    assert "DEBUG slime_like.cluster.train_group: train took" in actor
    assert "INFO slime_like.cluster.engine_actor: engine 0 (pid" in (logs / "engine-actor-0.log").read_text()
    assert READY in (logs / "engine-0.log").read_text() and "DEBUG" in (logs / "router-0.log").read_text()

    second = run_train("--config", tmp_path / "first/config.json", "--log-level", "error", run_dir=tmp_path / "second")
    assert second.returncode == 0, second.logs()
    assert [len(run.metrics("train")) for run in (first, second)] == [1, 1]
    logs = tmp_path / "second/logs"
    assert "INFO" not in second.output and "slime_like.cluster" not in (logs / "actor-0.log").read_text()
    assert READY not in (logs / "engine-0.log").read_text() and "INFO" not in (logs / "router-0.log").read_text()
    old, new = (
        json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "first", tmp_path / "second")
    )
    assert {new["observability"].pop(name) for name in ("run_dir", "log_level")} == {str(tmp_path / "second"), "error"}
    assert {old["observability"].pop(name) for name in ("run_dir", "log_level")} == {str(tmp_path / "first"), "debug"}
    assert old == new

    third = run_train("--config", tmp_path / "first/config.json", run_dir=tmp_path / "first")
    assert third.returncode == 2 and "holds another run (config.json)" in third.output
    assert_nothing_left(before)
