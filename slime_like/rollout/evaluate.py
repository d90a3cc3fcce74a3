"""Evaluation on data of its own, which moves nothing of the training's."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from slime_like.config.run import RunConfig
from slime_like.records import FAILED, TRUNCATED, SampleGroup
from slime_like.rollout.data_source import DataSource, context_tokens
from slime_like.rollout.generate import Sampling
from slime_like.rollout.groups import GroupMaker, refuse_if_all_failed
from slime_like.rollout.pass_rates import pass_rates
from slime_like.rollout.rollout_metrics import part_means


def eval_sampling(config: RunConfig, name: str) -> Sampling:
    """The training's sampling with the --eval-* flags over it, and seeds of its own."""
    sampling = Sampling.for_training(
        config.rollout, max_context_tokens=context_tokens(config), seed=f"{config.data.rollout_seed}/eval/{name}"
    )
    flags: dict[str, Any] = {
        "temperature": config.eval.eval_temperature,
        "top_p": config.eval.eval_top_p,
        "top_k": config.eval.eval_top_k,
        "max_response_tokens": config.eval.eval_max_response_len,
    }
    return dataclasses.replace(sampling, **{field: value for field, value in flags.items() if value is not None})


async def evaluate(maker: GroupMaker, name: str, source: DataSource, config: RunConfig) -> tuple[SampleGroup, ...]:
    """The groups of one data set: every row once, --n-samples-per-eval-prompt samples each.

    Raises RunError if none could be generated.
    """
    prompts = [source.prompt_at(position) for position in range(len(source.rows))]
    outcomes = await maker.groups(prompts, config.eval.n_samples_per_eval_prompt, eval_sampling(config, name))
    refuse_if_all_failed(outcomes)
    return tuple(outcome.group for outcome in outcomes)


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
