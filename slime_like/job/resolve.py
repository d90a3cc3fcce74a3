"""Config and plan -> a run that can start: every file read, every plugin found, every default filled in, before any
process starts.
"""

from __future__ import annotations

import dataclasses
import json
import os

from slime_like.algorithms.loss_plugins import load_loss_plugins
from slime_like.cluster.external_engines import with_servers
from slime_like.config.run import RunConfig
from slime_like.config.transports import SHARED_FOLDER, transport_of
from slime_like.errors import ConfigError
from slime_like.job import resume
from slime_like.job.config_changes import config_changes, last_config
from slime_like.job.running import ResolvedRun
from slime_like.planning.placement import PlacementPlan
from slime_like.rollout.check_data import check_data
from slime_like.rollout.data_source import DataSource
from slime_like.utils.files import RunDirectory
from slime_like.weight_sync.transform import load_transform


def resolve(config: RunConfig, plan: PlacementPlan) -> ResolvedRun:
    """Check everything that can be known to be wrong (data files, keys, templates, plugins, external engines), then
    make the run's directory.

    Raises a UserError of the kind of what is wrong.
    """
    load_loss_plugins(config.loss)
    load_transform(config.sync)
    replays = bool(config.observability.load_debug_rollout_data)
    if replays and config.data.num_rollout is None:
        raise ConfigError(["--load-debug-rollout-data needs --num-rollout: how many saved rollouts to train on."])
    data = None if replays else check_data(config)
    config, plan = with_servers(config, plan, data)
    source = data or DataSource([], config.data, path="", tokenizer=None, max_tokens=0)
    num_rollout = source.num_rollouts(config.rollout.rollout_batch_size)
    goes_on = config.checkpoint.resume is not None
    point = resume.resume_point(config) if goes_on else None
    before = last_config(RunDirectory(config.observability.run_dir or "").config) if goes_on else None
    run = RunDirectory.create(config, goes_on=goes_on)
    resume.lock(run)
    wanted = config.to_json()
    config, ends_only = _filled(config, plan, run, num_rollout), False
    if goes_on:
        num_done = point.num_rollouts_done if point is not None else 0
        ends_only = resume.take_over(run, num_done, num_rollout)
    return ResolvedRun(
        config=config if point is None else resume.going_on(config, point),
        plan=plan,
        run=run,
        data=source,
        num_rollout=num_rollout,
        ends_only=ends_only,
        notes=() if point is None else (*config_changes(before, json.loads(wanted)), *point.notes()),
    )


def _filled(config: RunConfig, plan: PlacementPlan, run: RunDirectory, num_rollout: int) -> RunConfig:
    """The config as every process will see it."""
    data = dataclasses.replace(config.data, num_rollout=num_rollout, num_epoch=None)
    sync = dataclasses.replace(config.sync, update_weight_transport=plan.transport)
    if plan.transport is not None and transport_of(plan.transport).loads_from == SHARED_FOLDER:
        folder = os.path.abspath(sync.update_weight_disk_dir or os.path.join(run.path, "weights"))
        sync = dataclasses.replace(sync, update_weight_disk_dir=folder)
    observability = dataclasses.replace(config.observability, run_dir=run.path)
    return dataclasses.replace(config, data=data, sync=sync, observability=observability)
