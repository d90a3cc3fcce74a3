"""The user's own functions of the rollout side, found and checked before anything starts."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from slime_like.config.run import RunConfig
from slime_like.utils.user_functions import Hook, load_function


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutPlugins:
    """None where the flag is not given."""

    reward: Callable | None  # (args, sample) -> float or dict, sync or async
    group_filter: Callable | None  # (args, samples) -> bool or (bool, reason)
    generate: Callable | None  # async (args, prompt, sampling_params, engine) -> Sample
    rollout: Hook | None  # async (args, step, RolloutTools) -> groups or (groups, metrics)
    evaluation: Hook | None  # async (args, step, EvalTools) -> {set: groups} or that and metrics
    sample_filter: Hook | None  # (args, groups) -> [[bool]]
    all_samples: Hook | None  # (args, groups, source)
    choose: Hook | None  # (args, groups, count) -> groups
    post_process: Hook | None  # (args, samples) -> numbers
    convert: Hook | None  # (args, groups) -> TrainSamples
    rollout_log: Hook | None  # (step, args, samples, metrics, seconds) -> metrics or None
    eval_log: Hook | None  # (step, args, data, metrics) -> metrics or None


def load_rollout_plugins(config: RunConfig) -> RolloutPlugins:
    """Import all of them. Raises PluginError naming the flag, the path and what was found."""
    rollout = config.rollout
    return RolloutPlugins(
        reward=_load(config.reward.custom_rm_path, 2, "--custom-rm-path"),
        group_filter=_load(rollout.dynamic_sampling_filter_path, 2, "--dynamic-sampling-filter-path"),
        generate=_load(rollout.custom_generate_function_path, 4, "--custom-generate-function-path"),
        rollout=Hook.load(rollout.rollout_function_path, 3, "--rollout-function-path"),
        evaluation=Hook.load(config.eval.eval_function_path, 3, "--eval-function-path"),
        sample_filter=Hook.load(rollout.rollout_sample_filter_path, 2, "--rollout-sample-filter-path"),
        all_samples=Hook.load(rollout.rollout_all_samples_process_path, 3, "--rollout-all-samples-process-path"),
        choose=Hook.load(rollout.buffer_filter_path, 3, "--buffer-filter-path"),
        post_process=Hook.load(config.reward.custom_reward_post_process_path, 2, "--custom-reward-post-process-path"),
        convert=Hook.load(
            rollout.custom_convert_samples_to_train_data_path, 2, "--custom-convert-samples-to-train-data-path"
        ),
        rollout_log=Hook.load(rollout.custom_rollout_log_function_path, 5, "--custom-rollout-log-function-path"),
        eval_log=Hook.load(
            config.eval.custom_eval_rollout_log_function_path, 4, "--custom-eval-rollout-log-function-path"
        ),
    )


def _load(path: str | None, num_positional: int, flag: str) -> Callable | None:
    return load_function(path, num_positional=num_positional, flag=flag) if path else None
