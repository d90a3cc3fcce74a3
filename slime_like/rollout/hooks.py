"""The user's functions around a rollout and an evaluation, each called as docs/hooks.md says, their answers checked."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from slime_like.records import TRUNCATED, SampleGroup
from slime_like.utils.user_functions import Hook


def filtered_samples(hook: Hook, args: Any, groups: Sequence[SampleGroup]) -> tuple[SampleGroup, ...]:
    """The groups with the loss masks of the samples that --rollout-sample-filter-path leaves out set to 0.

    Their rewards still count in their groups' baselines. Raises RunError unless the function gives a bool for each
    sample of each group.
    """
    answer = hook(args, list(groups))
    shape = [len(group.samples) for group in groups]
    try:
        trains = [[_as_bool(flag) for flag in flags] for flags in answer]
    except TypeError as error:
        raise hook.error(f"gave {str(answer)[:200]}; it must give a list of bools for each group: {error}") from error
    if [len(flags) for flags in trains] != shape:
        sizes = [len(flags) for flags in trains]
        raise hook.error(f"gave {sizes} bools for {len(shape)} groups of {shape} samples; it must give one each.")
    return tuple(
        dataclasses.replace(
            group,
            samples=tuple(
                sample if flag else dataclasses.replace(sample, loss_mask=np.zeros_like(sample.loss_mask))
                for sample, flag in zip(group.samples, flags, strict=True)
            ),
        )
        for group, flags in zip(groups, trains, strict=True)
    )


def chosen_prompts(hook: Hook, args: Any, groups: Sequence[SampleGroup], count: int) -> list[int]:
    """The prompts of the `count` groups that --buffer-filter-path takes. Raises RunError if they are others."""
    answer = hook(args, list(groups), count)
    known = {group.prompt.index for group in groups}
    prompts = (
        [group.prompt.index for group in answer]
        if isinstance(answer, (list, tuple)) and all(isinstance(group, SampleGroup) for group in answer)
        else None
    )
    if prompts is None or len(set(prompts)) != count or len(prompts) != count or not set(prompts) <= known:
        shown = str(answer)[:200] if prompts is None else f"the groups of prompts {prompts}"
        raise hook.error(f"gave {shown}; it must give {count} different ones of the {len(known)} groups.")
    return prompts


def logged(hook: Hook | None, *arguments: Any) -> dict[str, float]:
    """The further metrics that a log function gives: a dict of finite or infinite numbers; {} for None or a bool."""
    answer = hook(*arguments) if hook is not None else None
    if hook is None or answer is None or isinstance(answer, (bool, np.bool_)):
        return {}
    return checked_metrics(hook, answer)


def checked_metrics(hook: Hook, metrics: Any) -> dict[str, float]:
    """A user's metrics as numbers. Raises RunError for anything else."""
    if not isinstance(metrics, Mapping) or not all(isinstance(name, str) for name in metrics):
        raise hook.error(f"gave {str(metrics)[:200]}; metrics are a dict of names with numbers.")
    numbers = {}
    for name, value in metrics.items():
        try:
            numbers[name] = math.nan if isinstance(value, (str, bytes)) else float(value)
        except (TypeError, ValueError):
            numbers[name] = math.nan
        if math.isnan(numbers[name]):
            raise hook.error(f"the metric {name!r} is {value!r}, no number.")
    return numbers


def eval_data(sets: Mapping[str, Sequence[SampleGroup]]) -> dict[str, dict[str, list]]:
    """What --custom-eval-rollout-log-function-path gets: of each set all samples, their rewards, and which were cut."""
    data: dict[str, dict[str, list]] = {}
    for name, groups in sets.items():
        samples = [sample for group in groups for sample in group.samples]
        data[name] = {
            "samples": samples,
            "rewards": [sample.reward for sample in samples],
            "truncated": [sample.status == TRUNCATED for sample in samples],
        }
    return data


def _as_bool(flag: Any) -> bool:
    if not isinstance(flag, (bool, np.bool_)):
        raise TypeError(f"{flag!r} is no bool")
    return bool(flag)
