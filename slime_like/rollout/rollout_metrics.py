"""Metrics of a rollout: what its samples are like, what was drawn and not kept, and where the ledger stands.

All names are here.
"""

from __future__ import annotations

import collections
from collections.abc import Sequence

import numpy as np

from slime_like.config.observability import ObservabilityConfig
from slime_like.records import FAILED, TRUNCATED, Sample, SampleGroup
from slime_like.rollout.group_pool import FAILED_GROUP, SURPLUS
from slime_like.rollout.groups import GroupOutcome
from slime_like.rollout.ledger import Ledger
from slime_like.rollout.pass_rates import pass_rates

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
            sum(
                not length or mask_truncated and sample.status == TRUNCATED
                for sample, length in zip(samples, lengths.tolist(), strict=True)
            )
        ),
        "rollout/zero_std_groups": float(sum(np.ptp(group.rewards) == 0 for group in groups)),
        **part_means(samples, "reward/"),
    }


def detail_metrics(groups: Sequence[SampleGroup], config: ObservabilityConfig, threshold: float) -> dict[str, float]:
    """What --log-passrate, --log-multi-turn and --log-correct-samples add; a sample passes from `threshold` on."""
    metrics: dict[str, float] = {}
    if config.log_passrate:
        metrics |= {f"rollout/{name}": value for name, value in pass_rates(groups, threshold).items()}
    if config.log_multi_turn:
        metrics |= _turn_metrics([sample for group in groups for sample in group.samples])
    if config.log_correct_samples:
        metrics |= _correct_metrics(groups, threshold)
    return metrics


def _turn_metrics(samples: Sequence[Sample]) -> dict[str, float]:
    """Turns are the stretches of tokens that the policy chose; what lies between them, or behind, it has observed."""
    chosen = [sample.weight_versions >= 0 for sample in samples]
    turns = np.array([np.count_nonzero(np.diff(flags.astype(np.int8), prepend=0) == 1) for flags in chosen])
    begins = [int(flags.argmax()) if flags.any() else len(flags) for flags in chosen]
    observed = np.array(
        [np.count_nonzero(~flags[begin:]) for flags, begin in zip(chosen, begins, strict=True)], dtype=np.float64
    )
    return {
        "rollout/turns_mean": float(turns.mean()),
        "rollout/turns_max": float(turns.max()),
        "rollout/observed_tokens_mean": float(observed.mean()),
        "rollout/observed_tokens_max": float(observed.max()),
    }


def _correct_metrics(groups: Sequence[SampleGroup], threshold: float) -> dict[str, float]:
    """Of the answers that pass: their share, length, and the engines' mean log-prob of a token."""
    episodes = [
        (segments[-1], segments[-1].status != FAILED and reward >= threshold)
        for group in groups
        for segments, reward in zip(group.episodes, group.rewards, strict=True)
    ]
    correct = [sample for sample, passes in episodes if passes]
    metrics = {"rollout/correct/share": len(correct) / len(episodes)}
    trained = [sample for sample in correct if sample.loss_mask.any()]
    if trained:
        logprobs = np.concatenate([sample.engine_logprobs[sample.loss_mask != 0] for sample in trained])
        metrics["rollout/correct/logprob_mean"] = float(logprobs.mean())
        lengths = [sample.num_response_tokens for sample in trained]
        metrics["rollout/correct/response_tokens_mean"] = float(np.mean(lengths))
    return metrics


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
        "rollout/user_errors": float(sum(outcome.user_error is not None for outcome in outcomes)),
        "rollout/interrupted_requests": float(sum(outcome.num_interrupted for outcome in outcomes)),
        "rollout/dropped_groups": float(dropped[FAILED_GROUP]),
        "rollout/filtered_groups": float(sum(filtered.values())),
        "rollout/surplus_groups": float(dropped[SURPLUS]),
        **{f"rollout/filtered_groups/{reason}": float(count) for reason, count in filtered.items()},
    }


def ledger_metrics(ledger: Ledger) -> dict[str, float]:
    """Where all prompts that were ever drawn stand."""
    return {f"rollout/ledger/{state}": float(count) for state, count in ledger.counts().items()}
