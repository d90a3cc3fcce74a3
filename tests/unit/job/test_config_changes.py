"""A run that goes on with other flags says which."""

from __future__ import annotations

import dataclasses
import json

from slime_like.config.parallel import ParallelConfig
from slime_like.config.placement import PlacementConfig
from slime_like.config.run import RunConfig
from slime_like.job.config_changes import config_changes, last_config


def as_json(config: RunConfig) -> dict:
    return json.loads(config.to_json())


def test_what_changed_is_said_by_flag_and_what_every_start_fills_in_is_not():
    before = RunConfig()
    now = dataclasses.replace(
        before,
        parallel=ParallelConfig(tensor_model_parallel_size=2),
        placement=PlacementConfig(colocate=True),
        checkpoint=dataclasses.replace(before.checkpoint, resume="auto", load="there", ckpt_step=3),
    )
    changed, layout = config_changes(as_json(before), as_json(now))
    assert "--tensor-model-parallel-size 1 -> 2" in changed and "--colocate False -> True" in changed
    assert "ckpt" not in changed and "load" not in changed and "random states" in layout


def test_nothing_is_said_where_nothing_changed_or_nothing_is_known(tmp_path):
    config = as_json(RunConfig())
    assert config_changes(config, config) == () == config_changes(None, config)
    (lines,) = config_changes(config, config | {"custom": {"mine": 1}})
    assert lines.endswith("--custom {} -> {'mine': 1}")
    path = tmp_path / "config.json"
    assert last_config(path) is None
    path.write_text("torn {")
    assert last_config(path) is None
    path.write_text(json.dumps(config))
    assert last_config(path) == config
