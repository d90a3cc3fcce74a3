"""Metrics of a rollout: what its samples are like, what was drawn and not kept, and where the ledger stands.

All names are here.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

import numpy as np

from slime_like.records import TRUNCATED, Sample, SampleGroup
from slime_like.rollout.group_stream import FAILED_GROUP, SURPLUS
from slime_like.rollout.groups import GroupOutcome
from slime_like.rollout.ledger import Ledger

#: Before a filter's own reason, where groups are counted by why they were dropped.
FILTERED = "filter/"


def sample_metrics(groups: tuple[SampleGroup, ...], *, mask_truncated: bool = False) -> dict[str, float]:
    """What the kept samples are like. mask_truncated: truncated ones train nothing, however their loss masks are."""
    samples = [sample for group in groups for sample in group.samples]
    rewards = np.concatenate([group.rewards for group in groups])
    lengths = np.array([sample.num_response_tokens for sample in samples])
    return {
        "rollout/reward_mean": float(rewards.mean()),
        "rollout/reward_std": float(rewards.std()),
        "rollout/response_tokens_mean": float(lengths.mean()),
        "rollout/response_tokens_max": float(lengths.max()),
        "rollout/tokens": float(lengths.sum()),
        "rollout/truncated_ratio": float(np.mean([sample.status == TRUNCATED for sample in samples])),
        "rollout/untrained_samples": float(
            sum(not sample.loss_mask.any() or mask_truncated and sample.status == TRUNCATED for sample in samples)
        ),
        "rollout/zero_std_groups": float(sum(np.ptp(group.rewards) == 0 for group in groups)),
        **part_means(samples, "reward/"),
    }


def part_means(samples: Sequence[Sample], prefix: str) -> dict[str, float]:
    """The means of the rewards' parts ("rule", "model" before weighting, "overlong") over the samples that have them.

    {} where a reward has but one.
    """
    parts: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.reward_parts.items():
            parts.setdefault(name, []).append(value)
    return {prefix + name: float(np.mean(values)) for name, values in parts.items()}


def drop_metrics(outcomes: Sequence[GroupOutcome], dropped: collections.Counter[str]) -> dict[str, float]:
    """What was drawn, and what was not kept. dropped: reason -> groups, as group_stream has them."""
    filtered = {
        reason.removeprefix(FILTERED): count for reason, count in dropped.items() if reason.startswith(FILTERED)
    }
    return {
        "rollout/prompts": float(len(outcomes)),
        "rollout/generated_tokens": float(
            sum(sample.num_response_tokens for outcome in outcomes for sample in outcome.group.samples)
        ),
        "rollout/failed_requests": float(sum(outcome.num_failures for outcome in outcomes)),
        "rollout/failed_samples": float(sum(len(outcome.failed) for outcome in outcomes)),
        "rollout/interrupted_requests": float(sum(outcome.num_interrupted for outcome in outcomes)),
        "rollout/dropped_groups": float(dropped[FAILED_GROUP]),
        "rollout/filtered_groups": float(sum(filtered.values())),
        "rollout/surplus_groups": float(dropped[SURPLUS]),
        **{f"rollout/filtered_groups/{reason}": float(count) for reason, count in filtered.items()},
    }


def ledger_metrics(ledger: Ledger) -> dict[str, float]:
    """Where all prompts that were ever drawn stand."""
    return {f"rollout/ledger/{state}": float(count) for state, count in ledger.counts().items()}
