"""What --resume auto fills in, and what it needs of other flags."""

from __future__ import annotations

import dataclasses
import os
from typing import TypeVar

from slime_like.config.deterministic_rules import deterministic_problems
from slime_like.config.tree import ConfigTree

_Tree = TypeVar("_Tree", bound=ConfigTree)


def with_own_checkpoints(config: _Tree) -> _Tree:
    """The config with --save in the run directory, where --resume auto says no other folder."""
    checkpoint, run_dir = config.checkpoint, config.observability.run_dir
    if not checkpoint.resume or checkpoint.save or not run_dir:
        return config
    checkpoint = dataclasses.replace(checkpoint, save=os.path.join(run_dir, "checkpoints"))
    return dataclasses.replace(config, checkpoint=checkpoint)


def resume_problems(config: ConfigTree) -> list[str]:
    """--resume where nothing says which run goes on, or none trains; and what --deterministic cannot hold."""
    problems = deterministic_problems(config)
    if not config.checkpoint.resume:
        return problems
    if not config.observability.run_dir:
        problems.append("--resume auto needs --run-dir: the run that goes on. Fix: add it.")
    if config.placement.debug_rollout_only:
        problems.append("--resume auto: --debug-rollout-only trains nothing, and saves nothing. Fix: drop it.")
    return problems
