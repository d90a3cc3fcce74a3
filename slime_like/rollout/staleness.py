"""How old what is trained on is: by the token, in rollout steps and in weight versions."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from slime_like.errors import RunError
from slime_like.records import Sample, SampleGroup
from slime_like.rollout.group_pool import STALE, Taken


def staleness_metrics(
    groups: Sequence[SampleGroup], taken: Taken, step: int, trained_on: Mapping[int, int], bound: int | None
) -> dict[str, float]:
    """`async/…` of the groups that are trained on in rollout `step`.

    trained_on: weight version -> rollouts that it was trained on; a token is as many rollout steps stale as have been
    trained on since. bound: --max-staleness. version_spread: between the first and the last token of an answer.
    """
    samples = [sample for group in groups for sample in group.samples]
    ages = np.concatenate([_ages(sample, step, trained_on) for sample in samples] or [np.zeros(0, dtype=np.int64)])
    spreads = np.array([_spread(sample) for sample in samples] or [0])
    late = 0 if bound is None else sum(step - begun_with > bound for begun_with in taken.begun_with)
    return {
        "async/staleness_mean": float(ages.mean()) if len(ages) else 0.0,
        "async/staleness_max": float(ages.max(initial=0)),
        "async/version_spread_mean": float(spreads.mean()),
        "async/version_spread_max": float(spreads.max()),
        "async/mixed_samples": float(np.count_nonzero(spreads)),
        "async/dropped_groups": float(taken.dropped[STALE]),
        "async/requeued_groups": float(taken.requeued),
        "async/late_groups": float(late),
        "async/buffer_depth": float(taken.num_ready),
        "async/groups_in_flight": float(taken.num_running),
        "async/rollout_idle_seconds": taken.idle_s,
        "async/rollout_held_seconds": taken.held_s,
        "async/tokens_thrown_away": float(taken.thrown_tokens),
    }


def check_bound(groups: Sequence[SampleGroup], step: int, trained_on: Mapping[int, int], bound: int) -> None:
    """Raise RunError if a token that is trained on in rollout `step` is staler than --max-staleness: that is a fault
    of ours, or of an engine that serves other weights than it was sent.
    """
    for group in groups:
        for sample in group.samples:
            oldest = int(_ages(sample, step, trained_on).max(initial=0))
            if oldest > bound:
                versions = sorted(set(sample.weight_versions[sample.weight_versions >= 0].tolist()))
                raise RunError(
                    f"prompt {sample.prompt_index}, sample {sample.sample_index} of rollout {step} is {oldest} rollout"
                    f" steps stale (weight versions {versions}), above --max-staleness {bound}."
                )


def without_older(groups: Sequence[SampleGroup], version: int) -> tuple[SampleGroup, ...]:
    """The groups with only those tokens trained on that weights of `version` said."""
    return tuple(
        dataclasses.replace(group, samples=tuple(_without_older(sample, version) for sample in group.samples))
        for group in groups
    )


def _without_older(sample: Sample, version: int) -> Sample:
    mask = np.where(sample.weight_versions == version, sample.loss_mask, 0).astype(sample.loss_mask.dtype)
    return dataclasses.replace(sample, loss_mask=mask)


def _ages(sample: Sample, step: int, trained_on: Mapping[int, int]) -> np.ndarray:
    """Rollout steps of each token that is trained on. A version that was never announced counts as the first."""
    versions, counts = np.unique(sample.weight_versions[sample.loss_mask != 0], return_counts=True)
    return np.repeat([step - trained_on.get(version, 0) for version in versions.tolist()], counts).astype(np.int64)


def _spread(sample: Sample) -> int:
    versions = sample.weight_versions[sample.weight_versions >= 0]
    return int(np.ptp(versions)) if len(versions) else 0
