"""Which groups are worth training on: dynamic sampling filters, built-in and the user's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from slime_like.errors import RunError
from slime_like.records import Sample, SampleGroup


def reward_nonzero_std(args: Any, samples: Sequence[Sample]) -> tuple[bool, str]:
    """Keep groups whose rewards differ: equal rewards have zero advantage and teach nothing (DAPO, arXiv:2503.14476).

    Use with --dynamic-sampling-filter-path slime_like.rollout.filters.reward_nonzero_std
    """
    rewards = np.array([sample.reward for sample in samples])
    return bool(np.ptp(rewards) > 0), f"all_rewards_{rewards[0]:g}"


def apply_filter(function: Callable, path: str, args: Any, group: SampleGroup) -> tuple[bool, str]:
    """(keep, reason) of one group.

    Raises RunError naming the prompt if the user's filter raises or answers anything else.
    """
    where = f"--dynamic-sampling-filter-path {path}, prompt {group.prompt.index}"
    try:
        answer = function(args, list(group.samples))
    except Exception as error:
        raise RunError(f"{where}: the filter raised {type(error).__name__}: {error}") from error
    keep, reason = answer if isinstance(answer, tuple) and len(answer) == 2 else (answer, "filtered")
    if not isinstance(keep, (bool, np.bool_)):
        raise RunError(f"{where}: the filter gave {answer!r}, neither a bool nor (bool, reason).")
    return bool(keep), str(reason or "filtered")
