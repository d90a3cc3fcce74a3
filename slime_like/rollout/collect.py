"""Fill one rollout with groups: draw, generate, drop what failed or was filtered, and draw again within a bound."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from slime_like.config.rollout import RolloutConfig
from slime_like.errors import RunError
from slime_like.records import TRUNCATED, Sample, SampleGroup
from slime_like.rollout.data_source import DataSource
from slime_like.rollout.filters import apply_filter
from slime_like.rollout.generate import Sampling
from slime_like.rollout.groups import GroupMaker, GroupOutcome, refuse_if_all_failed


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutResult:
    """Exactly rollout_batch_size groups in the order of their prompts, and the rollout's metrics."""

    groups: tuple[SampleGroup, ...]
    metrics: dict[str, float]


class Collector:
    """Draws prompts until the rollout is full.

    A draw is waited for as a whole and its groups are kept in the prompts' order: taking whichever finish first would prefer
    short answers. Surplus groups of the last draw are dropped, and counted.
    """

    def __init__(self, source: DataSource, maker: GroupMaker, rollout: RolloutConfig, *, sampling: Sampling, group_filter: Callable | None, plugin_args: Any):
        self._source = source
        self._maker = maker
        self._rollout = rollout
        self._sampling = sampling
        self._filter = group_filter
        self._args = plugin_args

    async def collect(self) -> RolloutResult:
        """One rollout. Raises RunError if the bound on draws is reached, naming why groups were dropped."""
        wanted = self._rollout.rollout_batch_size
        limit = wanted * self._rollout.dynamic_sampling_max_draws
        kept: list[SampleGroup] = []
        outcomes: list[GroupOutcome] = []
        reasons: collections.Counter[str] = collections.Counter()
        while len(kept) < wanted:
            # Without a filter only failures leave gaps, and a gap is one prompt.
            count = (self._rollout.over_sampling_batch_size or wanted) if self._filter else wanted - len(kept)
            count = min(count, limit - len(outcomes))
            if count <= 0:
                raise RunError(self._exhausted(len(outcomes), len(kept), reasons, outcomes))
            drawn = await self._maker.groups(self._source.draw(count), self._rollout.n_samples_per_prompt, self._sampling)
            outcomes += drawn
            refuse_if_all_failed(outcomes)
            kept += [outcome.group for outcome in drawn if self._keep(outcome, reasons)]
        groups = tuple(kept[:wanted])
        metrics = sample_metrics(groups, mask_truncated=self._rollout.mask_truncated_samples) | drop_metrics(outcomes, reasons, num_surplus=len(kept) - wanted)
        return RolloutResult(groups=groups, metrics=metrics)

    def _keep(self, outcome: GroupOutcome, reasons: collections.Counter[str]) -> bool:
        if outcome.failed:
            reasons["failed"] += 1
            return False
        if self._filter is None:
            return True
        keep, reason = apply_filter(self._filter, str(self._rollout.dynamic_sampling_filter_path), self._args, outcome.group)
        if not keep:
            reasons[f"filter/{reason}"] += 1
        return keep

    def _exhausted(self, num_drawn: int, num_kept: int, reasons: collections.Counter[str], outcomes: list[GroupOutcome]) -> str:
        why = ", ".join(f"{reason} {count}" for reason, count in reasons.most_common())
        errors = [sample.error for outcome in outcomes for sample in outcome.failed]
        last = f" Last failure: {errors[-1]}" if errors else ""
        return (
            f"rollout: of {num_drawn} prompts only {num_kept} of {self._rollout.rollout_batch_size} groups could be kept "
            f"(--dynamic-sampling-max-draws {self._rollout.dynamic_sampling_max_draws}). Dropped: {why}.{last}"
        )


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
        "rollout/untrained_samples": float(sum(not sample.loss_mask.any() or mask_truncated and sample.status == TRUNCATED for sample in samples)),
        "rollout/zero_std_groups": float(sum(np.ptp(group.rewards) == 0 for group in groups)),
        **part_means(samples, "reward/"),
    }


def part_means(samples: Sequence[Sample], prefix: str) -> dict[str, float]:
    """The means of the rewards' parts ("rule", "model" before weighting, "overlong") over the samples that have them; {} where a reward has but one."""
    parts: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.reward_parts.items():
            parts.setdefault(name, []).append(value)
    return {prefix + name: float(np.mean(values)) for name, values in parts.items()}


def drop_metrics(outcomes: list[GroupOutcome], reasons: collections.Counter[str], *, num_surplus: int) -> dict[str, float]:
    """What was drawn and not kept."""
    filtered = {reason.removeprefix("filter/"): count for reason, count in reasons.items() if reason.startswith("filter/")}
    return {
        "rollout/prompts": float(len(outcomes)),
        "rollout/generated_tokens": float(sum(sample.num_response_tokens for outcome in outcomes for sample in outcome.group.samples)),
        "rollout/failed_requests": float(sum(outcome.num_failures for outcome in outcomes)),
        "rollout/failed_samples": float(sum(len(outcome.failed) for outcome in outcomes)),
        "rollout/dropped_groups": float(reasons["failed"]),
        "rollout/filtered_groups": float(sum(filtered.values())),
        "rollout/surplus_groups": float(num_surplus),
        **{f"rollout/filtered_groups/{reason}": float(count) for reason, count in filtered.items()},
    }
