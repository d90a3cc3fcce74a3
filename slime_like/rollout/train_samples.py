"""The last record on this side: what a trainer needs of each sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from slime_like.algorithms import group_advantages
from slime_like.algorithms.loss_plugins import load_loss_plugins
from slime_like.config.loss import LossConfig
from slime_like.config.run import RunConfig
from slime_like.errors import RunError
from slime_like.records import FAILED, TRUNCATED, Sample, SampleGroup, TrainSample, per_token


def custom_advantages(config: RunConfig) -> Callable[[list[Sample]], object] | None:
    """--custom-advantage-function-path as to_train_samples takes it; None without one. Raises PluginError; what it
    gives back raises RunError naming the prompt if the user's function raises."""
    function, args = load_loss_plugins(config.loss).advantage, config.plugin_args()
    if function is None:
        return None

    def advantages(samples: list[Sample]) -> object:
        try:
            return function(args, samples)
        except Exception as error:
            where = (
                f"--custom-advantage-function-path {config.loss.custom_advantage_function_path}, prompt"
                f" {samples[0].prompt_index}"
            )
            raise RunError(f"{where}: the function raised {type(error).__name__}: {error}") from error

    return advantages


def to_train_samples(
    groups: Iterable[SampleGroup],
    loss: LossConfig,
    custom: Callable[[list[Sample]], object] | None = None,
    *,
    group_size: int = 1,
    mask_truncated: bool = False,
) -> list[TrainSample]:
    """The groups' samples in order, each token with its sample's advantage; rewards are compared within one group only,
    however many it has.

    group_size: --n-samples-per-prompt; one sample that is left of several teaches nothing.
    custom: samples of a group -> their advantages (--custom-advantage-function-path); raises DataError if it gives
    something else. An answer of several samples (segments of an episode) is compared once, by its last one, and all of
    them get its advantage. A failed sample has nothing to train on: it is left out, of the group's baseline too. A
    sample whose loss mask is all zero, or a truncated one with mask_truncated (DAPO's overlong filtering,
    arXiv:2503.14476, sec. 3.4), trains nothing, but its reward is a part of the baseline.
    """
    train_samples = []
    dtype = np.float64 if loss.has_token_advantages else np.float32  # rounded once, after the last computation
    usable = [
        SampleGroup(prompt=group.prompt, samples=tuple(sample for sample in group.samples if sample.status != FAILED))
        for group in groups
    ]
    deviation = (
        group_advantages.batch_deviation(group.rewards for group in usable if group.samples)
        if loss.estimator.scale == "batch"
        else 0.0
    )
    for group in usable:
        if not group.samples:
            continue
        if custom is None:
            advantages = group_advantages.normalize(group.rewards, loss, group_size=group_size, deviation=deviation)
        else:
            last = [segments[-1] for segments in group.episodes]
            advantages = group_advantages.checked(custom(last), len(last), str(loss.custom_advantage_function_path))
        for segments, reward, advantage in zip(group.episodes, group.rewards, advantages, strict=True):
            train_samples += [
                _train_sample(sample, float(reward), float(advantage), mask_truncated, dtype) for sample in segments
            ]
    return train_samples


def _train_sample(
    sample: Sample, reward: float, advantage: float, mask_truncated: bool, dtype: type[np.floating]
) -> TrainSample:
    loss_mask = np.zeros_like(sample.loss_mask) if mask_truncated and sample.status == TRUNCATED else sample.loss_mask
    return TrainSample(
        prompt_index=sample.prompt_index,
        sample_index=sample.sample_index,
        tokens=sample.tokens,
        loss_mask=loss_mask,
        engine_logprobs=sample.engine_logprobs,
        weight_versions=sample.weight_versions,
        reward=reward,
        advantages=per_token(advantage, loss_mask, dtype),
        weights=per_token(1.0, loss_mask),
        routed_experts=sample.routed_experts,
        metadata=sample.metadata,
    )
