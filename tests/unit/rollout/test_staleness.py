"""Ages of tokens, by hand."""

from __future__ import annotations

import collections

import numpy as np
import pytest

from slime_like.errors import RunError
from slime_like.records import Prompt, Sample, SampleGroup
from slime_like.rollout.group_pool import STALE, Taken
from slime_like.rollout.staleness import check_bound, staleness_metrics, without_older

#: Weight version -> rollouts that it was trained on: a sync every two rollouts.
TRAINED_ON = {1: 0, 2: 2, 3: 4}


def group(*versions: list[int], index: int = 0) -> SampleGroup:
    """A group whose samples' response tokens have these versions."""
    prompt = Prompt(index=index, text="", tokens=np.array([1], dtype=np.int32))
    samples = tuple(
        Sample(
            prompt_index=index,
            sample_index=number,
            tokens=np.zeros(len(row) + 1, np.int32),
            loss_mask=np.array([0] + [1] * len(row), np.int8),
            engine_logprobs=np.zeros(len(row) + 1, np.float32),
            weight_versions=np.array([-1, *row], np.int32),
            response="",
            reward=0.0,
        )
        for number, row in enumerate(versions)
    )
    return SampleGroup(prompt=prompt, samples=samples)


def test_each_token_is_as_stale_as_the_weights_that_said_it():
    groups = (group([1, 1, 2], [2, 3]), group([3], index=1))
    taken = Taken(
        groups=groups,
        outcomes=(),
        dropped=collections.Counter({STALE: 2, "failed": 1}),
        requeued=3,
        begun_with=(0, 4),
        thrown_tokens=7,
        num_ready=5,
        num_running=6,
        idle_s=1.5,
        held_s=0.5,
    )
    metrics = staleness_metrics(groups, taken, 5, TRAINED_ON, bound=4)
    assert metrics["async/staleness_mean"] == pytest.approx((5 + 5 + 3 + 3 + 1 + 1) / 6)
    assert metrics["async/staleness_max"] == 5 and metrics["async/late_groups"] == 1
    assert (metrics["async/version_spread_mean"], metrics["async/version_spread_max"]) == (pytest.approx(2 / 3), 1)
    assert metrics["async/mixed_samples"] == 2
    counts = [metrics[f"async/{name}"] for name in ("dropped_groups", "requeued_groups", "tokens_thrown_away")]
    assert counts == [2, 3, 7] and (metrics["async/buffer_depth"], metrics["async/groups_in_flight"]) == (5, 6)
    assert (metrics["async/rollout_idle_seconds"], metrics["async/rollout_held_seconds"]) == (1.5, 0.5)


def test_what_is_too_stale_never_passes_unseen():
    groups = (group([3]), group([3, 3], [1, 2], index=7))
    check_bound(groups, 4, TRAINED_ON, 4)
    with pytest.raises(RunError, match=r"prompt 7, sample 1 of rollout 5 is 5 rollout steps stale .*\[1, 2\].*above"):
        check_bound(groups, 5, TRAINED_ON, 4)


def test_tokens_of_older_weights_are_left_out_of_the_loss_only():
    (masked,) = without_older([group([1, 2, 2], [1, 1])], 2)
    assert [sample.loss_mask.tolist() for sample in masked.samples] == [[0, 0, 1, 1], [0, 0, 0]]
    assert masked.samples[0].weight_versions.tolist() == [-1, 1, 2, 2] and masked.samples[0].loss_mask.dtype == np.int8
