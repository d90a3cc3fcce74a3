"""The user's own functions of the rollout side, found and checked before anything starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from slime_like.config.run import RunConfig
from slime_like.utils.user_functions import load_function


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutPlugins:
    """None where the flag is not given."""

    reward: Callable | None  # (args, sample) -> float or dict, sync or async
    group_filter: Callable | None  # (args, samples) -> bool or (bool, reason)
    generate: Callable | None  # async (args, prompt, sampling_params, engine) -> Sample


def load_rollout_plugins(config: RunConfig) -> RolloutPlugins:
    """Import all of them. Raises PluginError naming the flag, the path and what was found."""
    rollout = config.rollout
    return RolloutPlugins(
        reward=_load(config.reward.custom_rm_path, 2, "--custom-rm-path"),
        group_filter=_load(rollout.dynamic_sampling_filter_path, 2, "--dynamic-sampling-filter-path"),
        generate=_load(rollout.custom_generate_function_path, 4, "--custom-generate-function-path"),
    )


def _load(path: str | None, num_positional: int, flag: str) -> Callable | None:
    return load_function(path, num_positional=num_positional, flag=flag) if path else None
