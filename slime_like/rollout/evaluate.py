"""Evaluation on data of its own, which moves nothing of the training's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from slime_like.config.run import RunConfig
from slime_like.errors import RunError
from slime_like.records import FAILED, TRUNCATED, SampleGroup, WeightsRef
from slime_like.rollout.data_source import DataSource, context_tokens
from slime_like.rollout.generate import Sampling
from slime_like.rollout.groups import GroupMaker, refuse_if_all_failed
from slime_like.rollout.pass_rates import pass_rates
from slime_like.rollout.rollout_metrics import part_means


def eval_sampling(config: RunConfig, name: str) -> Sampling:
    """The training's sampling with the --eval-* flags over it, the set's own settings over those, and its own seeds."""
    limit = config.eval.setting(name, "max_context_len")
    context = min(limit or context_tokens(config), config.model.context_tokens)
    sampling = Sampling.for_training(
        config.rollout, max_context_tokens=context, seed=f"{config.data.rollout_seed}/eval/{name}"
    )
    fields = {
        "temperature": "temperature",
        "top_p": "top_p",
        "top_k": "top_k",
        "max_response_tokens": "max_response_len",
        "min_response_tokens": "min_new_tokens",
        "stop": "stop",
        "stop_token_ids": "stop_token_ids",
    }
    settings: dict[str, Any] = {ours: config.eval.setting(name, setting) for ours, setting in fields.items()}
    return dataclasses.replace(sampling, **{ours: value for ours, value in settings.items() if value is not None})


async def evaluate(maker: GroupMaker, name: str, source: DataSource, config: RunConfig) -> tuple[SampleGroup, ...]:
    """The groups of one data set: every row once, --n-samples-per-eval-prompt samples each.

    Raises RunError if none could be generated.
    """
    prompts = [source.prompt_at(position) for position in range(len(source.rows))]
    outcomes = await maker.groups(
        prompts, config.eval.setting(name, "n_samples_per_eval_prompt"), eval_sampling(config, name)
    )
    refuse_if_all_failed(outcomes)
    return tuple(outcome.group for outcome in outcomes)


def check_versions(name: str, groups: Sequence[SampleGroup], weights: WeightsRef) -> None:
    """Raises RunError naming the first sample with a token of other weights."""
    for group in groups:
        for sample in group.samples:
            versions = {int(version) for version in np.unique(sample.weight_versions) if version >= 0}
            if not versions <= {weights.version}:
                raise RunError(
                    f"evaluation set {name}, prompt {sample.prompt_index}, sample {sample.sample_index}: its tokens are"
                    f" of weight versions {sorted(versions)}, but the evaluation is of {weights}. Somebody else changed"
                    " the weights of an engine that was set aside for it (--eval-num-engines)."
                )


def set_metrics(name: str, groups: Sequence[SampleGroup], threshold: float) -> dict[str, float]:
    """Metrics of one data set's groups.

    reward_mean is over prompts and samples, pass@k as in pass_at_k: a sample passes from `threshold` on. One that could
    not be generated has reward 0, does not pass and counts in failed_samples.
    """
    samples = [sample for group in groups for sample in group.samples]
    return {
        f"eval/{name}/reward_mean": float(np.mean(np.concatenate([group.rewards for group in groups]))),
        f"eval/{name}/response_tokens_mean": float(np.mean([sample.num_response_tokens for sample in samples])),
        f"eval/{name}/truncated_ratio": float(np.mean([sample.status == TRUNCATED for sample in samples])),
        f"eval/{name}/failed_samples": float(sum(sample.status == FAILED for sample in samples)),
        f"eval/{name}/samples": float(len(samples)),
        **part_means(samples, f"eval/{name}/reward_"),
        **{f"eval/{name}/{rate}": value for rate, value in pass_rates(groups, threshold).items()},
    }
